"""From the runs of `real_model.py` to medians, ratios, floors and tables; nothing here looks at a
clock.

A speed is the median over the runs of a cell. The best drafter of a category is the fastest of
several medians, and so is the best peer setting: both are a little lucky. "identical" counts
prompts whose drafted text is our plain text, token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

Runs = list[dict[str, Any]]
Content = dict[str, Any]
DISTURBED = 0.1  # share of the processors that others used during a run
OURS_PLAIN = "outrider: none"
# categories of the drafters' floor
AVERAGED = ("summarization", "qa", "translation", "rag", "math_reasoning")
PEER_PLAIN = "llamacpp"


@dataclass(frozen=True)
class Floor:
    """One promise, what was found, and whether it was kept; `found` None: not measured in this run."""

    promise: str
    wanted: float
    found: float | None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        return (
            "met"
            if (self.found <= self.wanted if self.at_most else self.found >= self.wanted)
            else "not met"
        )


def speed(runs: Runs) -> float:
    return median(run["tokens_per_s"] for run in runs)


def floors(content: Content) -> list[Floor]:
    """Every promise of the project's issue on a real model that this benchmark measures."""
    found = [
        Floor(
            "first letter of `generate demo`, s",
            3.0,
            _started(content, "generate demo"),
            at_most=True,
        ),
        Floor(
            "first letter of `generate FILE.gguf`, s",
            4.0,
            _started(content, "generate the file"),
            at_most=True,
        ),
        Floor("`serve FILE.gguf` ready, s", 8.0, _started(content, "serve the file"), at_most=True),
    ]
    for form, wanted in (("Q4_1", 2.0), ("Q8_0", 1.3), ("BF16", 1.15)):
        found.append(
            Floor(
                f"plain / llama.cpp, {form}, short prompt",
                wanted,
                plain_ratio(content, form, "short"),
            )
        )
        found.append(
            Floor(
                f"plain / llama.cpp, {form}, context 2000",
                0.9 * wanted,
                plain_ratio(content, form, "2000"),
            )
        )
    for form, cells in content["drafting"].items():
        chosen = [cells[name] for name in AVERAGED if name in cells]
        over_peer = [ratio for cell in chosen if (ratio := over_best_peer(cell)) is not None]
        over_plain = [
            ratio for cell in cells.values() if (ratio := over_own_plain(cell)) is not None
        ]
        promise = f"best drafter / best peer setting, {form}, mean of {len(over_peer)} categories"
        found.append(Floor(promise, 1.5, _mean(over_peer)))
        found.append(
            Floor(
                f"best drafter / own plain, {form}, worst category",
                1.0,
                min(over_plain, default=None),
            )
        )
    return found


