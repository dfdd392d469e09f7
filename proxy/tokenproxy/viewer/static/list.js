// The list of rollouts as one table, or their folds by a key of the metadata, with curves. Search, filter, fold
// and page are in the address; the server searches and folds.

import { compareAddress, listAddress, parse, sessionAddress } from "./address.js";
import { foldColumns, rolloutColumns } from "./columns.js";
import { MOST } from "./compare.js";
import { button, el, renew, select, setOptions } from "./dom.js";
import { ago, count, plural } from "./format.js";
import { foldPlots } from "./plots.js";
import { WindowedRows } from "./windowed.js";

const EVERY_MS = 2000;
const SOON_MS = 300; // while the server still reads turns
const REST = 5; // times as long as an answer took, so that an open page costs a server little
const PAGE = 100;
const TYPING_MS = 250;
const USUAL_KEYS = ["step", "group"];
const NARROW = matchMedia("(max-width: 760px)");
const HEIGHTS = { rollouts: [34, 92], folds: [34, 40] }; // px of a row: wide, narrow

export class ListView {
  constructor(app) {
    this.app = app;
    this.chosen = new Map();
    this.rowsData = [];
    this.keys = new Set(USUAL_KEYS);
    this.search = this.#makeSearch();
    this.messages = el("input", {
      type: "checkbox",
      onchange: () => this.#go({ messages: this.messages.checked ? "true" : "" }),
    });
    this.fold = select("Fold rollouts", [], "", (fold) => this.#go({ fold }));
    this.filters = el("span", { class: "filters" });
    this.tools = el(
      "form",
      { class: "tools", role: "search", onsubmit: (event) => event.preventDefault() },
      this.search,
      el("label", {}, this.messages, " in messages"),
      this.fold,
      this.filters,
    );
    this.status = el("p", { class: "status", role: "status" });
    this.plots = el("div", {
      class: "plots",
      role: "region",
      "aria-label": "Plots",
      tabindex: "0",
      hidden: true,
    });
    this.pager = el("div", { class: "pager" });
    this.rows = new WindowedRows({
      height: HEIGHTS.rollouts[0],
      role: "grid",
      rowRole: "row",
      label: "Sessions",
      head: true,
      draw: (index) => this.#row(this.rowsData[index]),
      name: (index) => this.#nameOf(this.rowsData[index]),
      state: (index) => `${this.query} ${JSON.stringify(this.rowsData[index])}`,
      onopen: (index, event) => {
        if (!event.target.closest?.("input, a")) location.hash = this.#addressOf(this.rowsData[index]);
      },
      onmark: (index, row) => row.querySelector("input")?.click(),
    });
    this.element = el(
      "div",
      { class: "list" },
      this.tools,
      this.status,
      this.plots,
      this.rows.element,
      this.pager,
    );
    this.resize = () => {
      this.#setHeight();
      this.rows.update(this.rowsData.length);
    };
    NARROW.addEventListener("change", this.resize);
  }

  async open(address) {
    this.query = new URLSearchParams(address.query);
    this.#showTools();
    await this.#load();
  }

  async move(address) {
    const query = new URLSearchParams(address.query);
    if (query.toString() === this.query.toString()) return;
    this.query = query;
    this.rows.activate(-1);
    this.rows.element.scrollTop = 0;
    this.#showTools();
    await this.#load();
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    NARROW.removeEventListener("change", this.resize);
    this.rows.close();
  }

  key(key) {
    if (key === "/") this.search.focus();
    else if (key === "j" || key === "k") {
      const next = Math.max(0, Math.min(this.rowsData.length - 1, this.rows.active + (key === "j" ? 1 : -1)));
      this.rows.activate(next);
      this.rows.element.focus({ preventScroll: true });
    } else return false;
    return true;
  }

  get kind() {
    return this.answer?.object === "folds" ? "folds" : "rollouts";
  }

  /** The address with other parameters: the first page, unless they name another. An empty one is left out. */
  #with(changes) {
    const query = new URLSearchParams(this.query);
    for (const [name, values] of Object.entries({ before: "", ...changes })) {
      query.delete(name);
      for (const value of [values].flat()) if (value) query.append(name, value);
    }
    return listAddress(query);
  }

