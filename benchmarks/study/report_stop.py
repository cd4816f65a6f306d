"""The section of docs/results/heads.md on drafts that stop early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.report.document import Block, Column, Heading, Paragraph, Table, Tone
from study.acceptance import savings
from study.tables import Rows, lines_table, sizes, tau

FLOOR = 0.15  # of drafted tokens saved, for the trained head
COLUMNS = [
    Column("rule, threshold", "left"), Column("tau"), Column("drafted"), Column("fixed length drafts"), Column("saved"),
    Column("saved, ends known to both"), Column("at most"),
]  # fmt: skip


def acceptance(content: dict[str, Any]) -> Iterator[Block]:
    yield Heading("Stopping early: drafted tokens at equal tau")
    yield Paragraph(
        "saved = 1 - drafted by the rule / drafted by the fixed length with the same tau, "
        "interpolated between the measured "
        "lengths. 'acceptance' is the trained head; 'entropy' and 'product' need no training. "
        "Every rule ends a draft after a "
        "token that ends the text, and a fixed length does not. 'ends known to both' lets the "
        "fixed lengths do so, too, which "
        "leaves what the rule's own estimates save. 'at most' is the saving of a rule that drafts "
        "no rejected token."
    )
    for name, one in content["workloads"].items():
        yield Heading(f"{name}: {sizes(one['tasks'])}", 3)
        yield Paragraph(
            f"A rule drafts at most {one['most']} tokens. The head was trained on "
            f"{one['curve']['num_train']} texts."
        )
        for task in dict.fromkeys(row["task"] for row in one["rows"]):
            for temperature in (0.0, 1.0):
                rows = [
                    row
                    for row in one["rows"]
                    if row["task"] == task and row["temperature"] == temperature
                ]
                yield from _rules(rows, f"{task}, T = {temperature:g}")
        yield from _head_curve(name, one["curve"], one.get("laws_alone", []))


def _rules(rows: Rows, title: str) -> Iterator[Block]:
    fixed = [row for row in rows if row["configuration"].startswith("k=")]
    line = "; ".join(f"{row['configuration']} {tau(row):.2f}" for row in fixed)
    found = savings(rows)
    cells = [
        [
            one["configuration"],
            f"{one['tau']:.2f}",
            f"{one['drafted']:.2f}",
            "-" if one["fixed"] is None else f"{one['fixed']:.2f}",
            "beyond the longest" if one["saved"] is None else f"{one['saved']:+.0%}",
            *("-" if one[name] is None else f"{one[name]:+.0%}" for name in ("alike", "most")),
        ]
        for one in found
    ]
    alphas = sum(row["accepted"] for row in fixed) / max(sum(row["tested"] for row in fixed), 1)
    yield Table(COLUMNS, cells, f"{title}: alpha {alphas:.2f}; tau of fixed lengths: {line}")
    means = _means(found, "saved")
    alike = _means(found, "alike")
    shown, known = (
        ", ".join(f"{rule} {value:+.0%}" for rule, value in one.items()) for one in (means, alike)
    )
    known = f"; ends known to both: {known}" if known else ""
    is_met = means.get("acceptance", 0.0) >= FLOOR
    tone: Tone = "good" if is_met else "bad"
    yield Paragraph(
        f"Mean over thresholds: {shown}{known}. "
        f"Floor of {FLOOR * 100:.0f} % for the trained head: {'met' if is_met else 'missed'}.",
        tone,
    )


def _means(found: list[dict[str, Any]], name: str) -> dict[str, float]:
    """By rule, over its thresholds that have a fixed length to compare with."""
    values: dict[str, list[float]] = {}
    for one in found:
        if one[name] is not None:
            values.setdefault(one["configuration"].split()[0], []).append(one[name])
    return {rule: sum(some) / len(some) for rule, some in values.items()}


def _head_curve(
    name: str, one: dict[str, Any], without_table: list[dict[str, Any]]
) -> Iterator[Block]:
    """What the head saved at each training step, and a head without a table of tokens beside it."""
    parts = [point["parts"] for point in one["curve"]]
    steps = [float(point["step"]) for point in one["curve"]]
    length = one.get("settings", {}).get("fixed", 5)
    for mode in ("sampled", "greedy"):
        names = ("saved", "possible", "calibration", "tau", "fixed_tau")
        lines = {what: [part.get(f"{what}_{mode}") for part in parts] for what in names}
        if without_table:
            lines["saved without token table"] = [
                point["parts"].get(f"saved_{mode}") for point in without_table
            ]
        title = (
            f"The head for {name}, {mode}: held-out, computed from the distributions, against a "
            f"fixed length of {length} (optimizer steps)"
        )
        yield lines_table(title, "optimizer steps", steps, lines)
