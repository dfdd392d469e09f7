// Paths side by side: of one session, or of sessions of one group. What all begin with is folded.

import { compareAddress, sessionAddress } from "./address.js";
import { button, el, renew, select } from "./dom.js";
import { count, reward } from "./format.js";
import { TokenView } from "./tokens.js";
import { badge, badges, Tree } from "./turn.js";

const BEFORE = 24; // tokens of the common beginning that stay visible
export const MOST = 4; // paths

export class CompareView {
  constructor(app) {
    this.app = app;
    this.status = el("p", { class: "status", role: "status" });
    this.fold = button("", () => this.#unfold());
    this.columns = el("div", { class: "columns" });
    this.element = el(
      "div",
      { class: "compare" },
      el("div", { class: "tools" }, el("h1", {}, "Compare"), this.fold, this.#colours()),
      this.status,
      this.columns,
    );
    this.sides = [];
  }

  async open(address) {
    this.address = address;
    const sides = await Promise.all(address.sides.slice(0, MOST).map((side) => this.#load(side)));
    if (this.closed || this.address !== address) return; // another view was opened meanwhile
    this.#closeViews();
    this.sides = sides;
    this.#differences();
    this.#showColumns();
  }

  async move(address) {
    await this.open(address);
  }

  close() {
    this.closed = true;
    this.#closeViews();
  }

  key(key) {
    if (key !== "d" || this.common === this.sides[0]?.tokens.count) return false;
    for (const side of this.sides) if (side.differs !== null) side.view.reveal(side.differs);
    return true;
  }

  async #load({ session, turn }) {
    const tree = new Tree(await this.app.source.session(session));
    const named = tree.byId.get(turn);
    const leaf = named ?? tree.longest;
    if (!leaf) throw new Error(`the session ${session} has no turns`);
    const missing = named ? null : turn;
    return { session, tree, leaf, missing, tokens: await this.app.source.tokens(session, leaf.id) };
  }

  /** Where each side stops being equal to the first one; the first one to all others. */
  #differences() {
    const [first, ...others] = this.sides;
    const equal = others.map((side) => commonPrefix(first.tokens.ids, side.tokens.ids));
    this.common = Math.min(first.tokens.count, ...equal);
    const isEqual = others.every(
      (side, index) => equal[index] === first.tokens.count && side.tokens.count === first.tokens.count,
    );
    first.differs = isEqual || this.common >= first.tokens.count ? null : this.common;
    others.forEach((side, index) => {
      side.equal = equal[index];
      side.differs = equal[index] < side.tokens.count ? equal[index] : null;
    });
    this.status.textContent = isEqual
      ? `All ${count(this.common)} ids are equal.`
      : `The first ${count(this.common)} ids are equal; the first different one has index ${count(this.common)}.`;
    this.fold.hidden = this.common <= BEFORE;
    this.fold.textContent = `show the ${count(Math.max(0, this.common - BEFORE))} equal ids before`;
    this.folded = true;
  }

  #showColumns() {
    const from = Math.max(0, this.common - BEFORE);
    renew(
      this.columns,
      this.sides.map((side, index) => {
        side.view = new TokenView(side.tokens, {
          heading: (id) => this.#heading(side, id),
          from: Math.min(from, Math.max(0, side.tokens.count - BEFORE)),
          label: `Tokens of ${side.session}`,
          prefix: `column-${index}-`,
        });
        side.view.marked = side.differs;
        side.view.colour = this.colour;
        return el(
          "section",
          { class: "column", "aria-label": side.session },
          this.#header(side, index),
          side.view.element,
        );
      }),
    );
    for (const side of this.sides) side.view.relayout();
  }

  #header(side, index) {
    const own = side.tree.reward(side.leaf) ?? side.tree.data.session.reward;
    const leaves = side.tree.leaves.map((turn) => [turn.id, `to turn ${side.tree.number.get(turn.id)}`]);
    if (!leaves.some(([id]) => id === side.leaf.id))
      leaves.push([side.leaf.id, `to turn ${side.tree.number.get(side.leaf.id)}`]);
    return el(
      "header",
      {},
      el("h2", {}, el("a", { href: sessionAddress(side.session, side.leaf.id, "tokens") }, side.session)),
      leaves.length > 1
        ? select(`Path of ${side.session}`, leaves, side.leaf.id, (turn) => this.#choose(index, turn))
        : null,
      badge(`${count(side.tokens.count)} ids`, ""),
      badge(`reward ${reward(own)}`, "reward"),
      index > 0
        ? badge(
            side.differs === null ? "equal" : `differs at ${count(side.equal)}`,
            side.differs === null ? "" : "drift",
          )
        : null,
      side.missing
        ? el("p", { class: "problem-text" }, `no turn ${side.missing}; this is the longest path`)
        : null,
      side.tokens.note ? el("p", { class: "problem-text" }, side.tokens.note) : null,
    );
  }

  #choose(index, turn) {
    const sides = this.sides.map((side) => ({ session: side.session, turn: side.leaf.id }));
    sides[index].turn = turn;
    location.hash = compareAddress(sides);
  }

  #heading(side, id) {
    const turn = side.tree.byId.get(id);
    return turn
      ? [
          el(
            "a",
            { class: "turn-number", href: sessionAddress(side.session, id, "tokens") },
            `turn ${side.tree.number.get(id)}`,
          ),
          badges(turn, side.tree),
        ]
      : [];
  }

  #unfold() {
    for (const side of this.sides) {
      side.view.setFrom(0);
      side.view.reveal(Math.max(0, this.common - BEFORE), { quiet: true });
    }
    this.fold.hidden = true;
  }

  #colours() {
    const colours = [
      ["provenance", "where it comes from"],
      ["logprob", "log-probability"],
      ["mask", "loss mask"],
    ];
    this.colour = "provenance";
    return select("Colours", colours, this.colour, (colour) => {
      this.colour = colour;
      this.sides.forEach((side) => side.view.setColour(colour));
    });
  }

  #closeViews() {
    for (const side of this.sides) side.view?.close();
  }
}

/** The number of ids with which both lists begin. */
function commonPrefix(left, right) {
  const size = Math.min(left.length, right.length);
  let at = 0;
  while (at < size && left[at] === right[at]) at += 1;
  return at;
}
