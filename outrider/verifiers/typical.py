"""LOSSY: typical acceptance (Medusa, Cai et al. 2401.10774): the longest path of tokens that are
likely enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from outrider.sampling.lossy import is_typical
from outrider.sampling.rng import Randomness
from outrider.settings import checked, setting
from outrider.types import Draft, Verdict
from outrider.verifiers.base import Verifier, check, finish_tree, longest_ends


@checked()
@dataclass(frozen=True)
class TypicalSettings:
    """Keep x where p(x) > min(epsilon, delta exp(-entropy of p))."""

    epsilon: float = setting(
        0.09, "probability from which every token is good enough", at_least=0, at_most=1
    )
    delta: float = setting(0.3, "share of exp(-entropy) from which one is", at_least=0, at_most=1)


class TypicalVerifier(Verifier):
    name: ClassVar[str] = "typical"
    lossless: ClassVar[bool] = False
    shape: ClassVar[str] = "tree"
    Settings: ClassVar[type] = TypicalSettings

    def __init__(self, settings: TypicalSettings | None = None) -> None:
        self._settings = settings or TypicalSettings()

    @classmethod
    def build(cls, settings: TypicalSettings) -> TypicalVerifier:
        return cls(settings)

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        check(self, draft, target_probs)
        wanted = (draft.tokens, draft.parent_nodes(), self._settings.epsilon, self._settings.delta)
        ends = longest_ends(draft, is_typical(target_probs, *wanted))
        return finish_tree(draft, ends, target_probs, target_probs, rng, positions)