  #go(changes) {
    // what was typed last is searched for a moment later
    if (this.closed || parse(location.hash).kind !== "list") return;
    location.hash = this.#with({ search: this.search.value, ...changes });
  }

  /** Show what the address asks for, and ask again from then on, also after a failure. */
  async #load() {
    clearTimeout(this.timer);
    const { query } = this;
    const parameters = new URLSearchParams(query);
    if (!query.get("fold")) parameters.set("limit", String(PAGE));
    const began = performance.now();
    let pause = EVERY_MS;
    try {
      const answer = await this.app.source.sessions(parameters);
      if (!this.#awaits(query)) return;
      pause = Math.max(answer.reading ? SOON_MS : EVERY_MS, REST * (performance.now() - began));
      this.#showAnswer(answer);
      this.#showAges();
    } finally {
      if (this.#awaits(query)) this.#pollAfter(pause);
    }
  }

  /** Whether an answer to a query is still wanted. */
  #awaits(query) {
    return !this.closed && this.query === query;
  }

  #pollAfter(pause) {
    if (!this.app.source.live) return;
    const next = () => {
      if (document.hidden) this.timer = setTimeout(next, EVERY_MS);
      else this.#poll();
    };
    this.timer = setTimeout(next, pause);
  }

  async #poll() {
    const { query } = this;
    try {
      await this.#load();
      if (this.#awaits(query)) this.app.report(null);
    } catch (error) {
      if (this.#awaits(query)) this.app.report(error);
    }
  }

  #showAnswer(answer) {
    const text = JSON.stringify([this.query.toString(), answer]);
    if (text === this.shown) return;
    this.shown = text;
    this.answer = answer;
    this.rowsData = answer.data;
    for (const key of answer.keys ?? answer.data.flatMap((row) => Object.keys(row.metadata ?? {})))
      this.keys.add(key);
    this.#showTools();
    this.status.textContent = this.kind === "folds" ? this.#foldText(answer) : this.#listText(answer);
    const plots = this.kind === "folds" ? foldPlots(answer.data, this.query.get("fold")) : [];
    this.plots.hidden = plots.length === 0;
    renew(this.plots, plots);
    this.columns =
      this.kind === "folds"
        ? foldColumns(this.query.get("fold"), (row) => this.#addressOf(row))
        : rolloutColumns((row) => this.#box(row));
    renew(
      this.rows.head,
      el(
        "div",
        { class: `list-head ${this.kind}`, role: "row" },
        this.columns.map(({ head, name }) => el("span", { class: `cell ${name}`, role: "columnheader" }, head)),
      ),
    );
    this.#setHeight();
    this.rows.update(this.rowsData.length);
    this.#showPager(answer);
  }

  #setHeight() {
    this.rows.setHeight(HEIGHTS[this.kind][NARROW.matches ? 1 : 0]);
  }

  #listText({ data, next }) {
    const search = this.query.get("search") || this.query.has("where");
    if (data.length === 0 && !search && !this.query.get("before"))
      return "No sessions yet: send a request to /v1/chat/completions, and it appears here.";
    const found = plural(data.length, "session");
    if (!next) return found;
    return search ? `${found}, older ones are not searched yet` : `${found}, there are older ones`;
  }

  /** What the folds cover. */
  #foldText({ data, folds, rollouts, next }) {
    const read = data.reduce((total, fold) => total + fold.read, 0);
    return [
      `${plural(folds, "value")} of ${this.query.get("fold")} in ${plural(rollouts, "rollout")}`,
      folds > data.length ? `the first ${count(data.length)} are shown` : "",
      next ? "older rollouts are not counted" : "",
      read < rollouts ? `drift is that of the ${count(read)} rollouts read so far` : "",
    ]
      .filter(Boolean)
      .join("; ");
  }

  /** Rows that do not change stay in the document, and grow older there. */
  #showAges() {
    for (const age of this.rows.element.querySelectorAll("[data-used]"))
      age.textContent = ago(Number(age.dataset.used));
  }

  #makeSearch() {
    return el("input", {
      type: "search",
      placeholder: "name or metadata",
      "aria-label": "Search sessions",
      oninput: () => {
        clearTimeout(this.typing);
        this.typing = setTimeout(() => {
          this.typing = null;
          this.#go({});
        }, TYPING_MS);
      },
    });
  }

  /** Show what the address searches, filters and folds; what a reader types meanwhile stays. */
  #showTools() {
    const { query } = this;
    if (!this.typing) this.search.value = query.get("search") ?? "";
    this.messages.checked = query.get("messages") === "true";
    const fold = query.get("fold") ?? "";
    const keys = fold ? new Set([...this.keys, fold]) : this.keys;
    setOptions(
      this.fold,
      [["", "every rollout"], ...[...keys].map((key) => [key, `fold by ${key}`])],
      fold,
    );
    renew(
      this.filters,
      query.getAll("where").map((pair) =>
        button(`${pair} ×`, () => this.#go({ where: query.getAll("where").filter((each) => each !== pair) }), {
          class: "filter",
          title: "show others too",
        }),
      ),
    );
  }

  #showPager({ next }) {
    const chosen = [...this.chosen.values()];
    renew(
      this.pager,
      this.query.get("before") ? button("newest", () => this.#go({})) : null,
      next ? button("older", () => this.#go({ before: next })) : null,
      chosen.length > 0
        ? button(
            `compare ${chosen.length}`,
            () => {
              location.hash = compareAddress(chosen.map((session) => ({ session })));
            },
            { disabled: chosen.length < 2 || chosen.length > MOST, title: `2 to ${MOST} sessions` },
          )
        : null,
    );
  }

  #nameOf(row) {
    if (this.kind === "rollouts") return row.id;
    return row.value === null ? "" : `=${row.value}`;
  }

  /** Where a row leads: to its session, or to the rollouts of its fold, which steps show by group. */
  #addressOf(row) {
    if (this.kind === "rollouts") return sessionAddress(row.id);
    if (row.value === null) return location.hash; // no pair finds what is missing
    const fold = this.query.get("fold");
    const nested = this.app.source.live && fold === "step" && this.answer.keys.includes("group");
    const where = [...this.query.getAll("where"), `${fold}=${row.value}`];
    return this.#with({ where, fold: nested ? "group" : "" });
  }

  #row(row) {
    const data = this.kind === "folds" ? { fold: row.value } : { session: row.id };
    return el(
      "div",
      { class: `list-row ${this.kind}`, data },
      this.columns.map(({ name, unit, cell }) =>
        el("div", { class: `cell ${name}`, role: "gridcell", data: unit ? { unit } : {} }, cell(row)),
      ),
    );
  }

  #box(row) {
    const box = el("input", {
      type: "checkbox",
      "aria-label": `Choose ${row.id} for a comparison`,
      checked: this.chosen.has(row.id),
      tabindex: "-1",
      onchange: () => {
        if (box.checked) this.chosen.set(row.id, row.id);
        else this.chosen.delete(row.id);
        this.#showPager(this.answer);
      },
    });
    return box;
  }
}
