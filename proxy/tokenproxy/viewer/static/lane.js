// The drift lane: under the recorded ids, what the other side has where it differs.

import { el } from "./dom.js";
import { glyphs } from "./format.js";
import { rowAt } from "./layout.js";

const SHOWN = 48; // ids of one difference; the rest is counted

const CHANGES = {
  same_text: "the same text in other tokens",
  left_out: "left out there, as stripped thinking is",
  added: "only there",
  other_text: "another text, as re-spelled arguments are",
  other_ids: "other ids",
};

/** What a kind of difference means. */
export function meaningOf(change) {
  return CHANGES[change] || change;
}

/** A comparison, with its differences by place. */
export class Lane {
  constructor(lane) {
    this.data = lane;
    this.hunks = lane ? lane.hunks : [];
    this.starts = this.hunks.map(([start]) => start);
  }

  /** The difference that begins at a token; null if none does. */
  hunkAt(index) {
    if (this.starts.length === 0) return null;
    const place = rowAt(this.starts, index);
    return this.starts[place] === index ? this.hunks[place] : null;
  }

  /** Whether a token is something else on the other side. */
  covers(index) {
    if (this.starts.length === 0 || index < this.starts[0]) return false;
    const [start, end] = this.hunks[rowAt(this.starts, index)];
    return start <= index && index < end;
  }

  /** The beginning of the next difference after a place, or before it; wraps around. Null if there is none. */
  next(index, step) {
    if (this.starts.length === 0) return null;
    if (step > 0) return this.starts.find((start) => start > index) ?? this.starts[0];
    return this.starts.findLast((start) => start < index) ?? this.starts.at(-1);
  }

  /** What stands under the token where a difference begins, `x` px from the row's beginning. */
  element([start, end, ids, change], x) {
    const shown = ids.slice(0, SHOWN).map((id) => {
      const latin = this.data.texts[id];
      return el(
        "span",
        { class: "other", title: `#${id}` },
        latin === undefined ? `#${id}` : glyphs(latin) || "∅",
      );
    });
    const more = ids.length > SHOWN ? [el("span", { class: "more" }, `+${ids.length - SHOWN}`)] : [];
    const nothing = ids.length === 0 ? [el("span", { class: "nothing" }, `nothing for ${end - start}`)] : [];
    const node = el(
      "span",
      { class: `lane ${change}`, role: "gridcell", title: meaningOf(change) },
      shown,
      more,
      nothing,
    );
    node.style.left = `${x}px`;
    node.dataset.hunk = start;
    return node;
  }
}
