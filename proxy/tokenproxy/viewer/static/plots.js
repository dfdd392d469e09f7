// Plots as SVG. Each has a title, a legend, an axis with zero, and a text for screen readers.

import { el, svg } from "./dom.js";
import { count, percent } from "./format.js";

const WIDEST = 640;
const HEIGHT = 150;
const LEFT = 48;
const TOP = 8;
const BOTTOM = 20;
const SHOWN_AS_BARS = 400; // marks with a title of their own; more become one path
const ZERO = 1.5; // px of a bar whose value is zero

/** The plots of a path: log-probability, length, reused against appended ids. */
export function pathPlots(path, onturn) {
  const turns = path.map((_, index) => index + 1);
  return [
    linePlot("Mean log-probability of the sampled ids, per turn", turns, {
      name: "mean log-probability",
      values: path.map((turn) => turn.logprob),
    }),
    barPlot("Sampled ids, per turn", [["sampled", path.map((turn) => turn.completion_tokens)]], onturn),
    barPlot(
      "Prompt ids per turn: reused and appended",
      [
        ["reused", path.map((turn) => turn.reused)],
        ["appended", path.map((turn) => turn.appended)],
      ],
      onturn,
    ),
  ].filter(Boolean);
}

/** The plots of folds whose values are numbers, such as steps: rewards and drift; none for other folds. */
export function foldPlots(folds, key) {
  const isNumber = ({ value }) => value !== null && value !== "" && Number.isFinite(Number(value));
  const shown = folds.filter(isNumber).sort((a, b) => Number(a.value) - Number(b.value));
  if (shown.length < 2) return [];
  const places = shown.map(({ value }) => Number(value));
  const around = ({ mean, spread }) => (mean === null ? null : [mean - spread, mean + spread]);
  return [
    linePlot(`Reward by ${key}`, places, {
      name: "mean",
      values: shown.map(({ mean }) => mean),
      band: shown.map(around),
      bandName: "mean ± spread (standard deviation)",
      notes: shown.map((fold) => `, spread ${short(fold.spread)}, ${count(fold.rewarded)} rewards`),
    }),
    linePlot(`Drift by ${key}`, places, {
      name: "share of turns that are not exact",
      values: shown.map(({ turns, drifted }) => (turns ? drifted / turns : null)),
      format: percent,
      series: 4,
    }),
  ].filter(Boolean);
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function short(value) {
  return value === null ? "–" : String(Math.round(value * 1000) / 1000);
}

/** How wide a plot is on this screen, so that its letters keep their size: two next to each other if they fit. */
function plotWidth() {
  const room = document.documentElement.clientWidth - 40;
  return Math.max(260, Math.min(WIDEST, room > WIDEST ? Math.max(room / 2 - 8, WIDEST / 2) : room));
}

/**
 * Values as a line over places, with gaps where there is none, and a band of [low, high] pairs around it if there
 * is one. Zero is always on the axis, and a value of zero is a dot on it.
 */
function linePlot(title, places, options) {
  const { name, values, band = [], bandName = "", notes = [], format = short, series = 0 } = options;
  const present = [...values, ...band.flat()].filter((value) => value !== null && value !== undefined);
  if (present.length === 0) return null;
  const width = plotWidth();
  const low = Math.min(...present, 0);
  const high = Math.max(...present, 0) || (low < 0 ? 0 : 1);
  const [first, last] = [places[0], places.at(-1)];
  const x = (i) => LEFT + 8 + ((width - LEFT - 16) * (places[i] - first)) / (last - first || 1);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / (high - low));
  const at = (i, value) => `${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
  const bands = runs(band).map((run) => {
    const edges = [...run.map((i) => at(i, band[i][1])), ...run.reverse().map((i) => at(i, band[i][0]))];
    return svg("path", { d: `M${edges.join("L")}z`, class: `band series-${series}` });
  });
  const line = runs(values).map((run) => `M${run.map((i) => at(i, values[i])).join("L")}`);
  const dots = values.map((value, i) =>
    value === null || values.length > SHOWN_AS_BARS
      ? null
      : svg(
          "circle",
          { cx: x(i), cy: y(value), r: 3, class: `series-${series}` },
          svg("title", {}, `${count(places[i])}: ${format(value)}${notes[i] ?? ""}`),
        ),
  );
  const marks = [
    svg("path", { d: `M${LEFT} ${y(0).toFixed(1)}H${width}`, class: "zero" }),
    ...bands,
    svg("path", { d: line.join(""), class: `line series-${series}`, fill: "none" }),
    ...dots.filter(Boolean),
  ];
  const names = [[name, `series-${series}`], ...(bandName ? [[bandName, `faint series-${series}`]] : [])];
  const labels = low < 0 && high > 0 ? [low, high, 0] : [low, high];
  const axis = labels.map((value) => [format(value), y(value)]);
  return frame(title, marks, axis, [count(first), count(last)], names, width);
}

/** The indices at which a list has values, as lists of neighbours. */
function runs(list) {
  const found = [];
  list.forEach((value, i) => {
    if (value === null) return;
    if (i > 0 && list[i - 1] !== null) found.at(-1).push(i);
    else found.push([i]);
  });
  return found;
}

/** Stacked bars; `series` are [name, values] pairs of equal length. A stack of zero is a thin line. */
function barPlot(title, series, onturn) {
  const width = plotWidth();
  const { length } = series[0][1];
  const stacked = Array.from({ length }, (_, index) => sum(series.map(([, values]) => values[index])));
  const highest = Math.max(...stacked, 1e-9);
  const scale = (HEIGHT - TOP - BOTTOM) / highest;
  const step = (width - LEFT) / length;
  const base = new Float64Array(length);
  const marks = series.map(([name, values], number) => {
    let path = "";
    const bars = [];
    for (let index = 0; index < length; index += 1) {
      const value = values[index];
      if (!value && stacked[index] > 0) continue;
      const size = Math.max(value * scale, ZERO);
      const top = HEIGHT - BOTTOM - base[index] - size;
      base[index] += size;
      const x = LEFT + index * step;
      const wide = Math.max(0.5, step * 0.85).toFixed(2);
      const shape = `M${x.toFixed(2)} ${top.toFixed(2)}h${wide}v${size.toFixed(2)}h-${wide}z`;
      if (length > SHOWN_AS_BARS) path += shape;
      else
        bars.push(
          svg(
            "path",
            { d: shape, class: `bar series-${number}`, onclick: () => onturn(index) },
            svg("title", {}, `${index + 1}: ${name} ${count(value)}`),
          ),
        );
    }
    return length > SHOWN_AS_BARS ? [svg("path", { d: path, class: `bar series-${number}` })] : bars;
  });
  const axis = [
    ["0", HEIGHT - BOTTOM],
    [count(Math.round(highest)), TOP],
  ];
  const names = series.map(([name], number) => [name, `series-${number}`]);
  return frame(title, marks.flat(), axis, ["1", count(length)], names, width);
}

/** `axis` are [text, y] pairs, `ends` the first and the last place, `names` [text, class] pairs of the legend. */
function frame(title, marks, axis, ends, names, width) {
  const texts = [
    ...axis.map(([text, y]) => axisText(LEFT - 6, y + 4, text, "end")),
    axisText(LEFT, HEIGHT - 4, ends[0], "start"),
    axisText(width - 4, HEIGHT - 4, ends[1], "end"),
  ];
  const legend = names.map(([text, kind]) =>
    el("span", { class: "legend" }, el("i", { class: `swatch ${kind}` }), text),
  );
  const label = `${title}. From ${axis[0][0]} to ${axis[1][0]}.`;
  return el(
    "figure",
    { class: "plot", style: { flexBasis: `${width}px` } },
    el("figcaption", {}, title, legend),
    svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label }, texts, marks),
  );
}

function axisText(x, y, text, anchor) {
  return svg("text", { x, y, class: "axis", "text-anchor": anchor }, text);
}
