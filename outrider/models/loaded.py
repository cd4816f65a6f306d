"""A model that is ready to run, as plain data: what loading makes and all else is handed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from outrider.models.card import ModelCard
from outrider.models.tokens.vocabulary import mask_token_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from outrider.models.draft_loop import DraftLoop
    from outrider.models.lm import LM
    from outrider.models.source import ModelSource


@dataclass(frozen=True)
class Tables:
    """Both ends of a model: what turns tokens into vectors and vectors into logits.
    `derive.weight_of` reads `output`."""

    embedding: nn.Module
    output: nn.Module

    @classmethod
    def of(cls, module: Any) -> Tables:
        return cls(module.get_input_embeddings(), module.get_output_embeddings())


@dataclass
class LoadedModel:
    """A model ready to run, with what the rest needs to know about where it came from."""

    name: str
    lm: LM
    card: ModelCard
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: frozenset[int]
    draft_loop: DraftLoop | None = None  # when it drafts and its passes are recorded (CUDA graphs)
    # transformers', of a model that was not started from what an earlier start kept: MTP heads are
    # made by it
    config: Any = None
    module: nn.Module | None = None  # kept only for a drafter that runs on the target's own weights
    tables: Tables | None = None  # of the target: kept for trained heads, which share them
    generation_config: Any = None  # `generation_config.Asked`
    # its files; None: of a module that was handed over, or a model that is elsewhere
    source: ModelSource | None = None
    called: str | None = None  # by the user, who may say 'demo'; None: by its name

    @property
    def label(self) -> str:
        """The name of the model in messages."""
        return self.called or self.name

    @property
    def mask_token(self) -> int | None:
        """The token by which it guesses several tokens in one pass (PARD); None: it has none.

        Raises CheckpointError for one that its vocabulary lacks."""
        return mask_token_in(self.card.values, self.lm.shape.vocab_size, self.label)

    def twin(self) -> LoadedModel:
        """A model with these weights and programs, and an empty cache of its own."""
        lm = self.lm.twin()
        loop = self.draft_loop
        return replace(self, lm=lm, draft_loop=None if loop is None else loop.on(lm))


@dataclass(frozen=True)
class ModelMemory:
    """One model's part."""

    name: str
    # one copy in the dtype it runs in; 0 when it cannot be known without loading
    weights_bytes: int
    kv_bytes_per_token: int
    # of `weights_bytes`: stays as it is stored, so that no second copy is packed
    quantised_bytes: int = 0
    loading_bytes: int = 0  # while loading rounds plain weights; 0: it rounds none

    def held_bytes(self, copies: float) -> int:
        """Weights at the worst moment of loading."""
        return max(
            self.loading_bytes,
            round((self.weights_bytes - self.quantised_bytes) * copies) + self.quantised_bytes,
        )
