"""From the runs of `drafters.py` to ratios with intervals, floors and markdown tables. Everything
here is without a clock.

Ratios are of the same prompt, median over prompts; intervals are 95 % bootstrap percentiles over
prompts (scipy.stats.bootstrap), so with a handful of prompts they are little more than the spread.
tau counts emitted tokens per target pass, the bonus token included; alpha is accepted / tested.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median
from typing import Any

import numpy as np
from scipy.stats import bootstrap

Run = dict[str, Any]
Ratio = dict[str, Any]
RESAMPLES = 2000
# share of the processors that others used meanwhile: then the seconds say little, their ratios may
DISTURBED = 0.1
STORED = (
    "round",
    "prompt",
    "seconds",
    "emitted",
    "steps",
    "drafted",
    "tested",
    "accepted",
    "text",
    "other_cpu",
)
FLOORS = (
    ("auto / best fixed length", "over_best_fixed", 0.97),
    ("auto / plain", "over_plain", 0.98),
)


def results(measured: dict[str, Any], configurations: dict[str, Any]) -> dict[str, Any]:
    """What is stored: per cell and configuration its summary and runs, regrets, floors, gains. Five
    digits of everything."""
    # then sampled texts are plain decoding's, too
    invariant = measured["plan"]["verifier"] == "gumbel"
    cells = [_summarised(cell, invariant=invariant) for cell in measured["cells"]]
    regrets = [regret for cell in measured["cells"] for regret in _regrets(cell, configurations)]
    return _rounded(
        {
            "plan": measured["plan"],
            "pairs": measured["pairs"],
            "configurations": configurations,
            "failures": measured["failures"],
            "texts_that_differ": [
                f"{_cell_name(cell)}: {name}"
                for cell in cells
                for name, row in cell["summary"].items()
                if row["identical_to_plain"] is False
            ],
            "floors": _floors(regrets),
            "gains": measured["gains"],
            "regrets": regrets,
            "run_columns": " ".join(STORED),
            "cells": cells,
        }
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ---------------------------------------------------------------- one cell


def _summarised(cell: dict[str, Any], *, invariant: bool) -> dict[str, Any]:
    plain = cell["runs"]["none"]
    summary = {
        name: _summary(runs, plain, same=invariant or cell["temperature"] == 0)
        for name, runs in cell["runs"].items()
    }
    return {
        **cell,
        "summary": summary,
        "runs": {name: [*map(_line, runs)] for name, runs in cell["runs"].items()},
    }


def _line(run: Run) -> str:
    """There are thousands of runs, and JSON would give each of their numbers a line."""
    return " ".join(str(_rounded(run[column])) for column in STORED)


def _summary(runs: list[Run], plain: list[Run], *, same: bool) -> dict[str, Any]:
    def total(name: str) -> float:
        return sum(run[name] for run in runs)

    def per(numerator: str, denominator: str) -> float | None:
        return total(numerator) / total(denominator) if total(denominator) else None

    depths = max(len(run["accepted_per_position"]) for run in runs)
    positions = [
        sum((run["accepted_per_position"] + [0] * depths)[i] for run in runs) for i in range(depths)
    ]
    return {
        "tokens_per_s": per("emitted", "seconds"),
        "speedup": ratio(runs, plain),
        "tau": per("emitted", "steps"),
        "alpha": per("accepted", "tested"),
        "draft_utilisation": per("accepted", "drafted"),
        "mean_draft_tokens": per("drafted", "steps"),
        # share of all steps
        "accepted_at_position": [count / total("steps") for count in positions],
        "step_s": per("seconds", "steps"),
        "phase_s": {
            phase: sum(run["time_s"][phase] for run in runs) / total("steps")
            for phase in runs[0]["time_s"]
        },
        "identical_to_plain": [run["text"] for run in runs] == [run["text"] for run in plain]
        if same
        else None,
        "disturbed_runs": sum(run["other_cpu"] > DISTURBED for run in runs),
    }


def ratio(mine: list[Run], other: list[Run], prompts: Sequence[Any] | None = None) -> Ratio:
    """Decoding speed of one configuration over another's: median over the prompts (all, or those
    named), interval."""
    ours = _rates(mine)
    theirs = _rates(other)
    values = [ours[prompt] / theirs[prompt] for prompt in (ours if prompts is None else prompts)]
    low, high = _interval(values)
    return {"median": median(values), "low": low, "high": high, "n": len(values)}


def _rates(runs: list[Run]) -> dict[Any, float]:
    """Prompt -> tokens per second, its rounds together."""
    sums: dict[Any, list[float]] = {}
    for run in runs:
        known = sums.setdefault(run["prompt"], [0.0, 0.0])
        known[0] += run["emitted"]
        known[1] += run["seconds"]
    return {prompt: emitted / seconds for prompt, (emitted, seconds) in sums.items()}


def _interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """None where there is nothing to resample."""
    if len(values) < 2:
        return None, None
    if min(values) == max(values):
        return values[0], values[0]
    found = bootstrap(
        (values,),
        np.median,
        n_resamples=RESAMPLES,
        method="percentile",
        random_state=np.random.default_rng(0),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


# ---------------------------------------------------------------- auto, and its floors


def _regrets(cell: dict[str, Any], configurations: dict[str, Any]) -> list[dict[str, Any]]:
    """Each `auto` beside the best fixed length of the same drafter and options, plain decoding
    (length 0) included."""
    found = []
    for name, runs in cell["runs"].items():
        if not _is_auto(configurations[name]):
            continue
        rivals = {
            other: theirs
            for other, theirs in cell["runs"].items()
            if other == "none"
            or (_same_drafter(configurations[name], configurations[other]) and other != name)
        }
        best = _fastest(rivals, _rates(runs))
        against = ratio(runs, rivals[best])
        found.append(
            {
                "pair": cell["pair"],
                "workload": cell["workload"],
                "temperature": cell["temperature"],
                "configuration": name,
                "best_fixed": best,
                "rivals": list(rivals),
                "over_best_fixed": against,
                "regret": 1 - against["median"],
                "over_best_fixed_after_first_prompt": _after_first(runs, rivals[best]),
                "over_length_chosen_on_other_prompts": _cross_fitted(runs, rivals),
                "over_plain": ratio(runs, cell["runs"]["none"]),
            }
        )
    return found


def _is_auto(configuration: dict[str, Any]) -> bool:
    return str(configuration["num_draft_tokens"]).startswith("auto")


def _same_drafter(auto: dict[str, Any], other: dict[str, Any]) -> bool:
    same = all(auto[part] == other[part] for part in ("drafter", "options", "verifier"))
    return same and not _is_auto(other)


def _fastest(rivals: dict[str, list[Run]], prompts: Collection[Any]) -> str:
    """The configuration with the highest rate over these prompts together."""

    def rate(name: str) -> float:
        runs = [run for run in rivals[name] if run["prompt"] in prompts]
        return sum(run["emitted"] for run in runs) / sum(run["seconds"] for run in runs)

    return max(rivals, key=rate)


def _after_first(runs: list[Run], best: list[Run]) -> float | None:
    """The same once `auto` has seen one prompt: what is left when it need not find out what steps
    cost."""
    later = sorted(_rates(runs))[1:]
    return ratio(runs, best, later)["median"] if later else None


def _cross_fitted(runs: list[Run], rivals: dict[str, list[Run]]) -> float | None:
    """Against the length that is best on all other prompts: the luckiest of several noisy rivals
    wins no prize here."""
    ours = _rates(runs)
    theirs = {name: _rates(rival) for name, rival in rivals.items()}
    if len(ours) < 2:
        return None
    chosen = {
        prompt: _fastest(rivals, [other for other in ours if other != prompt]) for prompt in ours
    }
    return median(ours[prompt] / theirs[chosen[prompt]][prompt] for prompt in ours)


def _floors(regrets: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether every cell is above its floor; where not, and how many of those whole intervals are
    below it."""
    found = {}
    for label, key, floor in FLOORS:
        below = [regret for regret in regrets if regret[key]["median"] < floor]
        clear = [
            regret
            for regret in below
            if regret[key]["high"] is not None and regret[key]["high"] < floor
        ]
        found[label] = {
            "at_least": floor,
            "cells": len(regrets),
            "below": [f"{_regret_name(regret)}: {regret[key]['median']:.3f}" for regret in below],
            "interval_below": [_regret_name(regret) for regret in clear],
            "worst": min((regret[key]["median"] for regret in regrets), default=None),
            "holds": not below if regrets else None,
        }
    return found


