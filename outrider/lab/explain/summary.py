"""From all texts of a run to its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outrider.build import Options
from outrider.lab.explain.advice import advise
from outrider.lab.explain.annotate import as_columns
from outrider.lab.explain.costs import times_of, with_passes
from outrider.lab.explain.counterfactual import counterfactuals
from outrider.lab.explain.explain_result import Counterfactual, ExplainResult, TextColumns
from outrider.lab.explain.explained import Explained
from outrider.lab.explain.groups import Pool
from outrider.lab.progress import Progress
from outrider.sampling.params import SamplingParams


def summarise(run: Explained, options: Options, workload: str, max_shown: int, progress: Progress) -> ExplainResult:
    """Everything that was found. Replays other drafters on the texts."""
    built, stats, pool = run.contender.built, run.stats, Pool(run.texts)
    tokenizer, verifier = built.target.tokenizer, built.decoder.verifier.name
    run.times = times_of(one.steps for one in run.texts)
    if run.times is not None:
        longest_text = max(len(one.text.prompt) + len(one.pieces) for one in run.texts)
        run.times = with_passes(run.times, built.target.lm, run.longest, longest_text)
    times, tau, shown = run.times, run.tau, _shown(run, max_shown)
    others = counterfactuals(run, tokenizer, built.target.lm.shape.vocab_size, progress)
    result = ExplainResult(
        target=options.target, draft=options.draft, configuration=run.configuration.label, verifier=verifier,
        is_greedy=run.params.is_greedy, has_draft_probs=run.has_draft_probs, is_chain=run.is_chain,
        sampling=_sampling(run.params),
        num_draft_tokens=str(run.contender.config["num_draft_tokens"]), workload=workload, texts_read=len(run.texts),
        steps=stats.steps, emitted=stats.emitted, drafted=stats.drafted, tested=stats.tested,
        accepted=stats.accepted, ideal=sum(one.ledger.ideal for one in run.texts), tau=tau, alpha=run.alpha,
        tokens_per_s=None if times is None else tau.value / times.step_s, times=times,
        other_cpu=max(one.other_cpu for one in run.recordings),
        causes=pool.causes(stats.steps, times), by_level=pool.by_level(), by_kind=pool.by_kind(), by_section=pool.by_section(),
        by_entropy=pool.by_entropy(), ranks=pool.ranks(), confusions=pool.confusions(tokenizer), counterfactuals=others,
        advice=[], texts=shown, notes=[*built.notes, *_remarks(run, others, len(shown))],
    )  # fmt: skip
    result.advice = advise(result)
    return result


def _shown(run: Explained, max_shown: int) -> list[TextColumns]:
    """The first texts, as many as fit into so many tokens; one at least, if any are wanted."""
    found: list[TextColumns] = []
    room = max_shown
    for one in run.texts:
        room -= len(one.pieces)
        if max_shown <= 0 or (room < 0 and found):
            break
        found.append(as_columns(one, run.contender.built.target.tokenizer))
    return found


def _remarks(run: Explained, others: Sequence[Counterfactual], num_shown: int) -> list[str]:
    notes = []
    if num_shown < len(run.texts):
        notes.append(f"the first {num_shown} of {len(run.texts)} texts are shown; the numbers are of all of them")
    current = next((one for one in others if one.current and one.exact), None)
    if current is not None and round(current.steps) != run.stats.steps:
        notes.append(
            f"replayed at its own length this run has {current.steps:.0f} steps, recorded were {run.stats.steps}: some guesses "
            "are near ties, which rounding decides otherwise in a pass of another width"
        )
    return notes


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """What differs from greedy decoding without filters, and the number of tokens."""
    plain = asdict(SamplingParams())
    always = ("temperature", "max_tokens")
    return {name: value for name, value in asdict(params).items() if value != plain[name] or name in always}
