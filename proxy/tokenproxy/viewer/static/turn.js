// Turns: their tree, and the badges and numbers that every view shows of a turn.

import { sessionAddress } from "./address.js";
import { el } from "./dom.js";
import { count, decimal, duration, reward, time } from "./format.js";

/** The turns of a session with the relations between them. */
export class Tree {
  constructor(data) {
    this.data = data;
    this.turns = data.turns;
    this.byId = new Map(this.turns.map((turn) => [turn.id, turn]));
    this.number = new Map(this.turns.map((turn, index) => [turn.id, index + 1]));
    this.children = new Map(this.turns.map((turn) => [turn.id, []]));
    this.roots = [];
    for (const turn of this.turns) {
      if (turn.parent && this.byId.has(turn.parent)) this.children.get(turn.parent).push(turn);
      else this.roots.push(turn);
    }
    this.roots = this.#inChains();
    this.#measure();
    this.rows = this.#rows();
    this.leaves = this.turns.filter((turn) => this.children.get(turn.id).length === 0);
  }

  /** A turn and all that it continues, the first one first. */
  path(turn) {
    const path = [];
    const seen = new Set();
    for (let at = turn; at && !seen.has(at.id); at = this.byId.get(at.parent)) {
      path.push(at);
      seen.add(at.id);
    }
    return path.reverse();
  }

  /** The end of the longest way on from a turn. */
  leaf(turn) {
    let at = turn;
    const seen = new Set();
    while (!seen.has(at.id)) {
      seen.add(at.id);
      const [next] = this.#inOrder(at);
      if (!next) break;
      at = next;
    }
    return at;
  }

  /** The leaf of the path with the most turns. */
  get longest() {
    let best = null;
    for (const leaf of this.leaves)
      if (!best || this.depth.get(leaf.id) >= this.depth.get(best.id)) best = leaf;
    return best || this.turns.at(-1) || null;
  }

  /** Whether another request continued the same turn before this one did. */
  isFork(turn) {
    const [first] = this.children.get(turn.parent) ?? [];
    return first !== undefined && first.request !== turn.request;
  }

  reward(turn) {
    return this.data.rewards[turn.id] ?? null;
  }

  /** The first turns, each followed by those that continue its conversation; other agents come after them. */
  #inChains() {
    const start = new Map();
    for (const root of this.roots) {
      const cause = this.byId.get(root.continues);
      start.set(root.id, (cause && start.get(this.path(cause)[0].id)) ?? root.id);
    }
    return [...this.roots].sort((a, b) => start.get(a.id).localeCompare(start.get(b.id)));
  }

  /** Turns below each turn, and turns above it. */
  #measure() {
    this.below = new Map();
    this.depth = new Map();
    const order = [];
    const reached = new Set();
    for (const root of [...this.roots, ...this.turns]) {
      if (reached.has(root.id)) continue;
      const stack = [[root, 1]];
      while (stack.length) {
        const [turn, depth] = stack.pop();
        if (reached.has(turn.id)) continue;
        reached.add(turn.id);
        this.depth.set(turn.id, depth);
        order.push(turn);
        for (const child of this.children.get(turn.id)) stack.push([child, depth + 1]);
      }
    }
    for (const turn of order.reverse()) {
      const most = Math.max(0, ...this.children.get(turn.id).map((child) => this.below.get(child.id) ?? 0));
      this.below.set(turn.id, most + 1);
    }
  }

  /** The children of a turn: the longest way first. */
  #inOrder(turn) {
    const children = this.children.get(turn.id);
    return children.length < 2
      ? children
      : [...children].sort((a, b) => this.below.get(b.id) - this.below.get(a.id) || (a.id < b.id ? -1 : 1));
  }

  /** The turns as rows: branches are indented, the longest way on is not. */
  #rows() {
    const rows = [];
    const done = new Set();
    const stack = [...this.roots].reverse().map((turn) => [turn, 0]);
    while (stack.length) {
      const [turn, level] = stack.pop();
      if (done.has(turn.id)) continue;
      done.add(turn.id);
      rows.push({ turn, level });
      const [main, ...branches] = this.#inOrder(turn);
      if (main) stack.push([main, level]);
      for (const branch of branches.reverse()) stack.push([branch, level + 1]);
    }
    return rows;
  }
}

/** A word in a frame. */
export function badge(text, kind, title = null) {
  return el("span", { class: `badge ${kind}`, title }, text);
}

/** The badges that explain a turn's prompt and how it ended. */
export function badges(turn, tree) {
  const meanings = tree.data.meanings || {};
  const own = tree.reward(turn);
  return [
    badge(turn.source, `source ${turn.source}`, "where the prompt came from"),
    turn.continues ? chainLink(turn, tree) : null,
    turn.reason && turn.reason !== "first_turn" ? badge(turn.reason, "reason", meanings[turn.reason]) : null,
    turn.break && turn.break.equal < turn.break.total
      ? badge(
          `drift at ${count(turn.break.equal)}`,
          "drift",
          "the prompt differs here from the ids that the model saw before",
        )
      : null,
    turn.choice > 0 ? badge(`choice ${turn.choice + 1}`, "", "one of several choices of one request") : null,
    tree.isFork(turn)
      ? badge(`forks turn ${tree.number.get(turn.parent)}`, "", "another request continued that turn before")
      : null,
    turn.request_class ? badge(turn.request_class, "class", "class of the request") : null,
    turn.agent ? badge(turn.agent, "agent", "the agent that sent it") : null,
    ["abort", "error", "length"].includes(turn.finish_reason)
      ? badge(turn.finish_reason, "ended", "how the turn ended")
      : null,
    turn.problem ? badge(turn.problem, "problem", meanings[turn.problem]) : null,
    !turn.problem && turn.refused
      ? badge("not trained", "problem", `an earlier turn: ${turn.refused.reason}`)
      : null,
    own === null ? null : badge(`reward ${reward(own)}`, "reward"),
  ];
}

/** Names the segment of a chain that a turn begins, and leads to the turn that caused it. */
function chainLink(turn, tree) {
  const cause = tree.number.get(turn.continues);
  return el(
    "a",
    {
      class: "badge chain",
      href: sessionAddress(tree.data.session.id, turn.continues, "conversation"),
      title: "the conversation goes on from what that turn sampled, as from a summary",
    },
    `segment ${turn.segment}${cause ? ` after turn ${cause}` : ""}`,
  );
}

/** A text that changes with the badges and the numbers of a turn. */
export function stateOf(turn, tree) {
  const { message, messages, ...rest } = turn;
  const parent = tree.isFork(turn) ? tree.number.get(turn.parent) : null;
  return JSON.stringify([rest, tree.number.get(turn.id), tree.reward(turn), parent]);
}

/** The numbers of a turn, as [name, value] pairs. */
export function facts(turn) {
  const seconds = turn.started ? turn.created - turn.started : null;
  return [
    ["prompt", count(turn.prompt_tokens)],
    ["reused", count(turn.reused)],
    ["appended", count(turn.appended)],
    ["sampled", count(turn.completion_tokens)],
    ["cached", count(turn.cached_tokens)],
    ["time", duration(seconds)],
    ["mean logprob", decimal(turn.logprob)],
    ["temperature", turn.temperature === null ? "–" : String(turn.temperature)],
    ["weights", turn.weight_versions.join(", ") || "–"],
    ["finish", turn.finish_reason || "–"],
    ["at", time(turn.started ?? turn.created)],
  ];
}
