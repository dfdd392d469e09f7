// A list of rows of equal height, of which only the visible ones are in the document.

import { el } from "./dom.js";

const OVERSCAN = 8;

/**
 * `draw(index)` makes the element of a row. The region is one tab stop: arrow keys move the active row, Enter
 * calls `onopen(index)`.
 */
export class WindowedRows {
  constructor({ height, draw, onopen, role, rowRole, label }) {
    this.height = height;
    this.drawRow = draw;
    this.onopen = onopen;
    this.rowRole = rowRole;
    this.length = 0;
    this.active = -1;
    this.drawn = new Map();
    this.prefix = `${label.replace(/\W+/g, "-").toLowerCase()}-row`;
    this.canvas = el("div", { class: "canvas", role: "presentation" });
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
      this.canvas,
    );
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.element);
  }

  close() {
    this.resized.disconnect();
  }

  /** Show `length` rows, all drawn anew. */
  reset(length) {
    this.length = length;
    this.canvas.style.height = `${length * this.height}px`;
    for (const node of this.drawn.values()) node.remove();
    this.drawn.clear();
    this.draw();
  }

  /** Make a row the active one, and scroll to it. */
  activate(index) {
    this.active = index;
    this.#scrollTo(index);
    this.reset(this.length);
  }

  #scrollTo(index) {
    const top = index * this.height;
    const { scrollTop, clientHeight } = this.element;
    if (index >= 0 && (top < scrollTop || top + this.height > scrollTop + clientHeight)) {
      this.element.scrollTop = top - clientHeight / 3;
    }
  }

  draw() {
    const { scrollTop, clientHeight } = this.element;
    const from = Math.max(0, Math.floor(scrollTop / this.height) - OVERSCAN);
    const to = Math.min(this.length, Math.ceil((scrollTop + clientHeight) / this.height) + OVERSCAN);
    for (const [index, node] of this.drawn) {
      if (index < from || index >= to) {
        node.remove();
        this.drawn.delete(index);
      }
    }
    const added = [];
    for (let index = from; index < to; index += 1) {
      if (this.drawn.has(index)) continue;
      const node = this.drawRow(index);
      node.id = `${this.prefix}-${index}`;
      node.classList.add("windowed-row");
      node.setAttribute("role", this.rowRole);
      node.setAttribute("aria-selected", String(index === this.active));
      node.style.top = `${index * this.height}px`;
      node.style.height = `${this.height}px`;
      node.addEventListener("click", (event) => this.onopen(index, event));
      this.drawn.set(index, node);
      added.push(node);
    }
    this.canvas.append(...added);
    // it must name an element of the document
    if (this.drawn.has(this.active))
      this.element.setAttribute("aria-activedescendant", `${this.prefix}-${this.active}`);
    else this.element.removeAttribute("aria-activedescendant");
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
    }
  }
}
