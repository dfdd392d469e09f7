// Breaks tokens into rows. Law: every token is in exactly one row, rows are in order, and the rows' tops and
// heights follow from the tokens alone, so that any row can be drawn without the ones before it.

import { columns, glyphs } from "./format.js";

export const ROW = 24; // px of a row of tokens
export const LANE = 20; // px more where the drift lane has something under it
export const HEADING = 34; // px of a turn's heading
const GAP = 3; // px of a token's border and margin
const LONGEST = 60; // columns of one token; the rest is cut, and shown in the details

/** The visible form of every id that occurs, with its width in columns and whether a line ends after it. */
export class Spellings {
  constructor(tokens) {
    this.tokens = tokens;
    this.found = new Map();
  }

  of(id) {
    let found = this.found.get(id);
    if (!found) {
      found = this.#spell(id);
      this.found.set(id, found);
    }
    return found;
  }

  #spell(id) {
    const latin = this.tokens.texts[id];
    if (latin === undefined)
      return { latin: "", text: `#${id}`, columns: String(id).length + 1, ends: false };
    const text = glyphs(latin) || "∅";
    const width = Math.min(columns(text), LONGEST);
    return { latin, text, columns: width, ends: latin.endsWith("\n") };
  }
}

/**
 * Rows for tokens: `first[r]` is the row's first token, `turn[r]` the turn whose heading it is (-1 for tokens),
 * `top[r]` its distance from the beginning in px. All have one more entry for the end.
 *
 * `width` is in px, `cell` is the width of a column, `lanes` holds the tokens under which a lane begins, `from`
 * is the first token that is shown.
 */
export function layout(tokens, spellings, width, cell, lanes, from = 0) {
  const first = [];
  const turn = [];
  const top = [];
  let y = 0;
  const add = (token, heading, height) => {
    first.push(token);
    turn.push(heading);
    top.push(y);
    y += height;
  };
  tokens.turns.forEach((each, index) => {
    if (each.end <= from && each.end > each.start) return;
    add(Math.max(each.start, from), index, HEADING);
    let token = Math.max(each.start, from);
    while (token < each.end) {
      const end = rowEnd(tokens, spellings, token, each.end, width, cell);
      add(token, -1, ROW + (anyIn(lanes, token, end) ? LANE : 0));
      token = end;
    }
  });
  add(tokens.count, -1, 0);
  return {
    first: Int32Array.from(first),
    turn: Int32Array.from(turn),
    top: Float64Array.from(top),
    height: y,
  };
}

/** The width of a token in px. */
export function tokenWidth(spelling, cell) {
  return Math.ceil(spelling.columns * cell) + GAP;
}

/** The row that holds a place: the last of `places` that is not after it. */
export function rowAt(places, place) {
  let low = 0;
  let high = places.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (places[middle] <= place) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** The row of a token; headings have their turn's first token too, and come before it. */
export function rowOf(rows, token) {
  return rowAt(rows.first, token);
}

/** Whether a sorted list has an entry in [start, end). */
function anyIn(sorted, start, end) {
  if (sorted.length === 0) return false;
  const found = sorted[rowAt(sorted, end - 1)];
  return found >= start && found < end;
}

function rowEnd(tokens, spellings, start, end, width, cell) {
  let used = 0;
  let token = start;
  while (token < end) {
    const spelling = spellings.of(tokens.ids[token]);
    const size = tokenWidth(spelling, cell);
    if (used + size > width && token > start) return token;
    used += size;
    token += 1;
    if (spelling.ends) return token;
  }
  return token;
}
