// Which weights sampled a token. After an update while a turn ran, only several may be known, of which one did.

import { rowAt } from "./layout.js";

const COLOURS = 6;

/** The versions of the weights of a path's tokens. */
export class Weights {
  constructor(tokens) {
    this.tokens = tokens;
    this.found = this.#all(); // what `at` returns, each once
    this.known = this.found.filter(({ isKnown }) => isKnown).map(({ name }) => name);
  }

  /** The name of the version that sampled a token, or of all that may have; null if there is none. */
  at(index) {
    const turn = this.tokens.turns[rowAt(this.tokens.starts, index)];
    const spans = turn.weight_versions.filter(([, start, end]) => start <= index && index < end);
    const names = [...new Set(spans.map(([name]) => name))];
    if (names.length === 0) return null;
    if (names.length === 1 && turn.weights_uncertain) names.push("another");
    return { name: names.join(" or "), isKnown: names.length === 1 };
  }

  /** The class of a version's colour. */
  colour({ name, isKnown }) {
    return isKnown ? `version-${this.known.indexOf(name) % COLOURS}` : "version-uncertain";
  }

  #all() {
    const found = new Map();
    for (const { weight_versions: spans, end } of this.tokens.turns) {
      // what covers a token changes only where a span begins or ends
      for (const place of spans.flatMap(([, from, to]) => [from, to])) {
        const version = place < end ? this.at(place) : null;
        if (version) found.set(version.name, version);
      }
    }
    return [...found.values()];
  }
}
