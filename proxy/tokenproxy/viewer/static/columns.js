// The columns of the list: for each its name, which is also its class, its head, and its cell for a row. On a
// narrow screen rollouts have no heads, and `unit` stands after the number.

import { sessionAddress } from "./address.js";
import { el } from "./dom.js";
import { ago, count, decimal, pairText, percent, plural, reward, time } from "./format.js";
import { badge } from "./turn.js";

/** Those of rollouts. `box(row)` is what chooses a rollout for a comparison. */
export function rolloutColumns(box) {
  return [
    { name: "choice", head: "", cell: box },
    { name: "name", head: "rollout", cell: nameCell },
    { name: "first", head: "first message", cell: ({ summary }) => line(summary, "first") },
    { name: "last", head: "last answer", cell: ({ summary }) => line(summary, "last") },
    { name: "turns", head: "turns", unit: "turns", cell: (row) => count(row.turn_count) },
    { name: "drift", head: "drift", unit: "drifted", cell: driftCell },
    { name: "reward", head: "reward", cell: (row) => reward(row.reward) },
    { name: "size", head: "size", cell: ({ bytes }) => (bytes ? `${count(Math.ceil(bytes / 1000))} kB` : "") },
    { name: "used", head: "used", cell: usedCell },
    { name: "metadata", head: "metadata", cell: metadataCell },
  ];
}

/** Those of folds by a key. `address(row)` is that of the rollouts of a fold. */
export function foldColumns(key, address) {
  const valueCell = (row) =>
    row.value === null ? "not set" : el("a", { href: address(row), tabindex: "-1" }, row.value || "empty");
  return [
    { name: "name", head: key, cell: valueCell },
    { name: "turns", head: "rollouts", cell: (row) => count(row.rollouts) },
    { name: "rewarded", head: "rewards", cell: (row) => count(row.rewarded) },
    { name: "reward", head: "mean", cell: (row) => decimal(row.mean) },
    { name: "spread", head: "spread", cell: (row) => decimal(row.spread) },
    { name: "drift", head: "drift", cell: foldDriftCell },
  ];
}

function nameCell(row) {
  return [
    el("a", { href: sessionAddress(row.id), tabindex: "-1" }, row.id),
    row.explicit ? null : badge("no name", "", "a conversation for which no client named a session"),
    row.ambiguous ? badge("ambiguous", "problem", "another rollout held an equal conversation") : null,
  ];
}

/** A text of a summary, which may not be read yet, or may be too large to be read for a list. */
function line(summary, name) {
  return summary ? summary[name] : el("span", { class: "quiet", title: "not read yet, or too large" }, "…");
}

/** The number of turns that are not exact, which leads to the first difference. */
function driftCell({ id, summary }) {
  if (!summary) return "…";
  if (summary.drifted === 0) return "0";
  const title = `${count(summary.drifted)} of ${plural(summary.turns, "turn")}: show the first difference`;
  return el(
    "a",
    { href: sessionAddress(id, summary.drift, "tokens"), class: "drifted", tabindex: "-1", title },
    count(summary.drifted),
  );
}

function usedCell({ used }) {
  return el("span", { title: time(used), data: { used } }, ago(used));
}

function metadataCell({ metadata }) {
  const pairs = Object.entries(metadata ?? {}).map(([key, value]) => pairText(key, value));
  return pairs.join(" ");
}

function foldDriftCell({ turns, drifted, read, rollouts }) {
  const title = `${count(drifted)} of ${plural(turns, "turn")}; rollouts read: ${read} of ${rollouts}`;
  return el("span", { title }, turns ? percent(drifted / turns) : "–");
}
