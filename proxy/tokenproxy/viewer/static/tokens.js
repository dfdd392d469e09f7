// The ids of a path as rows of tokens, of which only the visible ones are in the document.

import { el, renew, show } from "./dom.js";
import { latinOf, textOf } from "./format.js";
import { Lane } from "./lane.js";
import { LANE, layout, ROW, rowAt, rowOf, Spellings, tokenWidth } from "./layout.js";
import { Weights } from "./weights.js";

const PROVENANCE = ["rendered", "appended", "sampled", "given"];
const TRAINED = 4;
const MARGIN = 1; // px between tokens, a part of their width in the layout
const OVERSCAN = 300; // px that are drawn above and below the visible part
const SHADES = 9;
const DARKEST = -6; // the log-probability with the strongest colour, and all below it
export const COLOURS = [
  ["provenance", "where it comes from"],
  ["logprob", "log-probability"],
  ["mask", "loss mask"],
  ["weights", "weight version"],
];

/** Where the token with an index comes from: "rendered", "appended", "sampled" or "given". */
export function provenance(tokens, index) {
  return PROVENANCE[tokens.flags[index] & 3];
}

/** Whether the loss mask of a token is 1. */
export function isTrained(tokens, index) {
  return (tokens.flags[index] & TRAINED) !== 0;
}

/** The turn that a token belongs to. */
export function turnAt(tokens, index) {
  return tokens.turns[rowAt(tokens.starts, index)];
}

/** The text of the tokens [start, end). */
export function textBetween(tokens, start, end) {
  let latin = "";
  for (let i = start; i < end; i += 1) latin += tokens.texts[tokens.ids[i]] ?? "";
  return textOf(latin);
}

/**
 * A scrollable region with tokens. It calls `onfocus(index)` when a token gets the focus, and `onscroll()` when
 * other rows are visible. `heading(turn id)` gives the heading of a turn. `prefix` tells the ids of its elements
 * from those of other views in the page.
 */
export class TokenView {
  constructor(tokens, options) {
    const { heading, onfocus = () => {}, onscroll = () => {} } = options;
    const { from = 0, label = "Tokens", prefix = "" } = options;
    this.tokens = tokens;
    this.prefix = prefix;
    this.spellings = new Spellings(tokens);
    this.weights = new Weights(tokens);
    this.heading = heading;
    this.onfocus = onfocus;
    this.onscroll = onscroll;
    this.from = from;
    this.colour = "provenance";
    this.lane = new Lane(null);
    this.focus = null;
    this.anchor = null;
    this.marked = null; // the first token that differs
    this.drawn = new Map();
    this.canvas = el("div", { class: "canvas", role: "rowgroup" });
    this.tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.region = el(
      "div",
      {
        class: "tokens",
        role: "grid",
        tabindex: "0",
        "aria-label": label,
        "aria-readonly": "true",
        "aria-multiselectable": "true",
        onscroll: () => this.#schedule(),
        onkeydown: (event) => this.#key(event),
        onpointerdown: (event) => this.#press(event),
        onpointermove: (event) => this.#hover(event),
        onpointerleave: () => {
          this.tip.hidden = true;
        },
      },
      this.canvas,
    );
    this.element = el("div", { class: "token-view" }, this.region, this.tip);
    this.resized = new ResizeObserver(() => this.relayout());
    this.resized.observe(this.region);
  }

  close() {
    this.resized.disconnect();
  }

  /** Show a comparison under the tokens; null for none. */
  setLane(lane) {
    this.lane = new Lane(lane);
    this.marked = lane ? lane.first : null;
    this.relayout();
  }

  setColour(colour) {
    this.colour = colour;
    this.#redraw();
  }

  /** Show tokens from an index on. */
  setFrom(from) {
    this.from = from;
    this.relayout();
  }

  /** Break the tokens into rows anew; the token or the heading at the top stays there. */
  relayout() {
    const width = this.region.clientWidth - 16;
    if (width <= 0) return;
    const top = this.rows ? rowAt(this.rows.top, this.region.scrollTop) : 0;
    const kept = this.rows ? this.rows.first[top] : null;
    const above = this.rows?.turn[top] >= 0 ? 1 : 0; // rows between its heading and the token
    this.cell = this.#cellWidth();
    this.rows = layout(this.tokens, this.spellings, width, this.cell, this.lane.starts, this.from);
    this.canvas.style.height = `${this.rows.height}px`;
    this.region.setAttribute("aria-rowcount", this.rows.first.length - 1);
    if (kept !== null && kept > this.from) this.region.scrollTop = this.rows.top[rowOf(this.rows, kept) - above];
    this.#redraw();
    this.onscroll();
  }