def is_below(regret: dict[str, Any]) -> bool:
    """Whether its `auto` is below a floor."""
    return any(regret[key]["median"] < floor for _, key, floor in FLOORS)


def _regret_name(regret: dict[str, Any]) -> str:
    return f"{regret['pair']} {regret['workload']} T={regret['temperature']:g} {regret['configuration']}"


def together(stored: Sequence[dict[str, Any]]) -> str:
    """The floors over several results, such as one and its cells measured again: every prompt
    counts as often as it was met."""
    cells: dict[tuple[str, str, float], dict[str, Any]] = {}
    for number, result in enumerate(stored):
        for cell in result["cells"]:
            identity = {part: cell[part] for part in ("pair", "workload", "temperature")}
            runs = cells.setdefault(tuple(identity.values()), {**identity, "runs": {}})["runs"]
            for name, lines in cell["runs"].items():
                runs.setdefault(name, []).extend(
                    _stored_run(line, result["run_columns"], number) for line in lines
                )
    configurations = {
        name: found for result in stored for name, found in result["configurations"].items()
    }
    regrets = [regret for cell in cells.values() for regret in _regrets(cell, configurations)]
    return f"{_regret_table(regrets, counted=True)}\n\n{_floor_lines(_floors(regrets))}"


def _stored_run(line: str, columns: str, result: int) -> Run:
    """What ratios are made from; the prompt is one of this result."""
    run = dict(zip(columns.split(), line.split(), strict=True))
    return {
        "prompt": (result, int(run["prompt"])),
        "emitted": int(run["emitted"]),
        "seconds": float(run["seconds"]),
    }


