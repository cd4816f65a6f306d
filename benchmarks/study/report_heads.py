"""The section of docs/results/heads.md on heads before and after training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outrider.report.document import Block, Column, Heading, Paragraph, Table
from study.tables import Rows, alpha, curves, is_demo, pooled, positions, sizes, tau


def before_after(content: dict[str, Any]) -> Iterator[Block]:
    rows = content["measured"]
    settings = content["settings"]
    yield Heading("Heads before and after, against each other")
    yield Paragraph(
        f"Demo target, chains of k = {settings['k']} draft tokens (Medusa has {settings['k']} "
        "heads), held-out prompts: "
        f"{sizes(settings['tasks'])}; at most {settings['max_new_tokens']} tokens. 'before' is an "
        "untrained head."
    )
    labels = list(dict.fromkeys(row["label"] for row in rows))
    columns = [Column("drafter", "left")]
    for heading in ("T=0", "T=1"):
        columns += [Column(f"{what}, {heading}") for what in ("tau demo", "tau GSM8K", "alpha")]
    lines = []
    for label in labels:
        line = [label]
        for temperature in (0.0, 1.0):
            demo = pooled(rows, label=label, temperature=temperature, task=is_demo)
            gsm8k = pooled(rows, label=label, temperature=temperature, task="gsm8k")
            both = pooled(rows, label=label, temperature=temperature)
            line += [f"{tau(demo):.2f}", f"{tau(gsm8k):.2f}", f"{alpha(both):.3f}"]
        lines.append(line)
    yield Table(
        [*columns, Column("accepted at 1, 2, ... (T=0)", "left")],
        [[*line, positions(pooled(rows, label=line[0], temperature=0.0))] for line in lines],
        "All drafters",
    )
    for note in content["notes"]:
        yield Paragraph(f"Note: {note}.", "caution")
    yield from _floor_before_after(rows, labels)
    yield from _grades(rows, labels)
    yield from _regions(content["regions"])
    yield from curves(content["curves"])


def _floor_before_after(rows: Rows, labels: Sequence[str]) -> Iterator[Block]:
    def at(label: str) -> float:
        return tau(pooled(rows, label=label, temperature=0.0, task=is_demo))

    untrained = {label: at(label) for label in labels if "untrained" in label or label == "ngram"}
    best = max(untrained, key=lambda label: untrained[label])
    for label in labels:
        if label.endswith(", after"):
            won = at(label) > untrained[best]
            yield Paragraph(
                f"{'Met' if won else 'Missed'}: {label} has tau {at(label):.2f} on demo problems "
                "at T = 0. The best drafter "
                f"without training, {best}, has {untrained[best]:.2f}.",
                "good" if won else "bad",
            )


def _grades(rows: Rows, labels: Sequence[str]) -> Iterator[Block]:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    shown = [label for label in labels if "before" not in label and "k=" not in label]
    lines = [
        [label, *(f"{tau(pooled(rows, label=label, task=task)):.2f}" for task in tasks)]
        for label in shown
    ]
    yield Table(
        [Column("tau, T = 0 and 1 together", "left"), *map(Column, tasks)], lines, "By task"
    )


def _regions(regions: Rows) -> Iterator[Block]:
    for part in ("kinds", "sections"):
        names = [row["name"] for row in max((one[part] for one in regions), key=len)]
        lines = []
        for one in regions:
            by_name = {row["name"]: row for row in one[part]}
            cells = [_share(by_name.get(name)) for name in names]
            lines.append(
                [f"{one['label']}, T={one['temperature']:g}", f"{one['tau']['value']:.2f}", *cells]
            )
        title = (
            "What improved where: kept / tested by kind of text"
            if part == "kinds"
            else "By part of the answer"
        )
        columns = [Column("drafter", "left"), Column("tau"), *map(Column, names)]
        yield Table(columns, lines, f"{title} (explain; tests in brackets)")


def _share(row: dict[str, Any] | None) -> str:
    return (
        "-"
        if row is None or not row["tested"]
        else f"{row['kept'] / row['tested']:.2f} ({row['tested']})"
    )
