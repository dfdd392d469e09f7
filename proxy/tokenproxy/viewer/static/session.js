// One session: the tree of its turns on one side, a path of them on the other.

import { compareAddress, listAddress, LONGEST, sessionAddress, VIEWS } from "./address.js";
import { Conversation } from "./conversation.js";
import { button, el, renew, select, setOptions, show } from "./dom.js";
import { count, pairText, plural, reward, time } from "./format.js";
import { pathPlots } from "./plots.js";
import { TokenPanel } from "./token_panel.js";
import { badge, badges, facts, graph, MOST_COLUMNS, stateOf, Tree } from "./turn.js";
import { WindowedRows } from "./windowed.js";

const EVERY_MS = 2000;
const OVERLAP_S = 5; // turns that another process recorded meanwhile may have an earlier time
const TREE_ROW = 46;

export class SessionView {
  constructor(app, name) {
    this.app = app;
    this.name = name;
    this.header = el("div", { class: "session-header" });
    this.rows = new WindowedRows({
      height: TREE_ROW,
      role: "tree",
      rowRole: "treeitem",
      label: "Turns",
      draw: (index) => this.#row(index),
      name: (index) => this.tree.rows[index].turn.id,
      state: (index) => this.#stateOfRow(index),
      onopen: (index) => {
        this.element.classList.remove("shows-tree");
        this.#go({ turn: this.tree.rows[index].turn.id });
      },
    });
    this.pathBar = this.#makeBar();
    this.notice = el("p", { class: "hint problem-text", role: "alert", hidden: true });
    this.panel = el("div", { class: "panel", role: "tabpanel", "aria-label": "Path" });
    this.element = el(
      "div",
      { class: "session" },
      this.header,
      el("nav", { class: "tree", "aria-label": "Turns of the session" }, this.rows.element),
      el("div", { class: "path" }, this.pathBar, this.notice, this.panel),
    );
  }

  async open(address) {
    this.address = address;
    const data = await this.app.source.session(this.name);
    if (this.closed) return; // another view was opened meanwhile
    this.#setData(data);
    this.#select();
    if (this.app.source.live) this.timer = setInterval(() => this.#refresh(), EVERY_MS);
  }

  /** Another turn, view or token of the same session. */
  async move(address) {
    this.address = address;
    if (this.tree) this.#select();
  }

  close() {
    this.closed = true;
    clearInterval(this.timer);
    this.rows.close();
    this.#closeView();
  }

  /** A key that no control used. Returns whether it meant something. */
  key(key) {
    if (!this.tree) return false;
    const at = this.tree.rows.findIndex(({ turn }) => turn.id === this.turn?.id);
    const leaves = this.tree.leaves;
    const leaf = leaves.findIndex((turn) => turn.id === this.path.at(-1)?.id);
    const actions = {
      j: () => this.#goRow(at + 1),
      k: () => this.#goRow(at - 1),
      "]": () => this.#go({ turn: leaves[(leaf + 1) % leaves.length].id }),
      "[": () => this.#go({ turn: leaves[(leaf - 1 + leaves.length) % leaves.length].id }),
      c: () => this.#go({ view: "conversation" }),
      t: () => this.#go({ view: "tokens" }),
      p: () => this.#go({ view: "plots" }),
    };
    if (actions[key] && this.turn) actions[key]();
    else return this.view?.key?.(key) ?? false;
    return true;
  }

  #goRow(index) {
    const row = this.tree.rows[index];
    if (row) this.#go({ turn: row.turn.id });
  }