# ---------------------------------------------------------------- known gains


def gain(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """tau of both sides and their ratio, from [emitted, steps] of the same prompts; resampled by
    prompt, in pairs."""
    counts = [
        np.array(column, dtype=float)
        for side in (ours, theirs)
        for column in zip(*side, strict=True)
    ]

    def statistic(
        emitted: np.ndarray,
        steps: np.ndarray,
        other_emitted: np.ndarray,
        other_steps: np.ndarray,
        axis: int = -1,
    ) -> np.ndarray:
        return (
            emitted.sum(axis) / steps.sum(axis) / (other_emitted.sum(axis) / other_steps.sum(axis))
        )

    value = float(statistic(counts[0], counts[1], counts[2], counts[3]))
    low = None
    high = None
    if len(ours) > 1 and list(map(list, ours)) != list(map(list, theirs)):
        found = bootstrap(
            counts,
            statistic,
            n_resamples=RESAMPLES,
            paired=True,
            method="percentile",
            random_state=np.random.default_rng(0),
        )
        low = float(found.confidence_interval.low)
        high = float(found.confidence_interval.high)
    taus = [float(emitted.sum() / steps.sum()) for emitted, steps in (counts[:2], counts[2:])]
    return {
        "tau": taus[0],
        "other_tau": taus[1],
        "ratio": {"median": value, "low": low, "high": high, "n": len(ours)},
    }


# ---------------------------------------------------------------- markdown


def markdown(result: dict[str, Any]) -> str:
    """All tables of a stored result."""
    temperatures = [t for t in result["plan"]["temperatures"] if t in (0, 1)] or result["plan"][
        "temperatures"
    ]
    parts = []
    for pair, about in result["pairs"].items():
        for temperature in temperatures:
            cells = [
                c for c in result["cells"] if (c["pair"], c["temperature"]) == (pair, temperature)
            ]
            if cells:
                title = f"{about['target']}, T = {temperature:g}: decode speed over plain (tau)"
                parts.append(f"**{title}**\n\n{_speedups(cells)}")
        parts += [
            f"**{pair}, {_cell_name(c)}: where a step's time goes**\n\n{_details(c)}"
            for c in _first(result, pair)
        ]
    parts += (
        ["**auto against the best fixed length**\n\n" + _regret_table(result["regrets"])]
        if result["regrets"]
        else []
    )
    parts += (
        ["**known gains, by tau**\n\n" + _gain_table(result["gains"])] if result["gains"] else []
    )
    parts += [_floor_lines(result["floors"])] if result["regrets"] else []
    parts += [_disturbed(result["cells"])]
    for label in ("failures", "texts_that_differ"):
        parts += [f"{label}: {result[label]}"] if result.get(label) else []
    return "\n\n".join(parts)


def _disturbed(cells: list[dict[str, Any]]) -> str:
    disturbed = sum(row["disturbed_runs"] for cell in cells for row in cell["summary"].values())
    total = sum(len(runs) for cell in cells for runs in cell["runs"].values())
    return f"{disturbed} of {total} runs stood beside busy neighbours"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """`words`: columns that hold text, on the left; the others hold numbers."""
    rule = ["---" if column < words else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def _names(cells: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for cell in cells for name in cell["summary"]))


def _speedups(cells: list[dict[str, Any]]) -> str:
    def entry(cell: dict[str, Any], name: str) -> str:
        row = cell["summary"].get(name)
        if row is None:
            return ""
        return (
            f"{row['tokens_per_s']:.0f} tok/s"
            if name == "none"
            else f"{row['speedup']['median']:.2f} ({row['tau']:.2f})"
        )

    rows = [[name, *(entry(cell, name) for cell in cells)] for name in _names(cells)]
    return _table(["drafter", *(cell["workload"] for cell in cells)], rows)


def _first(result: dict[str, Any], pair: str) -> list[dict[str, Any]]:
    return [cell for cell in result["cells"] if cell["pair"] == pair][:1]


def _cell_name(cell: dict[str, Any]) -> str:
    return f"{cell['workload']} at T = {cell['temperature']:g}"


def _details(cell: dict[str, Any]) -> str:
    head = [
        "drafter",
        "alpha",
        "drafted",
        "used",
        "step ms",
        *cell["summary"]["none"]["phase_s"],
        "accepted at 1, 2, 3, ...",
    ]
    rows = [
        [
            name,
            _number(row["alpha"]),
            f"{row['mean_draft_tokens']:.1f}",
            _number(row["draft_utilisation"]),
            f"{row['step_s'] * 1e3:.2f}",
            *(f"{seconds * 1e3:.2f}" for seconds in row["phase_s"].values()),
            " ".join(f"{share:.2f}" for share in row["accepted_at_position"][:5]),
        ]
        for name, row in cell["summary"].items()
    ]
    return _table(head, rows)


def _regret_table(regrets: list[dict[str, Any]], *, counted: bool = False) -> str:
    """`counted`: with the number of prompts, where they differ in it, and without what is after
    the first one."""
    rows = [
        [
            regret["pair"],
            regret["workload"],
            f"{regret['temperature']:g}",
            regret["configuration"],
            regret["best_fixed"],
            _with_interval(regret["over_best_fixed"]),
            str(regret["over_plain"]["n"])
            if counted
            else _number(regret["over_best_fixed_after_first_prompt"]),
            _number(regret["over_length_chosen_on_other_prompts"]),
            _with_interval(regret["over_plain"]),
        ]
        for regret in regrets
    ]
    third = "prompts" if counted else "after 1st prompt"
    head = [
        "pair",
        "workload",
        "T",
        "",
        "best fixed",
        "auto / best",
        third,
        "cross-fitted",
        "auto / plain",
    ]
    return _table(head, rows, words=5)


def _gain_table(gains: list[dict[str, Any]]) -> str:
    rows = [
        [
            f"{found['pair']}: {found['name']}",
            f"{found['workload']}, T = {found['temperature']:g}",
            _number(found["tau"]),
            _number(found["other_tau"]),
            _with_interval(found["ratio"], digits=3),
            _verdict(found["ratio"]),
        ]
        for found in gains
    ]
    return _table(["", "on", "tau", "of the other", "ratio (95 %)", "verdict"], rows, words=2)


def _verdict(found: Ratio) -> str:
    if found["low"] is None or found["low"] <= 1 <= found["high"]:
        return "undecided"
    return "gains" if found["low"] > 1 else "loses"


def _floor_lines(floors: dict[str, Any]) -> str:
    rows = [
        [
            label,
            f"{floor['at_least']} in every cell",
            f"{floor['worst']:.3f}",
            f"{len(floor['below'])} of {floor['cells']} below, {len(floor['interval_below'])} with the whole interval",
            "holds" if floor["holds"] else "missed",
        ]
        for label, floor in floors.items()
    ]
    return _table(["floor", "wanted", "worst", "cells", ""], rows)


def _with_interval(found: Ratio, digits: int = 2) -> str:
    interval = (
        "" if found["low"] is None else f" [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"
    )
    return f"{found['median']:.{digits}f}{interval}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
