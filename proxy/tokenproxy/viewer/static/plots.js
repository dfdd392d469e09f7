// Plots as SVG. Each has a title, an axis with its largest value, and a text for screen readers.

import { el, svg } from "./dom.js";
import { count, decimal } from "./format.js";

const WIDTH = 640;
const HEIGHT = 140;
const LEFT = 52;
const BOTTOM = 18;
const SHOWN_AS_BARS = 400; // bars with a title of their own; more become one path

/** The plots of a path: log-probability, length, reused against appended ids. */
export function pathPlots(path, onturn) {
  return [
    linePlot(
      "Mean log-probability of the sampled ids, per turn",
      path.map((turn) => turn.logprob),
    ),
    barPlot("Sampled ids, per turn", [["sampled", path.map((turn) => turn.completion_tokens)]], onturn),
    barPlot(
      "Prompt ids per turn: reused and appended",
      [
        ["reused", path.map((turn) => turn.reused)],
        ["appended", path.map((turn) => turn.appended)],
      ],
      onturn,
    ),
  ];
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

/** Values as a line with gaps where there is none. */
function linePlot(title, values) {
  const present = values.filter((value) => value !== null);
  if (present.length === 0) return null;
  const low = Math.min(...present, 0);
  const high = Math.max(...present, 0);
  const x = (index) => LEFT + ((WIDTH - LEFT) * (index + 0.5)) / values.length;
  const y = (value) => (HEIGHT - BOTTOM) * (1 - (value - low) / (high - low || 1)) + 4;
  let path = "";
  let pen = "M";
  values.forEach((value, index) => {
    if (value === null) pen = "M";
    else {
      path += `${pen}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    }
  });
  const dots =
    values.length > SHOWN_AS_BARS
      ? []
      : values.map((value, index) =>
          value === null
            ? null
            : svg(
                "circle",
                { cx: x(index), cy: y(value), r: 2.5, class: "series-0" },
                svg("title", {}, `turn ${index + 1}: ${decimal(value)}`),
              ),
        );
  const line = svg("path", { d: path, class: "line series-0", fill: "none" });
  return frame(title, [line, ...dots.filter(Boolean)], decimal(low, 2), decimal(high, 2), values.length, []);
}

/** Stacked bars; `series` are [name, values] pairs of equal length. */
function barPlot(title, series, onturn) {
  const length = series[0][1].length;
  const stacked = Array.from({ length }, (_, index) => sum(series.map(([, values]) => values[index])));
  const highest = Math.max(...stacked, 1e-9);
  const scale = (HEIGHT - BOTTOM) / highest;
  const width = (WIDTH - LEFT) / length;
  const base = new Float64Array(length);
  const marks = series.map(([name, values], number) => {
    let path = "";
    const bars = [];
    for (let index = 0; index < length; index += 1) {
      const value = values[index];
      if (!value) continue;
      const size = value * scale;
      const top = HEIGHT - BOTTOM + 4 - base[index] - size;
      base[index] += size;
      const x = LEFT + index * width;
      const shape = `M${x.toFixed(2)} ${top.toFixed(2)}h${Math.max(0.5, width * 0.85).toFixed(2)}v${size.toFixed(2)}h${(-Math.max(0.5, width * 0.85)).toFixed(2)}z`;
      if (length > SHOWN_AS_BARS) path += shape;
      else
        bars.push(
          svg(
            "path",
            { d: shape, class: `bar series-${number % 8}`, onclick: () => onturn(index) },
            svg("title", {}, `${index + 1}: ${name} ${count(value)}`),
          ),
        );
    }
    return length > SHOWN_AS_BARS ? [svg("path", { d: path, class: `bar series-${number % 8}` })] : bars;
  });
  const names = series.length > 1 ? series.map(([name]) => name) : [];
  return frame(title, marks.flat(), "0", count(Math.round(highest)), length, names);
}

function frame(title, marks, low, high, length, names) {
  const axis = [
    svg("text", { x: LEFT - 6, y: 14, class: "axis", "text-anchor": "end" }, high),
    svg("text", { x: LEFT - 6, y: HEIGHT - BOTTOM + 4, class: "axis", "text-anchor": "end" }, low),
    svg("text", { x: LEFT, y: HEIGHT - 2, class: "axis" }, "1"),
    svg("text", { x: WIDTH, y: HEIGHT - 2, class: "axis", "text-anchor": "end" }, count(length)),
  ];
  const legend = names.map((name, number) =>
    el("span", { class: "legend" }, el("i", { class: `swatch series-${number % 8}` }), name),
  );
  const label = `${title}. From ${low} to ${high}.`;
  return el(
    "figure",
    { class: "plot" },
    el("figcaption", {}, title, legend),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label }, axis, marks),
  );
}