  #go({ turn = this.turn.id, view = this.address.view, token = null }) {
    location.hash = sessionAddress(this.name, turn, view, token);
  }

  #setData(data) {
    this.tree = new Tree(data);
    const { session } = data;
    const metadata = Object.entries(session.metadata ?? {});
    renew(
      this.header,
      el("h1", {}, session.id),
      badge(plural(data.turns.length, "turn"), ""),
      this.tree.leaves.length > 1 ? badge(plural(this.tree.leaves.length, "path"), "") : null,
      session.reward === null ? null : badge(`reward ${reward(session.reward)}`, "reward"),
      data.agents.length > 1 ? badge(plural(data.agents.length, "agent"), "agent") : null,
      session.ambiguous ? badge("ambiguous", "problem", "another rollout held an equal conversation") : null,
      el(
        "span",
        { class: "facts" },
        el("span", {}, `used ${time(session.used)}`),
        metadata.map((pair) => this.#metadataLink(...pair)),
      ),
    );
  }

  /** A value of the metadata: a link to all sessions that have it, as those of a group. */
  #metadataLink(name, value) {
    const where = pairText(name, value);
    return el("a", { href: listAddress({ where }) }, where);
  }

  async #refresh() {
    if (document.hidden || this.refreshing) return;
    this.refreshing = true;
    try {
      const { used } = this.tree.data.session;
      let data = await this.app.source.session(this.name, used - OVERLAP_S, used);
      if (!this.closed && this.#isNew(data) && this.#misses(data))
        data = await this.app.source.session(this.name);
      if (this.closed) return; // another view was opened meanwhile
      if (this.#isNew(data)) this.#merge(data);
      this.app.report(null);
    } catch (error) {
      if (!this.closed) this.app.report(error);
    } finally {
      this.refreshing = false;
    }
  }

  #isNew({ session, rewards, turns, refusals }) {
    const old = this.tree.data;
    return (
      session.used !== old.session.used ||
      session.reward !== old.session.reward ||
      JSON.stringify(rewards) !== JSON.stringify(old.rewards) ||
      refusals?.refusals !== old.refusals?.refusals ||
      turns.some((turn) => !this.tree.byId.has(turn.id))
    );
  }

  /** Whether the session has more turns than the page would then: some were written long after they began. */
  #misses({ session, turns }) {
    const added = turns.filter((turn) => !this.tree.byId.has(turn.id));
    return this.tree.turns.length + added.length < session.turn_count;
  }

  #merge(data) {
    const turns = new Map(this.tree.turns.map((turn) => [turn.id, turn]));
    for (const turn of data.turns) turns.set(turn.id, turn);
    const merged = [...turns.values()].sort((a, b) => (a.id < b.id ? -1 : 1));
    const old = this.tree.data;
    const agents = data.agents.length > 0 ? data.agents : old.agents;
    this.#setData({ ...data, agents, meanings: { ...old.meanings, ...data.meanings }, turns: merged });
    this.#select({ keepPlace: true });
  }

  /** Show what the address names; where the session grew, without scrolling there again. */
  #select({ keepPlace = false } = {}) {
    const { tree } = this;
    const longest = tree.longest;
    const { turn } = this.address;
    this.named = tree.byId.get(turn) ?? null;
    this.turn = this.named ?? longest;
    const isMissing = turn !== null && !this.named;
    if (!this.notice.hidden && !isMissing) keepPlace = false; // it has come meanwhile
    this.notice.hidden = !isMissing;
    this.notice.textContent = isMissing
      ? `This session has no turn ${turn}; ${longest ? "this is its longest path." : "it has none yet."}`
      : "";
    if (!this.turn) {
      this.rows.update(0);
      show(this.panel, el("p", { class: "hint" }, whyEmpty(tree.data.refusals)));
      return;
    }
    this.path = tree.path(this.named ? tree.leaf(this.named) : longest);
    this.onPath = new Set(this.path.map((turn) => turn.id));
    this.rows.update(tree.rows.length);
    if (!keepPlace) this.rows.activate(tree.rows.findIndex(({ turn }) => turn.id === this.turn.id));
    this.#showBar();
    this.#showView(keepPlace);
  }

  #stateOfRow(index) {
    const { turn, column, lines } = this.tree.rows[index];
    const graph = JSON.stringify([this.tree.columns, column, lines]);
    return `${graph} ${this.onPath.has(turn.id)} ${stateOf(turn, this.tree)}`;
  }

  #row(index) {
    const { turn, column } = this.tree.rows[index];
    return el(
      "div",
      {
        class: `tree-row ${this.onPath.has(turn.id) ? "on-path" : ""}`,
        "aria-level": Math.min(column, MOST_COLUMNS) + 1,
        data: { turn: turn.id },
      },
      graph(this.tree.rows[index], Math.min(this.tree.columns, MOST_COLUMNS), TREE_ROW),
      el(
        "div",
        { class: "tree-text" },
        el(
          "div",
          { class: "tree-line" },
          turn.continues ? el("span", { class: "branch", "aria-hidden": "true" }, "↪") : null,
          el("span", { class: "turn-number" }, `turn ${this.tree.number.get(turn.id)}`),
          badges(turn, this.tree),
        ),
        el(
          "div",
          { class: "tree-line numbers" },
          el(
            "span",
            {},
            `${count(turn.reused)} + ${count(turn.appended)} → ${count(turn.completion_tokens)}`,
          ),
          turn.cached_tokens === null || turn.cached_tokens === undefined
            ? null
            : el("span", {}, `cached ${count(turn.cached_tokens)}`),
          el("span", {}, facts(turn).find(([name]) => name === "time")[1]),
        ),
      ),
    );
  }

  #makeBar() {
    this.tabs = VIEWS.map((view) => el("a", { role: "tab" }, view));
    this.paths = select("Path", [], "", (turn) => this.#go({ turn }));
    this.compare = button(
      "compare",
      () => {
        const leaf = this.path.at(-1);
        const other = this.tree.leaves.find((turn) => turn.id !== leaf.id);
        location.hash = compareAddress(
          [leaf, other].map((turn) => ({ session: this.name, turn: turn.id })),
        );
      },
      { title: "This path next to another one" },
    );
    return el(
      "div",
      { class: "path-bar", hidden: true },
      // a narrow screen shows the tree on demand
      button("turns", () => this.element.classList.toggle("shows-tree"), { class: "narrow-only" }),
      el("div", { role: "tablist", "aria-label": "View of the path" }, this.tabs),
      this.paths,
      this.compare,
    );
  }

  #showBar() {
    const leaf = this.path.at(-1);
    this.pathBar.hidden = false;
    this.tabs.forEach((tab, index) => {
      const view = VIEWS[index];
      const isChosen = view === this.address.view;
      // tokens of no turn in particular begin with the first difference
      tab.href = sessionAddress(this.name, this.named?.id ?? LONGEST, view);
      tab.setAttribute("aria-selected", String(isChosen));
      tab.className = isChosen ? "tab chosen" : "tab";
    });
    const leaves = this.tree.leaves.map((turn, index) => [
      turn.id,
      `path ${index + 1}: ${plural(this.tree.depth.get(turn.id), "turn")} to turn ${this.tree.number.get(turn.id)}`,
    ]);
    setOptions(this.paths, leaves, leaf.id);
    this.paths.hidden = leaves.length < 2;
    this.compare.hidden = !leaves.some(([turn]) => turn !== leaf.id);
  }

  #showView(keepPlace) {
    const { view: kind } = this.address;
    if (this.kind !== kind) {
      this.#closeView();
      this.kind = kind;
      this.view = this.#makeView(kind);
      show(this.panel, this.view.element);
    }
    if (keepPlace) this.view.show(this.tree, this.path, null, null);
    else {
      // a token of a turn that is missing is none of this path
      const token = this.notice.hidden ? this.address.token : null;
      this.view.show(this.tree, this.path, this.named, token);
    }
  }

  #makeView(kind) {
    const address = (turn, token = null) =>
      sessionAddress(this.name, turn, token === null ? "conversation" : "tokens", token);
    if (kind === "tokens") return new TokenPanel(this.app, this.name, { address });
    if (kind === "conversation") return new Conversation({ address: (turn) => address(turn.id) });
    const element = el("div", { class: "plots", tabindex: "0", role: "region", "aria-label": "Plots" });
    return {
      element,
      show: (tree, path) =>
        show(
          element,
          pathPlots(path, (index) => this.#go({ turn: path[index].id, view: "conversation" })),
        ),
    };
  }

  #closeView() {
    this.view?.close?.();
    this.view = null;
    this.kind = null;
  }
}

/** Why a session has no turns; a page that is one file knows of no refusals. */
function whyEmpty({ refusals = 0, last_refusal = "" } = {}) {
  if (!refusals) return "This session has no turns yet.";
  return `This session has no turns: ${plural(refusals, "request")} refused, the last one: ${last_refusal}`;
}
