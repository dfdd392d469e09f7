// A list of rows of equal height, of which only the visible ones are in the document.

import { el } from "./dom.js";

const OVERSCAN = 8;

/**
 * `draw(index)` makes the element of a row, `name(index)` tells the row from all others, and `state(index)` is
 * a text that changes with what the element shows. The region is one tab stop: arrow keys move the active row,
 * Enter calls `onopen(index)`, and space `onmark(index, element)`. With `head`, the element of this name stays at
 * the top, for the heads of columns.
 */
export class WindowedRows {
  constructor({ height, draw, name, state, onopen, onmark, role, rowRole, label, head = false }) {
    this.height = height;
    this.drawRow = draw;
    this.nameOf = name;
    this.stateOf = state;
    this.onopen = onopen;
    this.onmark = onmark;
    this.rowRole = rowRole;
    this.length = 0;
    this.active = -1;
    this.activeName = null;
    this.drawn = new Map(); // by name
    this.prefix = `${label.replace(/\W+/g, "-").toLowerCase()}-row`;
    this.canvas = el("div", { class: "canvas", role: "presentation" });
    this.head = head ? el("div", { class: "windowed-head", role: "presentation" }) : null; // it stays at the top
    this.element = el(
      "div",
      {
        class: "windowed",
        role,
        tabindex: "0",
        "aria-label": label,
        onscroll: () => {
          this.waiting ||= requestAnimationFrame(() => {
            this.waiting = null;
            this.draw();
          });
        },
        onkeydown: (event) => this.#key(event),
      },
      this.head,
      this.canvas,
    );
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.element);
  }

  close() {
    this.resized.disconnect();
  }

  /** Show `length` rows. The active one stays the one with its name; rows that did not change stay in place. */
  update(length) {
    this.length = length;
    this.canvas.style.height = `${length * this.height}px`;
    this.active = -1;
    for (let index = 0; index < length && this.activeName !== null; index += 1) {
      if (this.nameOf(index) !== this.activeName) continue;
      this.active = index;
      break;
    }
    this.#draw((index, old) => old.state === this.stateOf(index));
  }

  /** Give the rows another height; the next update draws them. */
  setHeight(height) {
    if (height === this.height) return;
    this.height = height;
    this.drawn.clear();
    this.canvas.replaceChildren();
  }

  /** Make a row the active one, -1 for none, and scroll to it. */
  activate(index) {
    this.active = index;
    this.activeName = index < 0 ? null : this.nameOf(index);
    this.#scrollTo(index);
    this.draw();
  }

  #scrollTo(index) {
    const top = index * this.height;
    const { scrollTop } = this.element;
    const clientHeight = this.element.clientHeight - (this.head?.offsetHeight ?? 0);
    if (index >= 0 && (top < scrollTop || top + this.height > scrollTop + clientHeight)) {
      this.element.scrollTop = top - clientHeight / 3;
    }
  }

  draw() {
    this.#draw(() => true);
  }

  /** Put the visible rows into the document. `isSame(index, old)` tells whether a drawn row still holds. */
  #draw(isSame) {
    const { scrollTop, clientHeight } = this.element;
    const from = Math.max(0, Math.floor(scrollTop / this.height) - OVERSCAN);
    const to = Math.min(this.length, Math.ceil((scrollTop + clientHeight) / this.height) + OVERSCAN);
    const held = this.element.contains(document.activeElement);
    const visible = new Map();
    for (let index = from; index < to; index += 1) {
      const name = this.nameOf(index);
      const old = this.drawn.get(name);
      visible.set(name, old && isSame(index, old) ? old : this.#make(index));
    }
    for (const [name, row] of this.drawn) if (visible.get(name) !== row) row.node.remove();
    this.drawn = visible;
    this.#place(from);
    // a control of a row that was taken out had the focus
    if (held && !this.element.contains(document.activeElement)) this.element.focus({ preventScroll: true });
    // it must name an element of the document
    if (this.active >= from && this.active < to)
      this.element.setAttribute("aria-activedescendant", `${this.prefix}-${this.active}`);
    else this.element.removeAttribute("aria-activedescendant");
  }

  #make(index) {
    const row = { node: this.drawRow(index), state: this.stateOf(index), index: -1 };
    row.node.classList.add("windowed-row");
    row.node.setAttribute("role", this.rowRole);
    row.node.style.height = `${this.height}px`;
    row.node.addEventListener("click", (event) => this.onopen(row.index, event));
    return row;
  }

  /** Number the drawn rows from an index on, in the document too; a row that is moved there loses a click. */
  #place(from) {
    let index = from;
    let next = this.canvas.firstChild;
    for (const row of this.drawn.values()) {
      const { node } = row;
      if (row.index !== index) {
        row.index = index;
        node.id = `${this.prefix}-${index}`;
        node.style.top = `${index * this.height}px`;
      }
      node.setAttribute("aria-selected", String(index === this.active));
      if (next?.nextSibling === node) next = node; // the one before it belongs elsewhere
      if (next === node) next = node.nextSibling;
      else this.canvas.insertBefore(node, next);
      index += 1;
    }
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.height) - 1);
    const moves = {
      ArrowDown: 1,
      ArrowUp: -1,
      PageDown: page,
      PageUp: -page,
      Home: -this.length,
      End: this.length,
    };
    if (event.key in moves && this.length > 0) {
      event.preventDefault();
      this.activate(Math.max(0, Math.min(this.length - 1, this.active + moves[event.key])));
    } else if (event.key === "Enter" && this.active >= 0) {
      event.preventDefault();
      this.onopen(this.active, event);
    } else if (event.key === " " && this.onmark && event.target === this.element && this.active >= 0) {
      event.preventDefault();
      this.activate(this.active); // it is in the document then
      this.onmark(this.active, this.drawn.get(this.activeName).node);
    }
  }
}
