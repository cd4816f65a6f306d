"""Small pairs of models, run and recorded: what the tests of this package look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.build import Options
from outrider.configuration import Configuration
from outrider.lab.explain.distributions import FinishedText
from outrider.lab.runner import Contender, Runner, Trace
from outrider.sampling.params import SamplingParams
from outrider.sampling.rng import Randomness
from outrider.types import Draft, Verdict
from outrider.verifiers.base import Verifier
from tests.helpers import byte_tokenizer, disturbed, save_checkpoint, tiny_llama

PROMPTS = [[5, 80, 33, 7, 80, 33], [9, 9, 41, 7, 200, 13, 60], [77, 3, 21]]


def save_pair(
    root: Path, *, noise: float = 0.08, sharpness: float = 2.0, draft: Any = None
) -> tuple[str, str]:
    """A random target and a draft that is right most of the time, or the given one."""
    target = tiny_llama(257, sharpness=sharpness)
    for name, model in (("target", target), ("draft", draft or disturbed(target, noise))):
        save_checkpoint(root / name, model, byte_tokenizer())
    return str(root / "target"), str(root / "draft")


def contender_of(pair: tuple[str, str], configuration: str) -> Contender:
    """Ready to run, uncompiled, in float32."""
    return runner_of(pair, configuration).open(Configuration.parse(configuration))


def runner_of(pair: tuple[str, str], *configurations: str) -> Runner:
    wanted = [Configuration.parse(text) for text in configurations]
    draft = pair[1] if any(one.parts().requirements.draft for one in wanted) else None
    return Runner(Options(pair[0], draft=draft, dtype="float32", threads=1), wanted)


def finished(contender: Contender, trace: Trace, params: SamplingParams) -> FinishedText:
    return FinishedText(trace, params, contender.built.decoder.verifier.coupled)


class Spy(Verifier):
    """Passes everything on and keeps what the real step saw."""

    lossless = False  # so that greedy rows come here, too

    def __init__(self, real: Verifier) -> None:
        self._real = real
        self.name, self.shape, self.coupled = real.name, real.shape, real.coupled  # type: ignore[misc]
        self.seen: list[tuple[Draft, Tensor, Verdict]] = []

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        verdict = self._real.verify(draft, target_probs, rng, positions)
        self.seen.append((draft, target_probs.clone(), verdict))
        return verdict


def spied(contender: Contender) -> Spy:
    """From now on everything the contender verifies is kept."""
    spy = Spy(contender.built.decoder.verifier)
    contender.built.decoder.verifier = spy
    return spy
