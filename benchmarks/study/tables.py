"""Sums of counters as tables, for all sections of docs/results/heads.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.report.document import Block, Column, Table
from outrider.report.text import figure

Rows = Sequence[dict[str, Any]]
FEWEST = 50  # tested draft tokens that an alpha is shown for
COUNTERS = ("steps", "emitted", "drafted", "tested", "accepted")


def lines_table(
    title: str, x_label: str, xs: Sequence[float], lines: Mapping[str, Sequence[float | None]]
) -> Table:
    """Several lines over the same x: a row for each of these."""
    columns = [Column(x_label), *map(Column, lines)]
    rows = [
        [f"{x:g}", *map(figure, values)] for x, *values in zip(xs, *lines.values(), strict=True)
    ]
    return Table(columns, rows, title)


def pooled(rows: Rows, **wanted: Any) -> dict[str, int]:
    """Counters of all rows with these values, added up. A value may be a predicate."""
    chosen = [row for row in rows if all(_fits(row[name], value) for name, value in wanted.items())]
    found = {name: sum(row[name] for row in chosen) for name in COUNTERS}
    depth = max((len(row.get("accepted_per_position", [])) for row in chosen), default=0)
    for j in range(depth):
        counts = (row["accepted_per_position"] for row in chosen)
        found[f"@{j + 1}"] = sum(one[j] for one in counts if j < len(one))
    return found


def tau(counts: dict[str, int]) -> float:
    return counts["emitted"] / max(counts["steps"], 1)


def alpha(counts: dict[str, int]) -> float:
    return counts["accepted"] / max(counts["tested"], 1)


def positions(counts: dict[str, int]) -> str:
    """Share of the steps whose j-th draft token was accepted."""
    return " ".join(
        f"{counts[name] / max(counts['steps'], 1):.2f}" for name in counts if name.startswith("@")
    )


def curves(found: dict[str, Any], what: str = "expected tau") -> Iterator[Block]:
    """One table of all runs: what was trained, and the held-out expected tau at the start, halfway
    and at the end."""
    runs = [(label, one) for label, one in found.items() if one is not None]
    if not runs:
        return
    names = ("texts", "response tokens", "trained parameters", "steps", "start", "halfway", "end")
    columns = [Column("run", "left"), *map(Column, names)]
    lines = []
    for label, one in runs:
        points = one["curve"]
        shown = (points[0], points[len(points) // 2], points[-1])
        lines.append(
            [
                label,
                str(one["num_train"]),
                str(one["num_train_tokens"]),
                f"{one['num_trained_parameters'] / 1e6:.2f}M",
                str(points[-1]["step"]),
                *(f"{point['tau']:.2f}" for point in shown),
            ]
        )
    yield Table(columns, lines, f"Training: {what} on held-out texts")


def comparison(rows: Rows, labels: Sequence[str], first: str) -> Table:
    """alpha by task and temperature, and what it is against the label `first`."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    groups: dict[str, Any] = {
        task: task for task in tasks if not is_demo(task) and _is_measured(rows, task)
    }
    if any(map(is_demo, tasks)):
        groups = {"demo": is_demo, **groups}
    columns = [Column("draft", "left")]
    columns += [Column(f"{name}, T={t}") for name in groups for t in (0, 1)]
    lines = []
    for label in labels:
        cells = []
        for task in groups.values():
            for temperature in (0.0, 1.0):
                now, old = (
                    pooled(rows, label=one, temperature=temperature, task=task)
                    for one in (label, first)
                )
                change = (
                    f", {alpha(now) / max(alpha(old), 1e-9) - 1:+.0%}" if label != first else ""
                )
                cells.append(f"{alpha(now):.3f} ({tau(now):.2f}{change})")
        lines.append([label, *cells])
    return Table(columns, lines, f"alpha (tau, alpha against '{first}')")


def _is_measured(rows: Rows, task: str) -> bool:
    """Whether enough draft tokens were tested in every cell; a target may end its text at once."""
    return all(row["tested"] >= FEWEST for row in rows if row["task"] == task)


def is_demo(task: str) -> bool:
    return task.startswith("demo")


def _fits(value: Any, wanted: Any) -> bool:
    return bool(wanted(value)) if callable(wanted) else value == wanted


def sizes(tasks: dict[str, int]) -> str:
    return ", ".join(f"{count} x {task}" for task, count in tasks.items())
