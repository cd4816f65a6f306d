"""The target as a drafter sees it in vLLM: a vocabulary, a context, a tokenizer, and no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AutoTokenizer

from outrider.errors import CapabilityError, CheckpointError
from outrider.models.card import unknown_card
from outrider.models.lm import LM, LMShape
from outrider.models.loaded import LoadedModel
from outrider.models.pass_plan import PassPlan


@dataclass(frozen=True)
class TextOnly:
    """The model as vLLM's configuration describes it."""

    name: str
    vocab_size: int
    context_length: int
    tokenizer: str  # folder or hub id
    tokenizer_revision: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def of(cls, model_config: Any) -> TextOnly:
        """Read the target's names and sizes from vLLM's ModelConfig."""
        return cls(
            model_config.model,
            model_config.get_vocab_size(),
            model_config.max_model_len,
            model_config.tokenizer,
            model_config.tokenizer_revision,
            bool(model_config.trust_remote_code),
        )

    def load(self, *, tokenizer: bool) -> LoadedModel:
        """A model that cannot be run, with its tokenizer where one is asked for. Raises
        CheckpointError where that is missing."""
        shape = LMShape(self.vocab_size, self.context_length, (), None, 0)
        lm = LM(_NoWeights(self.name), shape, torch.float32, torch.device("cpu"))
        card = unknown_card(self.vocab_size)
        return LoadedModel(
            self.name, lm, card, self._load_tokenizer() if tokenizer else None, frozenset()
        )

    def _load_tokenizer(self) -> Any:
        try:
            return AutoTokenizer.from_pretrained(
                self.tokenizer,
                revision=self.tokenizer_revision,
                trust_remote_code=self.trust_remote_code,
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the tokenizer '{self.tokenizer}' cannot be loaded: {error}"
            ) from error


class _NoWeights:
    """Stands where a model's arithmetic would be; the weights are vLLM's."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, ids: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor) -> Tensor:
        self._refuse()

    def with_hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        plan: PassPlan,
        columns: Tensor,
        layers: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise CapabilityError(
            f"'{self._name}' is run by vLLM: a drafter in there cannot run it, too"
        )
