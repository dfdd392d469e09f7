// Turns: their tree, and the badges and numbers that every view shows of a turn.

import { sessionAddress } from "./address.js";
import { el, svg } from "./dom.js";
import { count, decimal, duration, reward, time } from "./format.js";

const COLUMN = 14; // px of a column of the graph
export const MOST_COLUMNS = 12; // further ways share the last one

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
    this.#measure();
    this.leaves = this.turns.filter((turn) => this.children.get(turn.id).length === 0);
    this.rows = this.#rows();
    this.columns = Math.max(0, ...this.rows.map(({ column }) => column)) + 1;
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

  /**
   * The turns as rows in the order of their requests, each with its column in the graph: the longest path is
   * column 0, and every other way is a column of its own from the turn that it forks from to its end. `lines`
   * are what the graph shows in the row: `through` columns, and `forks` to columns that begin below.
   */
  #rows() {
    const rows = this.turns.map((turn) => ({ turn, column: 0, lines: { through: [], forks: [] } }));
    const at = new Map(this.turns.map((turn, index) => [turn.id, index]));
    const ends = []; // for each column the last row that it holds
    for (const way of this.#ways()) {
      const parent = at.get(way[0].parent) ?? -1;
      const [first, last] = [at.get(way[0].id), at.get(way.at(-1).id)];
      const begin = parent >= 0 && parent < first ? parent : first;
      let column = ends.length === 0 ? 0 : 1;
      while (column > 0 && ends[column] >= begin) column += 1;
      ends[column] = column === 0 ? this.turns.length : last;
      for (const turn of way) rows[at.get(turn.id)].column = column;
      if (begin < first) rows[begin].lines.forks.push(column);
      for (let row = begin + 1; row < last; row += 1) rows[row].lines.through.push(column);
      if (begin === first && last > first) rows[first].lines.down = true;
      if (last > begin) rows[last].lines.up = true;
    }
    return rows;
  }

  /** The turns as ways, none of them in two: the longest path first, then by their first turns. */
  #ways() {
    const main = this.longest ? this.path(this.longest) : [];
    const done = new Set(main.map((turn) => turn.id));
    const ways = [main];
    for (const first of this.turns) {
      const way = [];
      const isNew = (turn) => !done.has(turn.id);
      for (let turn = first; turn && isNew(turn); turn = this.#inOrder(turn).find(isNew)) {
        done.add(turn.id);
        way.push(turn);
      }
      ways.push(way);
    }
    return ways.filter((way) => way.length > 0);
  }
}

/** A row's part of the graph: its turn as a dot, and the lines that lead there and past it. */
export function graph({ turn, column, lines }, columns, height) {
  const x = (each) => (Math.min(each, MOST_COLUMNS - 1) + 0.5) * COLUMN;
  const [own, middle] = [x(column), height / 2];
  const shapes = [
    ...lines.through.map((each) => [each, `M${x(each)} 0V${height}`]),
    ...(lines.up ? [[column, `M${own} 0V${middle}`]] : []),
    ...(lines.down ? [[column, `M${own} ${middle}V${height}`]] : []),
    ...lines.forks.map((each) => [each, `M${own} ${middle}Q${x(each)} ${middle} ${x(each)} ${height}`]),
  ];
  return svg(
    "svg",
    { class: "graph", width: columns * COLUMN, height, "aria-hidden": "true" },
    shapes.map(([each, d]) => svg("path", { d, class: each === 0 ? "main" : null })),
    svg("circle", { cx: own, cy: middle, r: 4.5, class: isDrifted(turn) ? "drifted" : turn.source }),
  );
}

/** Whether the prompt of a turn differs from what the model saw before. */
export function isDrifted(turn) {
  return turn.break !== null && turn.break.equal < turn.break.total;
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
    isDrifted(turn)
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
