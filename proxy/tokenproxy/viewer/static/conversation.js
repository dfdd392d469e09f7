// The messages of a path, turn by turn. What is not visible is not laid out (`content-visibility` in the style
// sheet); long conversations are made in parts, so that the first one is there at once.

import { button, el, renew, show } from "./dom.js";
import { badges, facts, stateOf } from "./turn.js";

const AT_ONCE = 30; // turns in one part
const LONG = 6000; // characters of a text after which the rest waits for a click

/** The conversation of a path. `address(turn)` is the permalink of a turn. */
export class Conversation {
  constructor({ address }) {
    this.address = address;
    this.element = el("div", {
      class: "conversation",
      role: "region",
      "aria-label": "Conversation",
      tabindex: "0",
    });
    this.blocks = new Map();
    this.states = new Map(); // what the headers of the blocks show
  }

  close() {
    this.closed = true;
  }

  /** Show a path, and scroll to one of its turns; null keeps the place. What is shown already stays. */
  show(tree, path, selected) {
    const old = this.path ?? [];
    const grows = old.length > 0 && old.every((turn, index) => turn.id === path[index]?.id);
    this.tree = tree;
    this.path = path;
    if (!grows) {
      this.blocks.clear();
      show(this.element);
    }
    this.#renewHeaders();
    this.selected = selected ?? this.selected;
    if (grows && selected) this.select(selected);
    this.#addFrom(this.blocks.size, path); // the last path may not be there as a whole yet
  }

  /** Scroll to a turn, and frame it. */
  select(turn) {
    this.selected = turn;
    for (const [id, block] of this.blocks) block.classList.toggle("selected", id === turn?.id);
    const block = turn && this.blocks.get(turn.id);
    if (block) block.scrollIntoView({ block: "start" });
  }

  /** Turns that are shown already may have got rewards or forks. */
  #renewHeaders() {
    for (const turn of this.path) {
      const block = this.blocks.get(turn.id);
      if (!block) break; // it and all after it are yet to be made
      if (this.states.get(turn.id) !== stateOf(turn, this.tree))
        renew(block.querySelector(":scope > header"), this.#header(turn));
    }
  }

  #addFrom(start, path) {
    if (this.closed || this.path !== path) return;
    const part = path.slice(start, start + AT_ONCE);
    const blocks = part.map((turn) => {
      const block = this.#block(turn);
      this.blocks.set(turn.id, block);
      return block;
    });
    this.element.append(...blocks);
    if (part.some((turn) => turn.id === this.selected?.id)) this.select(this.selected);
    if (start + AT_ONCE < path.length) requestAnimationFrame(() => this.#addFrom(start + AT_ONCE, path));
  }

  #block(turn) {
    const number = this.tree.number.get(turn.id);
    return el(
      "section",
      { class: "turn", data: { turn: turn.id }, "aria-label": `Turn ${number}` },
      listOf(turn.messages).map((message) => messageElement(message)),
      el("header", {}, this.#header(turn)),
      messageElement(turn.message, "sampled"),
    );
  }

  #header(turn) {
    this.states.set(turn.id, stateOf(turn, this.tree));
    return [
      el("a", { href: this.address(turn), class: "turn-number" }, `turn ${this.tree.number.get(turn.id)}`),
      badges(turn, this.tree),
      el(
        "span",
        { class: "facts" },
        facts(turn).map(([name, value]) => el("span", {}, `${name} ${value}`)),
      ),
    ];
  }
}

/** One message: its role, reasoning, content, tool calls. */
export function messageElement(message, kind = "") {
  const role = String(message?.role ?? "assistant");
  return el(
    "article",
    {
      class: `message role-${["system", "user", "assistant", "tool", "developer"].includes(role) ? role : "other"} ${kind}`,
    },
    el(
      "span",
      { class: "role" },
      role,
      message?.name ? ` ${message.name}` : "",
      message?.tool_call_id ? ` ${message.tool_call_id}` : "",
    ),
    el("div", { class: "parts" }, ...parts(message ?? {})),
  );
}

function* parts(message) {
  const reasoning = message.reasoning ?? message.reasoning_content;
  if (reasoning)
    yield el("details", { class: "reasoning", open: true }, el("summary", {}, "reasoning"), text(reasoning));
  const content = Array.isArray(message.content) ? message.content : [message.content];
  for (const part of content) {
    if (part === null || part === undefined || part === "") continue;
    if (typeof part === "string") yield text(part);
    else if (typeof part.text === "string") yield text(part.text);
    else yield el("div", { class: "media" }, mediaText(part));
  }
  for (const call of listOf(message.tool_calls)) {
    const made = call?.function ?? {};
    yield el(
      "div",
      { class: "call" },
      el("span", { class: "call-name" }, String(made.name ?? "?")),
      text(readable(made.arguments)),
    );
  }
}

/** A list that a client sent; empty where it sent something else. */
function listOf(value) {
  return Array.isArray(value) ? value : [];
}

function text(value) {
  const whole = typeof value === "string" ? value : (JSON.stringify(value) ?? "");
  if (whole.length <= LONG) return el("pre", {}, whole);
  const shown = el("pre", {}, whole.slice(0, LONG));
  const more = button(`show the other ${whole.length - LONG} characters`, () => {
    shown.textContent = whole;
    more.remove();
  });
  return el("div", {}, shown, more);
}

function readable(value) {
  return typeof value === "string" ? value : JSON.stringify(value ?? "");
}

/** Media are named and never loaded: the page sends requests to its own server only. */
function mediaText(part) {
  const reference = part.image_url?.url ?? part.type ?? "part";
  return `${part.type ?? "media"}: ${String(reference).slice(0, 80)}`;
}
