// The view of a path's tokens: colours, drift lane, search, minimap, details.

import { Details } from "./details.js";
import { button, el, renew, select, show } from "./dom.js";
import { count, plural } from "./format.js";
import { Minimap } from "./minimap.js";
import { COLOURS, textBetween, TokenView } from "./tokens.js";
import { badges, isDrifted } from "./turn.js";

const LEGEND = [
  ["sampled", "sampled by the model"],
  ["appended", "put there by the template, after recorded ids"],
  ["rendered", "rendered by the engine"],
  ["given", "given by the client"],
];

const START = {
  colour: "provenance",
  focus: null,
  anchor: null,
  top: 0,
  basis: "",
  chosen: null,
  words: "",
};

export class TokenPanel {
  constructor(app, session, { address }) {
    this.app = app;
    this.session = session;
    this.shown = null; // the last turn of the path in the view
    this.wanted = null; // the place that an address named, until it is shown
    this.address = address;
    this.details = new Details({ address });
    this.tools = el("div", { class: "tools", role: "toolbar", "aria-label": "Tokens" });
    this.legend = el("div", { class: "legends" });
    this.status = el("p", { class: "status", role: "status" });
    this.body = el("div", { class: "token-body" });
    this.element = el("div", { class: "token-panel" }, this.tools, this.status, this.body);
  }

  close() {
    this.leaf = this.load = null; // responses that arrive now are dropped
    this.closed = true;
    this.view?.close();
  }

  /** Show a path, and scroll to a token of it, or to a turn; without one, to the first difference if it is new. */
  async show(tree, path, turn, token) {
    const leaf = path.at(-1);
    this.tree = tree;
    this.path = path;
    const grows = !turn && path.some((each) => each.id === this.shown);
    if (turn || token !== null || (this.leaf !== leaf.id && !grows)) this.wanted = { turn, token };
    if (this.shown === leaf.id) this.view.renewHeadings();
    if (this.leaf !== leaf.id) {
      this.leaf = leaf.id;
      await this.#load(leaf, grows ? this.#state() : START);
      if (this.leaf !== leaf.id) return;
    }
    if (this.shown === leaf.id) this.#goToWanted(); // else the ids are on their way
  }

