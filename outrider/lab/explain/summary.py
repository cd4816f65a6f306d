"""From all texts of a run to its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from outrider.build import Options
from outrider.drafters.base import Drafter
from outrider.drafters.composite import CompositeDrafter
from outrider.lab.configuration import Configuration
from outrider.lab.explain.advice import Findings, advise
from outrider.lab.explain.costs import Clock, with_passes
from outrider.lab.explain.counterfactual import Recorded, counterfactuals
from outrider.lab.explain.forecast import Mode
from outrider.lab.explain.groups import Pool
from outrider.lab.explain.labelled import Labelled, as_columns
from outrider.lab.explain.recorded import Recording
from outrider.lab.explain.result import Counterfactual, ExplainResult, TextColumns
from outrider.lab.intervals import ratio_of_sums
from outrider.lab.progress import Progress
from outrider.lab.replay.replay import sum_stats
from outrider.lab.result import Interval
from outrider.lab.runner import Contender
from outrider.sampling.confidence import ConfidenceSettings
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats


@dataclass
class Run:
    """What was run, and what it gave so far."""

    contender: Contender
    configuration: Configuration
    params: SamplingParams
    is_race: bool
    texts: list[Labelled] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    per_text: list[DecodeStats] = field(default_factory=list)
    other_cpu: float = 0.0

    def add(self, text: Labelled, recording: Recording) -> None:
        """One finished prompt."""
        self.texts.append(text)
        self.clock.add(recording.steps, recording.draft_s)
        self.per_text.append(recording.stats)
        self.other_cpu = max(self.other_cpu, recording.other_cpu)

    @property
    def stats(self) -> DecodeStats:
        """Counters of all texts."""
        return sum_stats(self.per_text)

    @property
    def tau(self) -> Interval:
        return ratio_of_sums([one.emitted for one in self.per_text], [one.steps for one in self.per_text])

    @property
    def alpha(self) -> Interval | None:
        """None where nothing was tested."""
        tested = [one.tested for one in self.per_text]
        return ratio_of_sums([one.accepted for one in self.per_text], tested) if all(tested) else None

    @property
    def has_law(self) -> bool:
        """A model stands behind the draft, whose law is known at the positions of the texts."""
        return any(one.annotated.positions.has_law for one in self.texts)

    @property
    def num_steps(self) -> int:
        return sum(len(one.annotated.steps) for one in self.texts)

    def recorded(self, lossy: bool) -> Recorded:
        """For counterfactuals."""
        parts, drafter = self.configuration.parts(lossy=lossy), self.contender.built.decoder.drafter
        settings = parts.drafter_settings
        return Recorded(
            texts=self.texts, mode=self._mode() if self.has_law else None, length=parts.length.most,
            is_chain=not (parts.draws_trees or parts.length.is_auto or isinstance(drafter, CompositeDrafter)),
            is_mixed=isinstance(drafter, CompositeDrafter),
            is_sure=_follows_its_law(drafter, settings), is_greedy=self.params.is_greedy,
            coupled=self.is_race, configuration=self.configuration, times=self.clock.times(), steps=self.num_steps,
            emitted=self.stats.emitted,
            stop=settings if isinstance(settings, ConfidenceSettings) and settings.stop != "none" else None,
        )  # fmt: skip

    def _mode(self) -> Mode:
        if self.params.is_greedy or self.is_race:
            return "guessed"
        return "block" if self.contender.built.decoder.verifier.name in ("block", "traversal") else "token"


def summarise(run: Run, options: Options, workload: str, max_shown: int, progress: Progress) -> ExplainResult:
    """Everything that was found. Replays other drafters on the texts."""
    built, stats, pool = run.contender.built, run.stats, Pool(run.texts)
    tokenizer, verifier = built.target.tokenizer, built.decoder.verifier.name
    recorded = run.recorded(options.lossy)
    if recorded.times is not None:
        longest_text = max(len(one.annotated.text.prompt) + len(one.pieces) for one in run.texts)
        timed = with_passes(recorded.times, built.target.lm, recorded.longest, longest_text)
        recorded = replace(recorded, times=timed)
    times, tau = recorded.times, run.tau
    others = counterfactuals(recorded, tokenizer, built.target.lm.shape.vocab_size, progress)
    causes, by_kind, ranks = pool.causes(recorded.steps, times), pool.by_kind(), pool.ranks()
    findings = Findings(
        causes=causes, by_kind=by_kind, ranks=ranks, counterfactuals=others, times=times, emitted=stats.emitted,
        tested=stats.tested, alpha=stats.alpha, tau=tau.value, verifier=verifier, is_chain=recorded.is_chain, has_law=run.has_law,
        is_greedy=run.params.is_greedy, other_cpu=run.other_cpu,
    )  # fmt: skip
    shown = _shown(run, max_shown)
    return ExplainResult(
        target=options.target, draft=options.draft, configuration=run.configuration.label, verifier=verifier,
        is_greedy=run.params.is_greedy, has_law=run.has_law, is_chain=recorded.is_chain, sampling=_sampling(run.params),
        num_draft_tokens=str(run.contender.config["num_draft_tokens"]), workload=workload, texts_read=len(run.texts),
        steps=recorded.steps, emitted=stats.emitted, drafted=stats.drafted, tested=stats.tested,
        accepted=stats.accepted, ideal=sum(one.annotated.ledger.ideal for one in run.texts), tau=tau, alpha=run.alpha,
        tokens_per_s=None if times is None else tau.value / times.step_s, other_cpu=run.other_cpu, times=times, causes=causes,
        by_level=pool.by_level(), by_kind=by_kind, by_section=pool.by_section(), by_entropy=pool.by_entropy(), ranks=ranks,
        confusions=pool.confusions(tokenizer), counterfactuals=others, advice=advise(findings), texts=shown,
        notes=[*built.notes, *_remarks(run, others, len(shown))],
    )  # fmt: skip


def _follows_its_law(drafter: Drafter, settings: Any) -> bool:
    """Whether what it drafts is known from its model's laws alone: neither other layers nor a trained rule decide."""
    whole = not getattr(settings, "skip_layers", "") and getattr(settings, "stop", "none") != "acceptance"
    return drafter.model is not None and whole


def _shown(run: Run, max_shown: int) -> list[TextColumns]:
    """The first texts, as many as fit into so many tokens; one at least, if any are wanted."""
    found: list[TextColumns] = []
    room = max_shown
    for one in run.texts:
        room -= len(one.pieces)
        if max_shown <= 0 or (room < 0 and found):
            break
        found.append(as_columns(one, run.contender.built.target.tokenizer))
    return found


def _remarks(run: Run, others: Sequence[Counterfactual], num_shown: int) -> list[str]:
    notes = []
    if num_shown < len(run.texts):
        notes.append(f"the first {num_shown} of {len(run.texts)} texts are shown; the numbers are of all of them")
    current = next((one for one in others if one.current and one.exact), None)
    if current is not None and round(current.steps) != run.num_steps:
        notes.append(
            f"replayed at its own length this run has {current.steps:.0f} steps, recorded were {run.num_steps}: some guesses are "
            "near ties, which rounding decides otherwise in a pass of another width"
        )
    return notes


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """What differs from greedy decoding without filters, and the number of tokens."""
    plain = asdict(SamplingParams())
    always = ("temperature", "max_tokens")
    return {name: value for name, value in asdict(params).items() if value != plain[name] or name in always}
