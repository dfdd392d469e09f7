// The panel with the details of one token, and of the difference under it.

import { el, show } from "./dom.js";
import { bytesOf, glyphs, textOf } from "./format.js";
import { meaningOf } from "./lane.js";
import { isTrained, provenance, turnAt } from "./tokens.js";

const MEANINGS = {
  rendered: "the engine rendered it with the chat template",
  appended: "the chat template put it after recorded ids",
  sampled: "the model sampled it",
  given: "the client gave it",
};

/** The panel for the token with the focus. */
export class Details {
  constructor({ address }) {
    this.address = address;
    this.element = el("aside", { class: "details", "aria-label": "Token", "aria-live": "polite" });
    this.show(null);
  }

  show(view) {
    if (!view || view.focus === null) {
      show(
        this.element,
        el("p", { class: "hint" }, "Choose a token: its id, log-probability and origin appear here."),
      );
      return;
    }
    const { tokens, focus } = view;
    const id = tokens.ids[focus];
    const latin = tokens.texts[id];
    const logprob = tokens.logprobs[focus];
    const origin = provenance(tokens, focus);
    const version = view.weights.at(focus);
    const rows = [
      ["token", latin === undefined ? "no text" : glyphs(latin)],
      ["id", String(id)],
      ["index", String(focus)],
      ["origin", `${origin}: ${MEANINGS[origin]}`],
      ["loss mask", isTrained(tokens, focus) ? "1" : "0"],
      [
        "logprob",
        Number.isNaN(logprob) ? "–" : `${logprob.toFixed(4)} (${(100 * Math.exp(logprob)).toPrecision(3)} %)`,
      ],
      ["weights", version ? `${version.name}${version.isKnown ? "" : ": not known which"}` : "–"],
      ["bytes", latin === undefined ? "–" : hex(latin)],
    ];
    const [start, end] = view.selection;
    if (end - start > 1) rows.push(["selected", `${end - start} tokens`]);
    show(
      this.element,
      el(
        "dl",
        {},
        rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
      ),
      this.#alternatives(tokens, focus),
      this.#difference(view, focus),
      el("p", {}, el("a", { href: this.address(turnAt(tokens, focus).id, focus) }, "link to this token")),
    );
  }

  #alternatives(tokens, index) {
    const found = tokens.alternatives.get(index);
    if (!found?.length) return null;
    return el(
      "table",
      {},
      el("caption", {}, "most probable here"),
      el(
        "tbody",
        {},
        found.map(([text, logprob]) =>
          el(
            "tr",
            {},
            el("td", {}, glyphs(text)),
            el("td", {}, logprob.toFixed(3)),
            el("td", {}, `${(100 * Math.exp(logprob)).toPrecision(3)} %`),
          ),
        ),
      ),
    );
  }

  #difference(view, index) {
    const hunk = view.lane.hunks.find(([start, end]) => start <= index && index < Math.max(end, start + 1));
    if (!hunk) return null;
    const [start, end, ids, change] = hunk;
    const other = ids.map((id) => view.lane.data.texts[id] ?? "").join("");
    const own = Array.from(
      { length: end - start },
      (_, i) => view.tokens.texts[view.tokens.ids[start + i]] ?? "",
    ).join("");
    return el(
      "section",
      { class: "difference" },
      el("h3", {}, "Difference"),
      el("p", {}, meaningOf(change)),
      el(
        "dl",
        {},
        el("dt", {}, `recorded, ${end - start} ids`),
        el("dd", {}, el("pre", {}, textOf(own) || "nothing")),
        el("dt", {}, `there, ${ids.length} ids`),
        el("dd", {}, el("pre", {}, textOf(other) || "nothing")),
        el("dt", {}, "ids there"),
        el("dd", {}, ids.slice(0, 40).join(" "), ids.length > 40 ? " …" : ""),
      ),
    );
  }
}

function hex(latin) {
  return [...bytesOf(latin)].map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
}
