"""The subject of a certificate: one decoder as it was configured, and plain decoding on the same
loaded target, watched step by step.

Plain decoding never uses the configured verifier: it has an empty draft and a built-in rule, which
then only draws from the target's distribution. The coupled (drafter-invariant) case is the
exception: its plain text is defined by its own noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from outrider.admission import constraint_for, new_row
from outrider.build import Built, Options, build
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.lookup.prediction import PredictionDrafter
from outrider.drafters.none import NoDrafter
from outrider.errors import ConfigError, OutriderError
from outrider.kv.view import KVView
from outrider.lab.certify.certify_result import Sampler
from outrider.llm import LLM
from outrider.models.lm import LM
from outrider.rows import Row
from outrider.sampling.constraint import Constraint
from outrider.sampling.distribution import distribution
from outrider.sampling.params import SamplingParams
from outrider.step import StepObserver
from outrider.stops import StopStrings
from outrider.types import Draft, Verdict
from outrider.verifiers.base import Verifier
from outrider.verifiers.token import TokenVerifier


class UnsoundError(OutriderError):
    """A verifier raised: it may be anybody's code, and what it raises is about it."""


@dataclass
class Seen:
    """A step seen from inside, for all its rows."""

    draft: Draft
    logits: Tensor  # (B, N+1, V)
    probs: Tensor  # (B, N+1, V) as the verifier should see them
    verdict: Verdict


class WatchedDecoder(Decoder):
    """Decodes as any other, and where it `is_watched` keeps what the latest step saw."""

    is_watched = False
    seen: Seen

    @classmethod
    def like(cls, given: Decoder) -> WatchedDecoder:
        """A watched decoder with the parts of another."""
        return cls(given.target, given.drafter, given.verifier, given.control, given.max_forced)

    def _verify(self, logits: Tensor, draft: Draft) -> Verdict:
        try:
            verdict = super()._verify(logits, draft)
        except OutriderError:
            raise
        except Exception as error:
            what = f"verifier '{self.verifier.name}' raised {type(error).__name__}: {error}"
            raise UnsoundError(what) from error
        if self.is_watched:
            probs = distribution(logits, self.rows.sampling, self.rows.history, draft)
            self.seen = Seen(draft, logits, probs, verdict)
        return verdict

    @contextmanager
    def observed(self, *observers: StepObserver) -> Iterator[None]:
        """While it lasts, these observers see every step, too."""
        attached = self.observers
        self.observers = [*self.observers, *observers]
        try:
            yield
        finally:
            self.observers = attached

    @contextmanager
    def watched(self, *observers: StepObserver) -> Iterator[None]:
        """While it lasts, the decoder is watched, and observed by these observers."""
        self.is_watched = True
        try:
            with self.observed(*observers):
                yield
        finally:
            self.is_watched = False


@dataclass
class Subject:
    """One configuration and its plain counterpart, on the same models, one call at a time."""

    asked: Options  # as the user wrote it, for names
    built: Built
    speculative: WatchedDecoder
    plain: WatchedDecoder

    @classmethod
    def open(cls, options: Options, status: Callable[[str], None] = lambda line: None) -> Subject:
        """Load and check. Raises what `build` raises, and ConfigError where nothing is speculated."""
        if options.prefill is not None:
            raise ConfigError(
                "--prefill changes answers by design, so losslessness cannot be certified: leave it "
                "out ('outrider bench' measures what it costs)"
            )
        built = build(options, status)
        given = built.decoder
        if isinstance(given.drafter, NoDrafter):
            raise ConfigError(
                "drafter 'none' does not speculate, so there is nothing to certify; name another "
                "--drafter"
            )
        if isinstance(given.drafter, PredictionDrafter):
            raise ConfigError(
                "drafter 'prediction' follows what requests predict, and a workload predicts "
                "nothing; name another"
            )
        plain_rule: Verifier = given.verifier if given.verifier.coupled else TokenVerifier()
        plain = WatchedDecoder(given.target, NoDrafter(), plain_rule, FixedLength(0))
        return cls(options, built, WatchedDecoder.like(given), plain)

    @cached_property
    def drafting(self) -> WatchedDecoder:
        """The speculative decoder, asking for the most nodes in every step: `auto` may find that
        drafting does not pay here."""
        given = self.speculative
        return WatchedDecoder(
            given.target,
            given.drafter,
            given.verifier,
            FixedLength(self.max_drafted),
            given.max_forced,
        )

    def sampler(self, name: Sampler) -> WatchedDecoder:
        """The decoder that draws as one of the two samplers."""
        return self.plain if name == "plain" else self.drafting

    @property
    def draft_model(self) -> LM | None:
        """The model that the drafter draws from, where it has a cache of its own to be fed on."""
        model = self.speculative.drafter.model
        return None if model is None or isinstance(model.kv, KVView) else model

    @property
    def is_lossless(self) -> bool:
        """The claims of verifier and drafter about themselves."""
        return self.speculative.verifier.lossless and self.speculative.drafter.lossless

    @property
    def target(self) -> LM:
        return self.built.target.lm

    @property
    def max_drafted(self) -> int:
        """Nodes that a step asks for at most."""
        return int(str(self.built.options.num_draft_tokens).rpartition(":")[2])

    def texts(
        self,
        decoder: WatchedDecoder,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        together: int = 1,
    ) -> list[list[int]]:
        """Generated token ids through `LLM.generate`, as any user gets them; `together` prompts at
        a time."""
        options = replace(self.built.options, max_num_seqs=together)
        llm = LLM.around(replace(self.built, decoder=decoder, options=options))
        fed = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = llm.generate(fed, list(params), use_tqdm=False)
        return [completion.token_ids for completion in done]

    def row(self, number: int, prompt: list[int], params: SamplingParams, seed: int) -> Row:
        """A row of a prompt that stop strings do not end."""
        row = new_row(self.built, number, prompt, params, with_text=False)
        return replace(row, seed=seed, stops=StopStrings([]))

    def constraint(self, output: Sequence[int], params: SamplingParams) -> Constraint | None:
        """The grammar and the bans of `params` after these output tokens; fresh. None where there
        is neither."""
        constraint = constraint_for(self.built, params)
        if constraint is not None:
            constraint.commit(output)
        return constraint
