"""The section of docs/heads.md on drafts that stop early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from studies_acceptance import savings
from studies_tables import Rows, sizes, tau

from outrider.report.document import Block, Column, Heading, Paragraph, Plot, Series, Table, Tone


def acceptance(content: dict[str, Any]) -> Iterator[Block]:
    yield Heading("Stopping early: drafted tokens at equal tau")
    yield Paragraph(
        "saved = 1 - drafted by the rule / drafted by the fixed length that reaches the same tau, on the straight line between "
        f"the lengths measured. A rule drafts at most {content['settings']['most_draft_tokens']} tokens. 'acceptance' is the "
        "trained head; 'entropy' and 'product' need no training."
    )
    for name, one in content["workloads"].items():
        yield Heading(f"{name}: {sizes(one['tasks'])}", 3)
        for task in dict.fromkeys(row["task"] for row in one["rows"]):
            for temperature in (0.0, 1.0):
                rows = [row for row in one["rows"] if row["task"] == task and row["temperature"] == temperature]
                yield from _rules(rows, f"{task}, T = {temperature:g}")
        yield from _head_curve(name, one["curve"])


def _rules(rows: Rows, title: str) -> Iterator[Block]:
    fixed = [row for row in rows if row["configuration"].startswith("k=")]
    line = "; ".join(f"{row['configuration']} {tau(row):.2f}" for row in fixed)
    found = savings(rows)
    cells = [
        [
            one["configuration"], f"{one['tau']:.2f}", f"{one['drafted']:.2f}",
            "-" if one["fixed"] is None else f"{one['fixed']:.2f}",
            "beyond the longest" if one["saved"] is None else f"{one['saved']:+.0%}",
        ]
        for one in found
    ]  # fmt: skip
    alphas = sum(row["accepted"] for row in fixed) / max(sum(row["tested"] for row in fixed), 1)
    yield Table(
        [Column("rule, threshold", "left"), Column("tau"), Column("drafted"), Column("fixed length drafts"), Column("saved")],
        cells, f"{title}: alpha {alphas:.2f}; tau of fixed lengths: {line}",
    )  # fmt: skip
    best = {}
    for one in found:
        rule = one["configuration"].split()[0]
        if one["saved"] is not None:
            best.setdefault(rule, []).append(one["saved"])
    said = ", ".join(f"{rule} {sum(values) / len(values):+.0%}" for rule, values in best.items())
    mean = sum(best.get("acceptance", [0])) / max(len(best.get("acceptance", [0])), 1)
    verdict = "met" if mean >= 0.15 else "missed"
    tone: Tone = "good" if mean >= 0.15 else "bad"
    yield Paragraph(f"Mean over thresholds: {said}. Floor of 15 % for the trained head: {verdict}.", tone)


def _head_curve(name: str, one: dict[str, Any]) -> Iterator[Block]:
    parts = [point["parts"] for point in one["curve"]]
    steps = [float(point["step"]) for point in one["curve"]]
    for mode in ("sampled", "greedy"):
        names = ("saved", "possible", "calibration", "tau", "fixed_tau")
        series = [Series(what, [part.get(f"{what}_{mode}") for part in parts]) for what in names]
        yield Plot(f"The head for {name}, {mode}: held-out, worked out from the laws", "optimizer steps", "", steps, series)
