// All tokens of a path as one narrow picture: where ids come from, where they differ, what is visible now.

import { el } from "./dom.js";
import { rowAt } from "./layout.js";

const WIDTH = 56;
const NAMES = ["rendered", "appended", "sampled", "given"];

/** A canvas next to a `TokenView`; a click or a drag scrolls there. */
export class Minimap {
  constructor(view) {
    this.view = view;
    this.canvas = el("canvas", {
      class: "minimap",
      width: WIDTH,
      role: "img",
      "aria-label": "Minimap: where the ids come from",
      onpointerdown: (event) => this.#drag(event),
    });
    this.element = this.canvas;
    this.image = null;
  }

  /** Draw all tokens; after their rows or the comparison changed. */
  redraw() {
    const height = this.canvas.clientHeight;
    const { rows, tokens, lane } = this.view;
    if (!rows || height === 0) return;
    this.canvas.height = height;
    const image = document.createElement("canvas");
    image.width = WIDTH;
    image.height = height;
    const context = image.getContext("2d");
    const colours = NAMES.map((name) => this.#colour(name));
    const scale = Math.min(1, height / rows.height);
    const last = rows.first.length - 1;
    for (let y = 0; y < height; y += 1) {
      const row = rowAt(rows.top, y / scale);
      if (row >= last) break;
      const [start, end] = [rows.first[row], Math.max(rows.first[row] + 1, rows.first[row + 1])];
      if (rows.turn[row] >= 0) continue;
      for (let x = 0; x < WIDTH - 12; x += 4) {
        const token = start + Math.floor(((end - start) * x) / (WIDTH - 12));
        context.fillStyle = colours[tokens.flags[token] & 3];
        context.fillRect(x, y, 4, 1);
      }
    }
    context.fillStyle = this.#colour("differs");
    for (const start of lane.starts) {
      const row = rowAt(rows.first, start);
      context.fillRect(WIDTH - 10, Math.min(height - 2, rows.top[row] * scale), 10, 2);
    }
    this.image = image;
    this.scale = scale;
    this.update();
  }

  /** Draw which part is visible; after scrolling. */
  update() {
    if (!this.image) return;
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.image, 0, 0);
    const { scrollTop, clientHeight } = this.view.region;
    context.strokeStyle = getComputedStyle(this.canvas).color;
    context.strokeRect(
      0.5,
      scrollTop * this.scale + 0.5,
      WIDTH - 1,
      Math.max(6, clientHeight * this.scale) - 1,
    );
  }

  /** The colour of a class in the theme of now: a canvas does not read variables of the style sheet. */
  #colour(name) {
    const probe = el("span", { class: `map-${name}`, hidden: true });
    this.view.element.append(probe);
    const { color } = getComputedStyle(probe);
    probe.remove();
    return color;
  }

  #drag(event) {
    const scroll = (at) => {
      const y = at.clientY - this.canvas.getBoundingClientRect().top;
      this.view.region.scrollTop = y / this.scale - this.view.region.clientHeight / 2;
    };
    scroll(event);
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.onpointermove = scroll;
    this.canvas.onpointerup = this.canvas.onpointercancel = () => {
      this.canvas.onpointermove = null;
    };
  }
}