  /** Scroll to a token and give it the focus. */
  reveal(index, { select = false, quiet = false } = {}) {
    if (!this.rows) this.relayout();
    if (!this.rows || this.tokens.count === 0) return;
    const token = Math.max(this.from, Math.min(index, this.tokens.count - 1));
    if (!select) this.anchor = token;
    this.focus = token;
    const row = rowOf(this.rows, token);
    const { scrollTop, clientHeight } = this.region;
    const top = this.rows.top[row];
    if (top < scrollTop || top + ROW + LANE > scrollTop + clientHeight) {
      this.region.scrollTop = Math.max(0, top - clientHeight / 3);
    }
    this.draw();
    this.#paint();
    if (!quiet) this.onfocus(token);
  }

  /** The tokens that are selected: [start, end). */
  get selection() {
    if (this.focus === null) return null;
    return [Math.min(this.anchor, this.focus), Math.max(this.anchor, this.focus) + 1];
  }

  /** The next token from which a text, or an id as "#123", begins after a place; null if there is none. */
  find(words, after) {
    const id = /^#(\d+)$/.exec(words);
    if (id) {
      const next = this.tokens.ids.indexOf(Number(id[1]), after + 1);
      const found = next < 0 ? this.tokens.ids.indexOf(Number(id[1]), this.from) : next;
      return found < this.from ? null : found;
    }
    this.joined ||= join(this.tokens);
    const needle = lower(latinOf(words));
    const from = after + 1 < this.tokens.count ? this.joined.starts[after + 1] : 0;
    let at = needle ? this.joined.text.indexOf(needle, from) : -1;
    if (at < 0 && needle) at = this.joined.text.indexOf(needle, this.joined.starts[this.from] ?? 0);
    return at < 0 ? null : rowAt(this.joined.starts, at);
  }

  /** Put the visible rows into the document, and take the others out. */
  draw() {
    if (!this.rows) return;
    const { scrollTop, clientHeight } = this.region;
    const from = rowAt(this.rows.top, Math.max(0, scrollTop - OVERSCAN));
    const to = Math.min(
      this.rows.first.length - 2,
      rowAt(this.rows.top, scrollTop + clientHeight + OVERSCAN),
    );
    for (const [row, node] of this.drawn) {
      if (row < from || row > to) {
        node.remove();
        this.drawn.delete(row);
      }
    }
    const added = [];
    for (let row = from; row <= to; row += 1) {
      if (this.drawn.has(row)) continue;
      const node = this.rows.turn[row] >= 0 ? this.#headingRow(row) : this.#tokenRow(row);
      node.style.top = `${this.rows.top[row]}px`;
      node.setAttribute("aria-rowindex", row + 1);
      this.drawn.set(row, node);
      added.push(node);
    }
    this.canvas.append(...added);
  }

  /** Make the headings anew that are in the document: turns got rewards or forks. */
  renewHeadings() {
    for (const [row, node] of this.drawn) {
      const turn = this.tokens.turns[this.rows.turn[row]];
      if (turn) renew(node.firstChild, this.heading(turn.id));
    }
  }

