// The list of sessions: filters, order and page are in the address, the server does the work.

import { compareAddress, listAddress, parse, sessionAddress } from "./address.js";
import { MOST } from "./compare.js";
import { button, el, renew, select, setOptions, show } from "./dom.js";
import { ago, count, reward, time } from "./format.js";
import { reasonsPlot, rewardPlot } from "./plots.js";
import { badge } from "./turn.js";
import { WindowedRows } from "./windowed.js";

const EVERY_MS = 2000;
const SOON_MS = 150; // while the server is still reading sessions
const PAGE = 200;
const ROW = 46;
const TYPING_MS = 250;
const SORTS = [
  ["used", "last used"],
  ["created", "created"],
  ["reward", "reward"],
  ["drift", "drift"],
  ["turns", "turns"],
  ["ids", "longest path"],
  ["sampled", "sampled ids"],
  ["id", "name"],
];
const FACETS = [
  ["model", "models"],
  ["reason", "reasons"],
  ["problem", "problems"],
  ["class", "classes"],
  ["weight_version", "weight_versions"],
];

export class ListView {
  constructor(app) {
    this.app = app;
    this.chosen = new Map();
    this.rowsData = [];
    this.controls = new Map(); // by the name of the parameter that they set
    this.tools = el("form", { class: "tools", role: "search", onsubmit: (event) => event.preventDefault() });
    this.#makeTools();
    this.status = el("p", { class: "status", role: "status" });
    this.plots = el("div", { class: "plots" });
    this.plotsBox = el(
      "details",
      { class: "plots-box", ontoggle: () => this.#showPlots() },
      el("summary", {}, "Plots of these sessions"),
      this.plots,
    );
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
    this.element = el(
      "div",
      { class: "list" },
      this.tools,
      this.status,
      this.plotsBox,
      this.rows.element,
      this.pager,
    );
  }

  async open(address) {
    this.query = new URLSearchParams(address.query);
    this.#fillTools();
    await this.#load();
  }

  async move(address) {
    const query = new URLSearchParams(address.query);
    if (query.toString() === this.query.toString()) return;
    const before = this.query;
    this.query = query;
    this.rows.activate(-1);
    this.rows.element.scrollTop = 0;
    this.#fillTools(before);
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

  /** Change one parameter; the first page follows. */
  #set(name, value) {
    // what was typed last is searched for a moment later
    if (this.closed || parse(location.hash).kind !== "list") return;
    const query = new URLSearchParams(this.query);
    if (value) query.set(name, value);
    else query.delete(name);
    if (name !== "offset") query.delete("offset");
    location.hash = listAddress(query);
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
    this.timer = setTimeout(next, this.answer && !this.answer.complete ? SOON_MS : EVERY_MS);
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
    const text = JSON.stringify(answer);
    if (text === this.shown) return;
    this.shown = text;
    this.answer = answer;
    this.rowsData = answer.data;
    const reading = answer.complete ? "" : `, reading ${count(answer.read)} of ${count(answer.sessions)}…`;
    this.status.textContent =
      answer.sessions === 0
        ? "No sessions yet: send a request to /v1/chat/completions, and it appears here."
        : `${count(answer.matching)} of ${count(answer.sessions)} sessions${reading}`;
    this.rows.update(this.rowsData.length);
    if (this.app.source.live) this.#showFacets(answer.facets);
    this.#showPager(answer);
    this.#showPlots();
  }

  /** Rows that do not change stay in the document, and grow older there. */
  #showAges() {
    for (const age of this.rows.element.querySelectorAll("[data-used]"))
      age.textContent = ago(Number(age.dataset.used));
  }