def _started(content: Content, ending: str) -> float | None:
    return next(
        (median(seconds) for name, seconds in content["start"].items() if name.endswith(ending)),
        None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def plain_ratio(content: Content, form: str, context: str) -> float | None:
    """Our plain speed over llama.cpp's, same weights, same prompt length."""
    cell = content["plain"].get(form, {}).get(context, {})
    return (
        speed(cell["outrider"]) / speed(cell[PEER_PLAIN])
        if {"outrider", PEER_PLAIN} <= cell.keys()
        else None
    )


def over_best_peer(cell: dict[str, Runs]) -> float | None:
    ours = fastest(cell, _is_ours)
    theirs = fastest(cell, lambda name: not _is_ours(name))
    return speed(cell[ours]) / speed(cell[theirs]) if ours and theirs else None


def over_own_plain(cell: dict[str, Runs]) -> float | None:
    drafted = fastest(cell, lambda name: _is_ours(name) and name != OURS_PLAIN)
    return (
        speed(cell[drafted]) / speed(cell[OURS_PLAIN]) if drafted and OURS_PLAIN in cell else None
    )


def fastest(cell: dict[str, Runs], wanted: Callable[[str], bool]) -> str | None:
    return max(
        (name for name in cell if wanted(name)), key=lambda name: speed(cell[name]), default=None
    )


def _is_ours(name: str) -> bool:
    return name.startswith("outrider: ")


def identical(runs: Runs, plain: Runs) -> tuple[int, int]:
    """How many prompts have plain decoding's text, of how many."""
    expected = {run["prompt"]: run["text"] for run in plain}
    return sum(expected.get(run["prompt"]) == run["text"] for run in runs), len(runs)


# ---------------------------------------------------------------- tables


def show(out: Console, content: Content) -> None:
    """The whole result: floors first, then the numbers behind them."""
    out.print(_floor_table(content))
    if content["plain"]:
        out.print(_plain_table(content))
    for form, cells in content["drafting"].items():
        out.print(_drafting_table(form, cells))
    everything = [
        run
        for part in ("plain", "drafting")
        for group in content[part].values()
        for cell in group.values()
        for runs in cell.values()
        for run in runs
    ]
    busy = sum(run["other_cpu"] > DISTURBED for run in everything)
    out.print(
        f"{busy} of {len(everything)} runs beside processes that used more than {DISTURBED:.0%} "
        "of the processors"
    )
    for name, reason in content["failures"].items():
        out.print(f"{name}: FAILED: {reason}", style="red")


def _floor_table(content: Content) -> Table:
    table = Table(title=f"{content['model']}, {content['plan']['threads']} threads: floors")
    for column in ("floor", "wanted", "found", ""):
        table.add_column(column, justify="left" if column in ("floor", "") else "right")
    for floor in floors(content):
        found = "-" if floor.found is None else f"{floor.found:.2f}"
        sign = "<=" if floor.at_most else ">="
        table.add_row(floor.promise, f"{sign} {floor.wanted:.2f}", found, floor.verdict)
    return table


def _plain_table(content: Content) -> Table:
    table = Table(
        title="plain decoding, tokens/s after the first token, median (lowest - highest); time to "
        "first token"
    )
    engines = list(
        dict.fromkeys(
            e for cells in content["plain"].values() for cell in cells.values() for e in cell
        )
    )
    for column in ("weights", "prompt", *engines, "/ llama.cpp"):
        table.add_column(column, justify="left" if column in ("weights", "prompt") else "right")
    for form, cells in content["plain"].items():
        for context, cell in cells.items():
            ratio = plain_ratio(content, form, context)
            columns = [_spread(cell[engine]) if engine in cell else "-" for engine in engines]
            table.add_row(form, context, *columns, "-" if ratio is None else f"{ratio:.2f}")
    return table


def _spread(runs: Runs) -> str:
    rates = [run["tokens_per_s"] for run in runs]
    waits = [run["ttft_s"] for run in runs]
    return (
        f"{median(rates):.0f} ({min(rates):.0f} - {max(rates):.0f}); {1e3 * median(waits):.0f} ms"
    )


def _drafting_table(form: str, cells: dict[str, dict[str, Runs]]) -> Table:
    table = Table(
        title=f"{form}: tokens/s after the first token, median over prompts (τ; identical to plain)"
    )
    table.add_column("")
    for category in cells:
        table.add_column(category, justify="right")
    for name in dict.fromkeys(name for cell in cells.values() for name in cell):
        table.add_row(name, *(_drafted(cell, name) for cell in cells.values()))
    table.add_section()
    for label, ratio in (
        ("best drafter / best peer", over_best_peer),
        ("best drafter / own plain", over_own_plain),
    ):
        values = [ratio(cell) for cell in cells.values()]
        table.add_row(label, *("-" if value is None else f"{value:.2f}" for value in values))
    return table


def _drafted(cell: dict[str, Runs], name: str) -> str:
    if name not in cell:
        return "-"
    runs = cell[name]
    text = f"{speed(cell[name]):.0f}"
    if not _is_ours(name) or name == OURS_PLAIN:
        return text
    same, all_prompts = identical(runs, cell.get(OURS_PLAIN, []))
    return f"{text} ({mean(run['tau'] for run in runs):.1f}; {same}/{all_prompts})"