  #headingRow(row) {
    const turn = this.tokens.turns[this.rows.turn[row]];
    return el(
      "div",
      { class: "row heading", role: "row" },
      el("div", { role: "gridcell" }, this.heading(turn.id)),
    );
  }

  #tokenRow(row) {
    const node = el("div", { class: "row", role: "row" });
    let x = 0;
    for (let i = this.rows.first[row]; i < this.rows.first[row + 1]; i += 1) {
      const spelling = this.spellings.of(this.tokens.ids[i]);
      const width = tokenWidth(spelling, this.cell);
      node.append(this.#token(i, spelling, width));
      const hunk = this.lane.hunkAt(i);
      if (hunk) node.append(this.lane.element(hunk, x));
      x += width;
    }
    return node;
  }

  #token(index, spelling, width) {
    const node = document.createElement("span");
    node.className = this.#classes(index);
    node.setAttribute("role", "gridcell");
    node.id = `${this.prefix}token-${index}`;
    node.dataset.i = index;
    node.style.width = `${width - MARGIN}px`;
    node.textContent = spelling.text;
    return node;
  }

  #classes(index) {
    const names = ["token", provenance(this.tokens, index)];
    if (this.tokens.special.has(this.tokens.ids[index])) names.push("special");
    if (this.lane.covers(index)) names.push("differs");
    if (index === this.marked) names.push("first-difference");
    if (this.colour !== "provenance") names.push("plain", this.#shade(index));
    const selection = this.selection;
    if (selection && selection[0] <= index && index < selection[1]) names.push("selected");
    if (index === this.focus) names.push("focused");
    return names.join(" ");
  }

  /** The class of a token's colour. Ids that are not trained on have none: they are not on the scale. */
  #shade(index) {
    if (this.colour === "mask") return isTrained(this.tokens, index) ? "trained" : "masked";
    if (!isTrained(this.tokens, index)) return "masked";
    if (this.colour === "weights") {
      const version = this.weights.at(index);
      return version === null ? "masked" : this.weights.colour(version);
    }
    const logprob = this.tokens.logprobs[index];
    if (Number.isNaN(logprob)) return "masked";
    return `shade-${Math.min(SHADES, Math.round((Math.min(0, logprob) / DARKEST) * SHADES))}`;
  }

  #redraw() {
    this.drawn.clear();
    show(this.canvas);
    this.draw();
  }

  #paint() {
    for (const node of this.canvas.querySelectorAll(".token"))
      node.className = this.#classes(Number(node.dataset.i));
    this.#nameFocus();
  }

  /** The token with the focus, for screen readers; it must be in the document. */
  #nameFocus() {
    const id = `${this.prefix}token-${this.focus}`;
    if (this.focus !== null && this.canvas.querySelector(`#${id}`))
      this.region.setAttribute("aria-activedescendant", id);
    else this.region.removeAttribute("aria-activedescendant");
  }

  #schedule() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      this.tip.hidden = true;
      this.draw();
      this.#nameFocus();
      this.onscroll();
    });
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const now = this.focus ?? this.rows.first[rowAt(this.rows.top, this.region.scrollTop)];
    const row = rowOf(this.rows, now);
    const moves = {
      ArrowLeft: now - 1,
      ArrowRight: now + 1,
      ArrowUp: this.#inRow(row, -1, now),
      ArrowDown: this.#inRow(row, 1, now),
      Home: this.rows.first[row],
      End: this.rows.first[row + 1] - 1,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.reveal(this.focus === null ? now : moves[event.key], {
      select: event.shiftKey && this.anchor !== null,
    });
  }

  /** The token in the next row of tokens in a direction, as far from the row's beginning. */
  #inRow(row, step, now) {
    let next = row + step;
    while (next > 0 && next < this.rows.first.length - 1 && this.rows.turn[next] >= 0) next += step;
    if (next < 0 || next >= this.rows.first.length - 1) return now;
    return Math.min(this.rows.first[next] + now - this.rows.first[row], this.rows.first[next + 1] - 1);
  }

  #press(event) {
    const index = indexOf(event.target);
    if (index === null || event.button !== 0) return;
    const choose = () => {
      this.reveal(index, { select: event.shiftKey && this.anchor !== null });
      this.region.focus({ preventScroll: true });
    };
    const drag = (move) => {
      const over = indexOf(document.elementFromPoint(move.clientX, move.clientY));
      if (over !== null && over !== this.focus) this.reveal(over, { select: true });
    };
    const pressed = new AbortController();
    const on = (name, action) => addEventListener(name, action, { signal: pressed.signal });
    if (event.pointerType === "touch") {
      on("pointerup", choose); // where the finger scrolls, the press is cancelled
    } else {
      choose();
      event.preventDefault();
      on("pointermove", drag);
    }
    for (const name of ["pointerup", "pointercancel"]) on(name, () => pressed.abort());
  }

  #hover(event) {
    const index = indexOf(event.target);
    this.tip.hidden = index === null;
    if (index === null) return;
    const logprob = this.tokens.logprobs[index];
    const parts = [`#${this.tokens.ids[index]}`, `index ${index}`, provenance(this.tokens, index)];
    if (!Number.isNaN(logprob)) parts.push(`logprob ${logprob.toFixed(4)}`);
    const version = this.weights.at(index);
    if (version && !version.isKnown) parts.push(`weights ${version.name}, not known which`);
    this.tip.textContent = parts.join(" · ");
    const box = this.element.getBoundingClientRect();
    this.tip.style.left = `${Math.max(0, Math.min(event.clientX - box.left + 12, box.width - 260))}px`;
    this.tip.style.top = `${event.clientY - box.top + 18}px`;
  }

  #cellWidth() {
    const probe = el("span", { class: "token probe" }, "0".repeat(50));
    this.canvas.append(probe);
    const width = probe.getBoundingClientRect().width / 50;
    probe.remove();
    return width;
  }
}

/** The index of the token that an element belongs to; null for other elements. */
function indexOf(node) {
  const token = node instanceof Element ? node.closest("[data-i]") : null;
  return token ? Number(token.dataset.i) : null;
}

/** All texts one after the other, in lower case, with where each token begins. */
function join(tokens) {
  const starts = new Int32Array(tokens.count + 1);
  const parts = new Array(tokens.count);
  let at = 0;
  for (let i = 0; i < tokens.count; i += 1) {
    starts[i] = at;
    parts[i] = tokens.texts[tokens.ids[i]] ?? "";
    at += parts[i].length;
  }
  starts[tokens.count] = at;
  return { text: lower(parts.join("")), starts };
}

/** ASCII letters in lower case: other letters take several bytes, which must keep their number. */
function lower(latin) {
  return latin.replace(/[A-Z]+/g, (letters) => letters.toLowerCase());
}