  /** Scroll to what was asked for last: a token, a turn, or where a drifted prompt differs first. */
  #goToWanted() {
    if (!this.wanted) return;
    const { turn, token } = this.wanted;
    this.wanted = null;
    const start = this.view.tokens.turns.find((each) => each.id === turn?.id)?.start;
    const first = !turn || (isDrifted(turn) && this.laneOf === turn.id) ? this.view.marked : null;
    if (token !== null) this.view.reveal(token);
    else if (first !== null) this.view.reveal(first);
    else if (start !== undefined) this.#scrollToTurn(start);
  }

  key(key) {
    const actions = {
      d: () => this.#jump(1),
      D: () => this.#jump(-1),
      "/": () => this.search.focus(),
      y: () => this.#copy("ids"),
      Y: () => this.#copy("text"),
    };
    if (!actions[key] || !this.shown) return false;
    actions[key]();
    return true;
  }

  /** What a reader of the path has chosen, and keeps while the path grows. */
  #state() {
    const { colour, focus, anchor, region } = this.view;
    return {
      colour,
      focus,
      anchor,
      top: region.scrollTop,
      basis: this.basis,
      chosen: this.chosen,
      words: this.search.value,
    };
  }

  async #load(leaf, state) {
    const load = (this.load = {});
    if (state === START) {
      this.shown = null;
      this.tools.inert = true; // they are those of another path
      show(this.body, el("p", { class: "hint", role: "status" }, "reading the ids…"));
    }
    let tokens;
    try {
      tokens = await this.app.source.tokens(this.session, leaf.id);
    } catch (error) {
      if (this.load !== load) return; // another path was chosen meanwhile
      this.leaf = this.shown = null;
      this.app.report(error);
      show(this.body, el("p", { class: "problem-text" }, `The ids cannot be read: ${error.message}`));
      return;
    }
    if (this.load !== load) return;
    if (state !== START) state = this.#state(); // a reader goes on meanwhile
    this.view?.close();
    this.view = new TokenView(tokens, {
      heading: (id) => this.#heading(id),
      onfocus: () => this.details.show(this.view),
      onscroll: () => this.map?.update(),
    });
    this.map = new Minimap(this.view);
    const layout = this.view.relayout.bind(this.view);
    this.view.relayout = () => {
      layout();
      this.map.redraw();
    };
    const { colour, focus, anchor, chosen } = state;
    this.chosen = chosen; // the turn whose prompt a reader wants compared; null for the usual one
    this.laneOf = chosen ?? this.#drifted()?.id ?? leaf.id;
    Object.assign(this.view, { colour, focus, anchor });
    this.#showTools(tokens, state);
    renew(this.body, this.view.element, this.map.element, this.details.element);
    this.shown = leaf.id;
    this.view.relayout();
    this.view.region.scrollTop = state.top;
    this.details.show(this.view);
    await this.#loadLane(state.basis);
  }

  /** The turn whose prompt drifted: the one that an address names, or else the first of the path. */
  #drifted() {
    const named = this.wanted?.turn;
    return named ? (isDrifted(named) ? named : null) : this.path.find(isDrifted);
  }

  #heading(id) {
    const turn = this.tree.byId.get(id);
    if (!turn) return [];
    return [
      el("a", { class: "turn-number", href: this.address(id) }, `turn ${this.tree.number.get(id)}`),
      badges(turn, this.tree),
    ];
  }

  #showTools(tokens, state) {
    this.search = el("input", {
      type: "search",
      placeholder: "text or #id",
      "aria-label": "Find text, or an id as #123",
      value: state.words,
      onkeydown: (event) => {
        if (event.key === "Enter") this.#find();
      },
    });
    const lanes = [
      ["", "drift lane"],
      ["template", "against the template"],
      ["before", "against the turn before"],
      ["none", "off"],
    ];
    const turns = this.path.map((turn) => [turn.id, `prompt of turn ${this.tree.number.get(turn.id)}`]);
    this.tools.inert = false;
    renew(
      this.tools,
      select("Colours", COLOURS, state.colour, (colour) => {
        this.view.setColour(colour);
        this.#showLegend(colour);
      }),
      select("Drift lane", lanes, state.basis, (basis) => this.#loadLane(basis)),
      select("Prompt compared", turns, this.laneOf, (turn) => {
        this.chosen = turn === this.leaf && !this.#drifted() ? null : turn;
        this.laneOf = turn;
        this.#loadLane(this.basis);
      }),
      button("next difference", () => this.#jump(1), { title: "d" }),
      this.search,
      button("find", () => this.#find()),
      button("copy ids", () => this.#copy("ids"), { title: "y" }),
      button("copy text", () => this.#copy("text"), { title: "Y" }),
      el("span", { class: "total" }, `${count(tokens.count)} ids`),
      tokens.note ? el("span", { class: "problem-text" }, tokens.note) : null,
      this.legend,
    );
    this.#showLegend(state.colour);
  }

  #showLegend(colour) {
    const entries = {
      provenance: LEGEND.map(([name, text]) => [`token ${name}`, name, text]),
      logprob: [
        ["token plain shade-0", "certain", "log-probability near 0"],
        ["token plain shade-5", "–3", ""],
        ["token plain shade-9", "–6 and below", ""],
        ["token plain masked", "not trained", "not on the scale"],
      ],
      mask: [
        ["token plain trained", "1", "trained on"],
        ["token plain masked", "0", ""],
      ],
      weights: this.view.weights.found.map((version) => [
        `token plain ${this.view.weights.colour(version)}`,
        version.name,
        version.isKnown ? "weight version" : "one of these weight versions; it is not known which",
      ]),
    };
    show(
      this.legend,
      entries[colour].map(([name, text, title]) => el("span", { class: name, title }, text)),
    );
  }

  async #loadLane(basis) {
    this.basis = basis;
    const turn = this.laneOf;
    if (basis === "none") {
      this.view.setLane(null);
      this.status.textContent = "";
      return;
    }
    let lane;
    try {
      lane = await this.app.source.drift(this.session, turn, basis);
    } catch (error) {
      if (this.laneOf !== turn || this.basis !== basis) return;
      this.status.textContent = `Drift lane: ${error.message}`;
      this.view.setLane(null);
      return;
    }
    if (this.laneOf !== turn || this.basis !== basis) return;
    this.view.setLane(lane.reason ? null : lane);
    this.status.textContent = this.#summary(lane);
  }

  #summary(lane) {
    const turn = `turn ${this.tree.number.get(lane.turn)}`;
    if (lane.reason) return `Drift lane of ${turn}: ${lane.reason}`;
    const other =
      lane.basis === "template"
        ? "the template's own rendering of this conversation"
        : "what the model saw in the turn before";
    if (lane.first === null) return `The prompt of ${turn} equals ${other}: ${count(lane.count)} ids.`;
    return `The prompt of ${turn} differs from ${other} in ${plural(lane.hunks.length, "place")}, first at id ${count(lane.first)} of ${count(lane.count)}.`;
  }

  #jump(step) {
    const next = this.view.lane.next(this.view.focus ?? -1, step);
    if (next === null) this.status.textContent = "There is no difference.";
    else this.view.reveal(next);
  }

  #find() {
    const words = this.search.value;
    if (!words) return;
    const found = this.view.find(words, this.view.focus ?? -1);
    if (found === null) this.status.textContent = `Not found: ${words}`;
    else this.view.reveal(found);
  }

  async #copy(kind) {
    const { tokens, selection } = this.view;
    const [start, end] = selection ?? [0, tokens.count];
    const ids = Array.from(tokens.ids.subarray(start, end));
    const text = kind === "ids" ? JSON.stringify(ids) : textBetween(tokens, start, end);
    const copied = await copy(text);
    this.status.textContent = copied
      ? `Copied the ${kind} of ${count(end - start)} tokens.`
      : "The browser does not allow copying.";
  }

  /** Scroll so that a turn begins at the top. */
  #scrollToTurn(start) {
    const { rows, region } = this.view;
    const row = rows.turn.findIndex((turn, index) => turn >= 0 && rows.first[index] === start);
    if (row >= 0) region.scrollTop = rows.top[row];
  }
}

/** Put a text into the clipboard. Returns whether the browser allowed it. */
async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // without a permission the older way may still work
    }
  }
  const field = el("textarea", { class: "off-screen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  return copied;
}
