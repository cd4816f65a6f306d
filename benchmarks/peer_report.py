"""From single runs to what a reader wants: rates with their spread, identical texts, floors, one
table."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from workers import Configuration
from workload import spread

Run = dict[str, Any]
Runs = dict[Configuration, list[Run]]
COLUMNS = (
    "engine",
    "tokens/s",
    "decode only",
    "speedup",
    "first token",
    "same text as plain",
    "tau",
)


def summarise(
    configuration: Configuration, runs: Runs, max_tokens: int, max_other_cpu: float
) -> Run:
    """Rates, their spread over rounds, identity with plain, acceptance where the engine tells."""
    mine = runs[configuration]
    rounds = sorted({run["round"] for run in mine})
    seconds = [[run["seconds"] for run in mine if run["round"] == number] for number in rounds]
    # decode only: tokens after the first, per second after the first
    timed = all(run["ttft_s"] for run in mine)
    decode = [(max_tokens - 1) / (run["seconds"] - run["ttft_s"]) for run in mine] if timed else []
    summary = {
        "tokens_per_s": spread([max_tokens * len(group) / sum(group) for group in seconds]),
        "decode_tokens_per_s": median(decode) if timed else None,
        "ttft_s": median(run["ttft_s"] for run in mine) if timed else None,
        "identical_to_plain": _identical(mine, runs.get(Configuration(configuration.peer, 0), [])),
        "repeatable": all(text == texts[0] for texts in _texts(mine).values() for text in texts),
        "disturbed_runs": sum(run["other_cpu"] > max_other_cpu for run in mine),
    }
    stats = [run["stats"] for run in mine if "stats" in run]
    if stats:
        summary["tau"] = sum(s["emitted"] for s in stats) / sum(s["steps"] for s in stats)
    return summary


def stored(run: Run) -> Run:
    """A run as the result keeps it: the text as a digest, equal where the texts are, and no
    statistics."""
    text = hashlib.sha256(str(run["token_ids"]).encode()).hexdigest()[:8]
    kept = {"round": run["round"], "prompt": run["prompt"], "text": text}
    return kept | {
        name: round(run[name], 5)
        for name in ("seconds", "ttft_s", "other_cpu")
        if run[name] is not None
    }


def _texts(runs: Sequence[Run]) -> dict[int, list[list[int]]]:
    """Token ids of every run, by prompt."""
    found: dict[int, list[list[int]]] = {}
    for run in runs:
        found.setdefault(run["prompt"], []).append(run["token_ids"])
    return found


def _identical(mine: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """In how many prompts every text equals the engine's first plain text; where the others part
    from it."""
    reference = {index: texts[0] for index, texts in _texts(plain).items()}
    parts = {}
    for index, texts in _texts(mine).items():
        for text in texts:
            if index in reference and text != reference[index]:
                pairs = enumerate(zip(text, reference[index], strict=True))
                parts[index] = next(position for position, (a, b) in pairs if a != b)
    return {
        "prompts": len(reference),
        "identical": len(reference) - len(parts),
        "first_difference": parts,
    }


def floors(summary: dict[str, Run]) -> dict[str, float]:
    """Our speed over the peers': plain against llama.cpp's, best draft length against the best
    peer's."""

    def best(wanted: Callable[[str], bool]) -> float:
        rates = (row["tokens_per_s"]["median"] for name, row in summary.items() if wanted(name))
        return max(rates, default=0.0)

    pairs = {
        "outrider plain / llamacpp plain": (
            best(lambda name: name == "outrider plain"),
            best(lambda name: name == "llamacpp plain"),
        ),
        "outrider with draft / best peer with draft": (
            best(lambda name: name.startswith("outrider k=")),
            best(lambda name: "k=" in name and not name.startswith("outrider")),
        ),
    }
    return {label: ours / theirs for label, (ours, theirs) in pairs.items() if ours and theirs}


def show(console: Console, content: dict[str, Any]) -> None:
    """The table of a result, its floors and what failed."""
    table = Table(title="tokens/s, prompt included: median of rounds (lowest - highest)")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name, row in content["summary"].items():
        table.add_row(*_cells(name, row, content["summary"].get(f"{name.split()[0]} plain")))
    console.print(table)
    for label, ratio in content["floors"].items():
        console.print(f"{label}: {ratio:.2f}")
    for name, reason in content["failures"].items():
        console.print(f"{name}: FAILED: {reason}", style="red")


def _cells(name: str, row: Run, plain: Run | None) -> list[str]:
    rate = row["tokens_per_s"]
    same = row["identical_to_plain"]
    return [
        name + (f" ({row['disturbed_runs']} runs disturbed)" if row["disturbed_runs"] else ""),
        f"{rate['median']:.0f} ({rate['low']:.0f} - {rate['high']:.0f})",
        f"{row['decode_tokens_per_s']:.0f}" if row["decode_tokens_per_s"] else "-",
        f"{rate['median'] / plain['tokens_per_s']['median']:.2f}" if plain else "-",
        f"{row['ttft_s'] * 1e3:.0f} ms" if row["ttft_s"] else "-",
        f"{same['identical']} of {same['prompts']}" if same["prompts"] else "-",
        f"{row['tau']:.2f}" if "tau" in row else "-",
    ]