  #makeTools() {
    this.search = el("input", {
      type: "search",
      placeholder: "name or metadata",
      "aria-label": "Search sessions",
      oninput: () => {
        clearTimeout(this.typing);
        this.typing = setTimeout(() => {
          this.typing = null;
          this.#set("search", this.search.value);
        }, TYPING_MS);
      },
    });
    if (!this.app.source.live) {
      show(this.tools, this.search); // a file has few sessions, and no server that filters them
      return;
    }
    const field = (name, label, properties) => {
      const input = el("input", { "aria-label": label, ...properties });
      input.addEventListener("change", () => this.#set(name, input.value));
      this.controls.set(name, input);
      return input;
    };
    const choice = (name, label, options) => {
      const made = select(label, options, "", (value) => this.#set(name, value));
      this.controls.set(name, made);
      return made;
    };
    const bound = { type: "number", step: "any" };
    this.order = button("", () => this.#set("order", this.query.get("order") === "asc" ? "" : "asc"));
    show(
      this.tools,
      this.search,
      field("metadata", "Metadata, as KEY=VALUE", { type: "text", placeholder: "group=7", size: "12" }),
      FACETS.map(([name]) => choice(name, name.replace("_", " "), [])),
      choice("drift", "Drift", [
        ["", "drift or not"],
        ["true", "only with drift"],
      ]),
      field("reward_min", "reward from", { ...bound, placeholder: "reward from" }),
      field("reward_max", "reward to", { ...bound, placeholder: "reward to" }),
      choice("sort", "Order by", SORTS),
      this.order,
      button("clear", () => {
        location.hash = "#/";
      }),
    );
  }

  /** Show in the controls what the address asks for; what a reader types or has opened meanwhile stays. */
  #fillTools(before = new URLSearchParams()) {
    if (!this.typing) this.search.value = this.query.get("search") ?? "";
    if (!this.app.source.live) return;
    this.#showFacets(this.answer?.facets ?? {});
    for (const [name, control] of this.controls) {
      const value = this.query.get(name) ?? "";
      if (value !== (before.get(name) ?? "")) control.value = value;
    }
    this.controls.get("sort").value = this.query.get("sort") ?? SORTS[0][0];
    const isUp = this.query.get("order") === "asc";
    this.order.textContent = isUp ? "↑" : "↓";
    this.order.setAttribute("aria-label", isUp ? "Ascending" : "Descending");
  }

  #showFacets(facets) {
    for (const [name, plural] of FACETS) {
      const choice = this.controls.get(name);
      const found = Object.entries(facets[plural] ?? {}).sort((a, b) => b[1] - a[1]);
      const chosen = this.query.get(name) ?? "";
      if (chosen && !found.some(([value]) => value === chosen)) found.push([chosen, 0]);
      choice.hidden = found.length === 0;
      const isThere = [...choice.options].some((option) => option.value === chosen);
      if (choice === document.activeElement && isThere) continue; // its list may be open
      const options = found.map(([value, sessions]) => [value, `${value} (${count(sessions)})`]);
      setOptions(choice, [["", `any ${name.replace("_", " ")}`], ...options], chosen);
    }
  }

  #showPager({ matching }) {
    const offset = Number(this.query.get("offset") ?? 0);
    const chosen = [...this.chosen.values()];
    renew(
      this.pager,
      matching > PAGE
        ? [
            button("previous", () => this.#set("offset", String(Math.max(0, offset - PAGE) || "")), {
              disabled: offset === 0,
            }),
            el(
              "span",
              {},
              `${count(offset + 1)} to ${count(Math.min(matching, offset + PAGE))} of ${count(matching)}`,
            ),
            button("next", () => this.#set("offset", String(offset + PAGE)), {
              disabled: offset + PAGE >= matching,
            }),
          ]
        : [],
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

  #showPlots() {
    if (!this.plotsBox.open || !this.answer) return;
    const { rewards, reasons_over_time: reasons } = this.answer;
    const made = [rewards && rewardPlot(rewards), reasons && reasonsPlot(reasons)].filter(Boolean);
    show(this.plots, made.length ? made : el("p", { class: "hint" }, "No rewards and no reasons yet."));
  }

  #row(row) {
    const { summary } = row;
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
          ...this.#badges(row, summary),
        ),
        el(
          "div",
          { class: "list-numbers" },
          el("span", { title: time(row.used), data: { used: row.used } }, ago(row.used)),
          el("span", {}, `${count(row.turn_count)} turns`),
          summary ? el("span", {}, `${count(summary.ids)} ids`) : el("span", {}, "…"),
          summary ? el("span", {}, `${count(summary.sampled)} sampled`) : null,
          summary ? el("span", {}, summary.models.join(", ")) : null,
          el("span", { class: "metadata" }, metadata.join(" ")),
        ),
      ),
      el("span", { class: "list-reward", role: "gridcell" }, row.reward === null ? "" : reward(row.reward)),
    );
  }

  #badges(row, summary) {
    if (!summary) return [];
    const words = (table, kind) =>
      Object.entries(table)
        .filter(([word]) => word !== "first_turn" && word !== "unknown")
        .map(([word, turns]) => badge(turns > 1 ? `${word} ${turns}` : word, kind));
    return [
      summary.drift
        ? badge(`drift ${summary.drift}`, "drift", "turns whose prompt broke with the recorded ids")
        : null,
      ...words(summary.reasons, "reason"),
      ...words(summary.problems, "problem"),
      ...words(summary.classes, "class"),
      summary.aborted ? badge(`aborted ${summary.aborted}`, "ended") : null,
      summary.leaves > 1 ? badge(`${summary.leaves} paths`, "") : null,
    ];
  }
}
