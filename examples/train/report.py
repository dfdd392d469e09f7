"""The rows of a run: printed as they come, as a table, and as a picture."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import fmean

_COLOURS = ("#1a7f5a", "#c2410c")
_WIDTH, _HEIGHT, _LEFT, _GAP = 250, 150, 44, 40


@dataclass(frozen=True)
class Step:
    """What one step of training measured."""

    run: str
    step: int
    reward: float
    """Mean of its rollouts."""
    differing: float
    """Share of the trained tokens whose log-probability differs from the recorded one; see `Mismatch`."""
    unsampled: float
    """Share of the trained tokens that the model did not sample."""
    samples: float
    """Samples that a rollout needs, mean."""
    prefix_hits: float
    """Share of the prompt tokens that vLLM found in its prefix cache."""
    tokens: int
    """Trained tokens."""
    seconds: float


HEAD = "{:<13} {:>4} {:>7} {:>10} {:>10} {:>8} {:>12} {:>7} {:>5}".format(
    "run", "step", "reward", "differing", "unsampled", "samples", "prefix hits", "tokens", "s"
)
LEGEND = """\
differing: trained tokens whose log-probability under the trainer differs by more than 0.1 from the recorded
one, or that have none; unsampled: those that have none, because the model sampled other tokens; samples: for
each rollout; prefix hits: prompt tokens from vLLM's prefix cache."""


def row(step: Step) -> str:
    """A step as one line below `HEAD`."""
    return (
        f"{step.run:<13} {step.step:>4} {step.reward:>7.3f} {step.differing:>10.2%} {step.unsampled:>10.2%}"
        f" {step.samples:>8.2f} {step.prefix_hits:>12.1%} {step.tokens:>7} {step.seconds:>5.0f}"
    )


def table(runs: Sequence[Sequence[Step]]) -> str:
    """The means of each run as a Markdown table; shares are those of all its tokens."""
    lines = [
        f"| {len(runs[0])} steps | {' | '.join(steps[0].run for steps in runs)} |",
        f"|---|{'---:|' * len(runs)}",
    ]
    rows: tuple[tuple[str, Callable[[Sequence[Step]], str]], ...] = (
        ("trained tokens", lambda steps: f"{sum(step.tokens for step in steps):,}"),
        (
            "of these, log-probability differs by more than 0.1",
            lambda steps: f"{_share(steps, 'differing'):.2%}",
        ),
        ("of these, never sampled by the model", lambda steps: f"{_share(steps, 'unsampled'):.2%}"),
        (
            "samples that hold the exact ids of a rollout",
            lambda steps: f"{fmean(step.samples for step in steps):.2f}",
        ),
        ("prompt tokens from the prefix cache", lambda steps: f"{fmean(s.prefix_hits for s in steps):.1%}"),
        ("reward, first and last step", lambda steps: f"{steps[0].reward:.2f}, {steps[-1].reward:.2f}"),
    )
    return "\n".join([*lines, *(f"| {name} | {' | '.join(map(cell, runs))} |" for name, cell in rows)])


def _share(steps: Sequence[Step], name: str) -> float:
    """A share of the tokens of a whole run."""
    found: list[float] = [getattr(step, name) * step.tokens for step in steps]
    return sum(found) / sum(step.tokens for step in steps)


def write(folder: Path, runs: Sequence[Sequence[Step]]) -> None:
    """Write every step to `steps.csv` and the picture to `training.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "steps.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(field.name for field in fields(Step))
        rows.writerows(astuple(step) for steps in runs for step in steps)
    (folder / "training.svg").write_text(picture(runs))


def picture(runs: Sequence[Sequence[Step]]) -> str:
    """Three plots next to each other as SVG, each with one line for each run."""
    plots: tuple[tuple[str, Callable[[Step], float]], ...] = (
        ("log-probability differs by more than 0.1, %", lambda step: 100 * step.differing),
        ("samples that hold the exact ids of a rollout", lambda step: step.samples),
        ("reward", lambda step: step.reward),
    )
    width, height = len(plots) * (_WIDTH + _LEFT + _GAP), _HEIGHT + 90
    shown = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11" fill="#57606a"><rect width="{width}" height="{height}" fill="#ffffff"/>'
    ]
    for place, (title, value) in enumerate(plots):
        values = [[value(step) for step in steps] for steps in runs]
        shown += _plot(_LEFT + place * (_WIDTH + _LEFT + _GAP), title, values)
    for place, (steps, colour) in enumerate(zip(runs, _COLOURS, strict=False)):
        x, y = _LEFT + 140 * place, height - 12
        shown.append(f'<path d="M{x} {y - 4}h24" stroke="{colour}" stroke-width="2"/>')
        shown.append(f'<text x="{x + 30}" y="{y}">{steps[0].run}</text>')
    return "\n".join([*shown, "</svg>\n"])


def _plot(left: int, title: str, values: Sequence[Sequence[float]]) -> list[str]:
    """One plot from zero to the greatest value, with a line for each list of values."""
    top, bottom = 30, 30 + _HEIGHT
    highest = max(max(map(max, values)), 1e-9) * 1.1
    last = max(len(line) for line in values) - 1
    shown = [
        f'<text x="{left}" y="18" fill="#1f2328">{title}</text>',
        f'<path d="M{left} {top}V{bottom}H{left + _WIDTH}" fill="none" stroke="#8c959f"/>',
        f'<text x="{left - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="{left - 6}" y="{top + 8}" text-anchor="end">{highest:.3g}</text>',
        f'<text x="{left}" y="{bottom + 16}">step 1</text>',
        f'<text x="{left + _WIDTH}" y="{bottom + 16}" text-anchor="end">{last + 1}</text>',
    ]
    for line, colour in zip(values, _COLOURS, strict=False):
        points = " ".join(
            f"{left + _WIDTH * place / max(last, 1):.1f},{bottom - _HEIGHT * value / highest:.1f}"
            for place, value in enumerate(line)
        )
        shown.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return shown
