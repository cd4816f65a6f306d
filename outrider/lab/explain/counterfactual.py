"""What another choice would have given on the same texts, from the recording alone: no model runs.

Each says how it was found, and what it does not know. Steps become tokens/s with the times of this run (what a step took, how
much of it was drafting, what wider passes take): a chain of another length pays for its draft tokens what one cost here,
everything else costs what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from scipy.optimize import isotonic_regression

from outrider.errors import in_words
from outrider.lab.costs import measure_passes
from outrider.lab.explain.explain_result import Counterfactual, Times
from outrider.lab.explain.explained import Explained
from outrider.lab.explain.forecast import TextWalk, favourites_walk, overlap_walk, total_steps
from outrider.lab.replay.loop import text_target
from outrider.lab.replay.replay import replay, sort_drafters
from outrider.lab.replay.texts import Text
from outrider.lab.runner import Step
from outrider.models.lm import LM

Family = Literal["length", "stop rule", "temperature", "drafter"]
TIMES_LIMIT = "times are estimated: a level of draft costs what it did here, a target pass what one of that width took afterwards"
PASS_REPEATS = 5


def counterfactuals(run: Explained, tokenizer: Any, vocab_size: int) -> tuple[list[Counterfactual], list[str]]:
    """In the order in which they are shown: chain lengths, the stop rule, temperatures, other drafters.

    The second part has a line about each drafter that could not be replayed.
    """
    found = []
    if run.has_draft_probs:
        walks = run.walks()
        found += list(_lengths(run, walks))
        if run.stop is not None:
            found.append(_without_stop(run, walks))
        found.append(_temperature(run))
    drafters, notes = _replays(run, tokenizer, vocab_size)
    return found + drafters, notes


def _lengths(run: Explained, walks: Sequence[TextWalk]) -> Iterator[Counterfactual]:
    if run.is_guessed:
        method = "the draft's own guess at every position of these texts, compared with the text"
    else:
        method = "the expectation over the draft's draws and the verifier's coins, given these texts"
    stop = "" if run.stop is None else ", with the stop rule"
    alone = "" if run.is_chain else " instead of what was drafted"
    for length in range(run.longest + 1):
        steps, current = total_steps(walks, length, run.stop), run.is_chain and length == run.length
        rate = chain_rate(run.times, run.stats.emitted / steps, length)
        if run.stop is not None and length:  # how many tokens the rule would let through is not known
            rate = run.stats.emitted / run.stats.steps / run.times.step_s if current and run.times else None
        if run.is_mixed and length:  # nor what one part's share of the drafting is
            rate = None
        yield _row(
            run, "length", f"chain of {length}{stop}{alone}" if length else "plain decoding", steps, rate, length=length,
            current=current, exact=run.is_decided, method=method, limits=TIMES_LIMIT,
        )  # fmt: skip


def _without_stop(run: Explained, walks: Sequence[TextWalk]) -> Counterfactual:
    steps = total_steps(walks, run.length)
    rate = chain_rate(run.times, run.stats.emitted / steps, run.length)
    return _row(
        run, "stop rule", f"chain of {run.length} without the stop rule", steps, rate, exact=run.is_decided,
        method="as above, every draft as long as was asked for", limits=TIMES_LIMIT,
    )  # fmt: skip


def _temperature(run: Explained) -> Counterfactual:
    """Greedy runs at temperature 1, sampled ones at 0: at the same positions, which the other would not have visited."""
    other: Callable[..., TextWalk] = overlap_walk if run.params.is_greedy else favourites_walk
    walks = [other(one.positions, one.text.limit) for one in run.texts]
    steps = total_steps(walks, run.length)
    how = "a draft token is kept with probability sum min(p, q) of the unfiltered distributions" if run.params.is_greedy else (
        "each model emits its likeliest token; a draft token is kept where they agree"
    )  # fmt: skip
    return _row(
        run, "temperature", f"temperature {1 if run.params.is_greedy else 0}, chain of {run.length}", steps,
        chain_rate(run.times, run.stats.emitted / steps, run.length), exact=False, method=how,
        limits="at the positions of these texts; at the other temperature the text would have been another one",
    )  # fmt: skip


def _replays(run: Explained, tokenizer: Any, vocab_size: int) -> tuple[list[Counterfactual], list[str]]:
    """Every drafter that needs only text, and why others could not be tried."""
    texts = [
        Text(list(one.text.prompt), list(one.text.output), one.task, one.id, one.text.limit)
        for one in run.texts
        if one.text.output
    ]
    target = text_target(tokenizer, vocab_size)
    drafters = sort_drafters()
    rows, notes = [], list(drafters.unusable)
    for configuration in drafters.configurations:
        if configuration.drafter == run.configuration.drafter:
            continue
        try:
            total = replay(texts, configuration, target=target).total
        except Exception as error:  # noqa: BLE001  a third party's drafter may raise anything
            notes.append(f"not replayed: {configuration.label}: {in_words(error)}")
            continue
        rate = None
        if run.times is not None:
            rest = rest_at(run.times, 1 + total.drafted / total.steps)
            rate = total.emitted / (total.steps * rest + total.time_s["draft"])
        row = _row(
            run, "drafter", f"drafter {configuration.label}", total.steps, rate, exact=True,
            method="the real drafter on these texts, at its defaults; a copied token is kept where the text goes on with it",
            limits="times are estimated: a target pass of the mean width, drafting as measured in the replay",
        )  # fmt: skip
        rows.append(row)
    return rows, notes


def _row(
    run: Explained, family: Family, name: str, steps: float, rate: float | None, *, exact: bool, method: str, limits: str,
    length: int | None = None, current: bool = False,
) -> Counterfactual:  # fmt: skip
    return Counterfactual(
        name=name, family=family, steps=steps, tokens_per_step=run.stats.emitted / steps, tokens_per_s=rate,
        num_draft_tokens=length, current=current, exact=exact, method=method, limits=limits,
    )  # fmt: skip


def times_of(texts: Iterable[Sequence[Step]]) -> Times | None:
    """Means over the steps of all texts but their first ones, which also read the prompt into the draft; None where there is no
    other."""
    steps = [step for text in texts for step in text[1:]]
    seconds = sum(step.seconds / step.rows for step in steps)
    if seconds <= 0:
        return None
    draft_s, levels = sum(step.draft_s / step.rows for step in steps), sum(step.num_levels for step in steps)
    return Times(
        step_s=seconds / len(steps), draft_s=draft_s / len(steps), steps=len(steps),
        width=1 + sum(len(step.tokens) for step in steps) / len(steps), draft_level_s=draft_s / levels if levels else 0.0,
    )  # fmt: skip


def with_passes(times: Times, target: LM, longest: int, context: int) -> Times:
    """Also what target passes over 1 .. longest + 1 tokens take, measured now, one width after the other, several times: medians,
    made to rise with the width (isotonic regression), as passes do. The target must be idle."""
    widths = range(1, longest + 2)
    room = max(1, min(context, target.shape.context_length - longest - 2))
    found = measure_passes(target, widths, context=room, repeats=PASS_REPEATS)
    risen = isotonic_regression([found[width] for width in widths]).x.tolist()
    return times.model_copy(update={"pass_s": dict(zip(widths, risen, strict=True))})


def rest_at(times: Times, width: float) -> float:
    """Seconds of a step without drafting, were its target pass `width` tokens wide: in proportion to passes of both widths, so
    that a machine which was faster or slower when these were measured does not matter."""
    if not times.pass_s:
        return times.rest_s
    now, then = np.interp([times.width, width], list(times.pass_s), list(times.pass_s.values()))
    return times.rest_s * float(then / now)


def chain_rate(times: Times | None, tokens_per_step: float, length: int) -> float | None:
    """Tokens/s of steps that draft a chain of `length`: drafting is paid by the level, a pass by its width."""
    if times is None or (length and not times.draft_level_s):
        return None
    return tokens_per_step / (rest_at(times, length + 1) + length * times.draft_level_s)
