// The list of sessions, the most recently used first: search and page are in the address, the server searches.

import { compareAddress, listAddress, parse, sessionAddress } from "./address.js";
import { MOST } from "./compare.js";
import { button, el, renew } from "./dom.js";
import { ago, count, plural, reward, time } from "./format.js";
import { badge } from "./turn.js";
import { WindowedRows } from "./windowed.js";

const EVERY_MS = 2000;
const PAGE = 100;
const ROW = 46;
const TYPING_MS = 250;

export class ListView {
  constructor(app) {
    this.app = app;
    this.chosen = new Map();
    this.rowsData = [];
    this.search = this.#makeSearch();
    this.tools = el(
      "form",
      { class: "tools", role: "search", onsubmit: (event) => event.preventDefault() },
      this.search,
    );
    this.status = el("p", { class: "status", role: "status" });
    this.pager = el("div", { class: "pager" });
    this.rows = new WindowedRows({
      height: ROW,
      role: "grid",
      rowRole: "row",
      label: "Sessions",
      draw: (index) => this.#row(this.rowsData[index]),
      name: (index) => this.rowsData[index].id,
      state: (index) => JSON.stringify(this.rowsData[index]),
      onopen: (index, event) => {
        if (!event.target.closest?.("input, a")) location.hash = sessionAddress(this.rowsData[index].id);
      },
      onmark: (index, row) => row.querySelector("input").click(),
    });
    this.element = el("div", { class: "list" }, this.tools, this.status, this.rows.element, this.pager);
  }

  async open(address) {
    this.query = new URLSearchParams(address.query);
    this.#fillSearch();
    await this.#load();
  }

  async move(address) {
    const query = new URLSearchParams(address.query);
    if (query.toString() === this.query.toString()) return;
    this.query = query;
    this.rows.activate(-1);
    this.rows.element.scrollTop = 0;
    this.#fillSearch();
    await this.#load();
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
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

  /** Show the page of the search that begins after a place; the first one if there is none. */
  #go(before = null) {
    // what was typed last is searched for a moment later
    if (this.closed || parse(location.hash).kind !== "list") return;
    const search = this.search.value;
    location.hash = listAddress({ ...(search && { search }), ...(before && { before }) });
  }

  /** Show what the address asks for, and ask again from then on, also after a failure. */
  async #load() {
    clearTimeout(this.timer);
    const { query } = this;
    const parameters = new URLSearchParams(query);
    parameters.set("limit", String(PAGE));
    try {
      const answer = await this.app.source.sessions(parameters);
      if (!this.#awaits(query)) return;
      this.#showAnswer(answer);
      this.#showAges();
    } finally {
      if (this.#awaits(query)) this.#pollSoon();
    }
  }

  /** Whether an answer to a query is still wanted. */
  #awaits(query) {
    return !this.closed && this.query === query;
  }

  #pollSoon() {
    if (!this.app.source.live) return;
    const next = () => {
      if (document.hidden) this.timer = setTimeout(next, EVERY_MS);
      else this.#poll();
    };
    this.timer = setTimeout(next, EVERY_MS);
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
    this.status.textContent = this.#statusText(answer);
    this.rows.update(this.rowsData.length);
    this.#showPager(answer);
  }

  #statusText({ data, next }) {
    const search = this.query.get("search");
    if (data.length === 0 && !search && !this.query.get("before"))
      return "No sessions yet: send a request to /v1/chat/completions, and it appears here.";
    const found = plural(data.length, "session");
    if (!next) return found;
    return search ? `${found}, older ones are not searched yet` : `${found}, there are older ones`;
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
          this.#go();
        }, TYPING_MS);
      },
    });
  }

  /** Show what the address searches for; what a reader types meanwhile stays. */
  #fillSearch() {
    if (!this.typing) this.search.value = this.query.get("search") ?? "";
  }

  #showPager({ next }) {
    const chosen = [...this.chosen.values()];
    renew(
      this.pager,
      this.query.get("before") ? button("newest", () => this.#go()) : null,
      next ? button("older", () => this.#go(next)) : null,
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

  #row(row) {
    const metadata = Object.entries(row.metadata ?? {}).map(
      ([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`,
    );
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
    return el(
      "div",
      { class: "list-row", data: { session: row.id } },
      el("div", { role: "gridcell" }, box),
      el(
        "div",
        { class: "list-main", role: "gridcell" },
        el(
          "div",
          { class: "list-name" },
          el("a", { href: sessionAddress(row.id), tabindex: "-1" }, row.id),
          row.explicit ? null : badge("no name", "", "a conversation for which no client named a session"),
          row.ambiguous ? badge("ambiguous", "problem", "another rollout held an equal conversation") : null,
        ),
        el(
          "div",
          { class: "list-numbers" },
          el("span", { title: time(row.used), data: { used: row.used } }, ago(row.used)),
          el("span", {}, plural(row.turn_count, "turn")),
          row.bytes ? el("span", { title: "in the store" }, `${count(Math.ceil(row.bytes / 1000))} kB`) : null,
          el("span", { class: "metadata" }, metadata.join(" ")),
        ),
      ),
      el("span", { class: "list-reward", role: "gridcell" }, row.reward === null ? "" : reward(row.reward)),
    );
  }
}
