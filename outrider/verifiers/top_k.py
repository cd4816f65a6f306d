"""LOSSY: the longest path of tokens that are each among the target's K likeliest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from outrider.sampling.lossy import is_among_top
from outrider.sampling.rng import Randomness
from outrider.settings import checked, setting
from outrider.types import Draft, Verdict
from outrider.verifiers.base import Verifier, check, finish_tree, longest_ends


@checked()
@dataclass(frozen=True)
class TopKSettings:
    """How many of the likeliest tokens are good enough."""

    k: int = setting(3, "how many of the likeliest tokens are good enough", at_least=1)


class TopKVerifier(Verifier):
    name: ClassVar[str] = "top-k"
    lossless: ClassVar[bool] = False
    shape: ClassVar[str] = "tree"
    Settings: ClassVar[type] = TopKSettings

    def __init__(self, settings: TopKSettings | None = None) -> None:
        self._settings = settings or TopKSettings()

    @classmethod
    def build(cls, settings: TopKSettings) -> TopKVerifier:
        return cls(settings)

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        check(self, draft, target_probs)
        ends = longest_ends(
            draft, is_among_top(target_probs, draft.tokens, draft.parent_nodes(), self._settings.k)
        )
        return finish_tree(draft, ends, target_probs, target_probs, rng, positions)
