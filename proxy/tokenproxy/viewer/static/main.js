// Starts the page: shows the view that the address names, asks for a key, hands keys to the view.

import { parse } from "./address.js";
import { CompareView } from "./compare.js";
import { button, el, show } from "./dom.js";
import { ListView } from "./list.js";
import { SessionView } from "./session.js";
import { FileSource, KeyNeeded, ServerSource } from "./source.js";

const THEME = "tokenproxy-viewer-theme";
const KEYS = [
  ["/", "search"],
  ["j, k", "next and previous session or turn"],
  ["[, ]", "previous and next path"],
  ["c, t, p", "conversation, tokens, plots"],
  ["d, D", "next and previous difference"],
  ["arrows", "move in tokens, turns and sessions; with shift they select"],
  ["space", "choose the session for a comparison"],
  ["y, Y", "copy ids, copy text"],
  ["g", "list of sessions"],
  ["?", "this help"],
];

class App {
  constructor(source) {
    this.source = source;
    this.problem = el("div", { class: "problem-bar", role: "alert", hidden: true });
    this.main = el("main", { id: "main" });
    this.help = el(
      "dialog",
      { "aria-label": "Keys" },
      el("h2", {}, "Keys"),
      el(
        "dl",
        {},
        KEYS.map(([keys, text]) => [el("dt", {}, keys), el("dd", {}, text)]),
      ),
      button("close", () => this.help.close()),
    );
    document.body.append(this.#header(), this.problem, this.main, this.help);
    addEventListener("hashchange", () => this.open());
    addEventListener("keydown", (event) => this.#key(event));
  }

  /** Show what the address names. */
  async open() {
    const address = parse(location.hash);
    const name = address.kind === "session" ? `session ${address.session}` : address.kind;
    document.title = address.kind === "session" ? `${address.session} · tokenproxy` : "tokenproxy viewer";
    const opened = (this.opened = {});
    try {
      if (this.name === name) await this.view.move(address);
      else await this.#change(name, address);
      if (this.opened === opened) this.report(null);
    } catch (error) {
      if (this.opened !== opened) return; // another address was opened meanwhile
      this.name = null;
      this.report(error);
    }
  }

  async #change(name, address) {
    this.view?.close();
    this.name = name;
    this.view =
      address.kind === "session"
        ? new SessionView(this, address.session)
        : address.kind === "compare"
          ? new CompareView(this)
          : new ListView(this);
    this.main.className = `view-${address.kind}`;
    show(this.main, this.view.element);
    await this.view.open(address);
  }

  /** Show a problem, or ask for a key; null takes the last one away. */
  report(error) {
    this.problem.hidden = error === null;
    if (error === null) return;
    if (error instanceof KeyNeeded) this.#askForKey(error.message);
    else show(this.problem, error.message);
  }

  #askForKey(message) {
    if (this.problem.querySelector("form")) return;
    const field = el("input", {
      type: "password",
      "aria-label": "API key",
      autocomplete: "off",
      placeholder: "API key with the scope read",
    });
    const form = el(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          this.source.key = field.value.trim();
          show(this.problem);
          this.name = null;
          this.open();
        },
      },
      el("span", {}, message),
      field,
      el("button", { type: "submit" }, "use this key"),
    );
    show(this.problem, form);
    field.focus();
  }

  #header() {
    return el(
      "header",
      { class: "page-header" },
      el(
        "a",
        {
          class: "skip",
          href: "#main",
          onclick: (event) => {
            event.preventDefault();
            this.main.querySelector("[tabindex='0']")?.focus();
          },
        },
        "skip to content",
      ),
      el("a", { class: "home", href: "#/" }, "tokenproxy"),
      el("span", { class: "spring" }),
      button("theme", () => switchTheme(), { title: "dark or light" }),
      button("keys", () => this.help.showModal(), { title: "?" }),
    );
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.help.open) return;
    if (event.target.closest("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (event.key === "?") this.help.showModal();
    else if (event.key === "g") location.hash = "#/";
    else if (!this.view?.key(event.key)) return;
    event.preventDefault();
  }
}

function switchTheme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  remember(THEME, document.documentElement.dataset.theme);
}

/** Storage may be forbidden, as in a file that is opened from the disk. */
function remember(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // the choice lasts as long as the page
  }
}

function remembered(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function start() {
  const theme = remembered(THEME);
  if (theme) document.documentElement.dataset.theme = theme;
  const data = document.getElementById("data");
  const source = data
    ? new FileSource(JSON.parse(data.textContent))
    : new ServerSource(new URL(".", location.href));
  new App(source).open();
}

start();
