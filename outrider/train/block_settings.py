"""The recipe's settings of a block head, and the sizes they mean for a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError
from outrider.models.heads.block_config import BlockConfig
from outrider.settings import checked, setting
from outrider.train.losses import parse_loss
from outrider.train.recipe import RecipeSetup

OWNER = "kind 'block'"
MAX_CONTEXT_LAYERS = 5  # of the target whose states make the context, when the user names none


@checked()
@dataclass(frozen=True)
class BlockTraining:
    """Sizes, losses, anchors."""

    num_layers: int = setting(2, "layers of the head", at_least=1)
    block_size: int = setting(8, "slots of a block, the anchor's included", at_least=2)
    target_layers: str = setting(
        "", "layers whose OUTPUTS make the context, like 1,9,17; empty: spread evenly"
    )
    intermediate_size: int = setting(0, "of the head's MLPs; 0: the target's", at_least=0)
    markov_rank: int = setting(64, "of the Markov head; 0: none (plain DFlash)", at_least=0)
    markov_gated: bool = setting(False, "a gate made of the hidden state on the Markov head")
    confidence: bool = setting(True, "a head that predicts acceptance")
    sample_from_anchor: bool = setting(
        True, "the anchor's slot guesses, too (DSpark); false: DFlash"
    )
    causal: bool = setting(
        False, "slots of a block see those before them only (JetSpec), for trees"
    )
    mask_token: int = setting(
        -1, "token that stands for the masks; -1: the one that the responses use least"
    )
    num_anchors: int = setting(64, "blocks per text and batch", at_least=1)
    loss: str = setting(
        "0.1*ce+0.9*tv", "losses.py: kl, reverse_kl, jsd, tv, ce, nla, lk_hybrid, or a sum"
    )
    confidence_weight: float = setting(1.0, "of the confidence head's loss", at_least=0)
    warm_up: float = setting(
        0.3, "share of the run that begins with KL instead", at_least=0, at_most=1
    )
    decay: float = setting(4.0, "positions after which a guess counts 1/e", above=0)

    def __post_init__(self) -> None:
        self.layers()
        parse_loss(self.loss)

    def layers(self) -> list[int]:
        """`target_layers` as numbers. Raises ConfigError."""
        words = (
            [word.strip() for word in self.target_layers.split(",")] if self.target_layers else []
        )
        if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
            raise ConfigError(
                f"{OWNER}: target_layers must be different layer numbers like 1,9,17; got "
                f"'{self.target_layers}'"
            )
        return [int(word) for word in words]


def spread_layers(num_layers: int) -> list[int]:
    """Layer outputs spread evenly over 1 .. L-3 (DFlash); up to L-2 where there are few."""
    first = min(1, max(num_layers - 2, 0))
    last = max(first, num_layers - (3 if num_layers >= 6 else 2))
    count = min(MAX_CONTEXT_LAYERS, last - first + 1)
    if count == 1:
        return [last]
    return [first + round(index * (last - first) / (count - 1)) for index in range(count)]


def new_config(
    settings: BlockTraining, target: Any, num_layers: int, setup: RecipeSetup
) -> BlockConfig:
    """The head's shape for a target. Raises ConfigError for layers or a mask token it does not
    have."""
    text_config = target.config.get_text_config()
    vocab_size = target.get_output_embeddings().weight.shape[0]
    outputs = settings.layers() or spread_layers(num_layers)
    if max(outputs) >= num_layers - 1 and settings.target_layers:
        raise ConfigError(
            f"{OWNER}: target_layers must be among 0..{num_layers - 2} of {setup.name}, got "
            f"'{settings.target_layers}'"
        )
    mask = settings.mask_token if settings.mask_token >= 0 else _least_used(setup)
    if mask >= vocab_size:
        raise ConfigError(f"{OWNER}: mask_token must be below {vocab_size}, got {mask}")
    num_heads = text_config.num_attention_heads
    return BlockConfig(
        hidden_size=text_config.hidden_size,
        intermediate_size=settings.intermediate_size or text_config.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(text_config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(text_config, "head_dim", None) or text_config.hidden_size // num_heads,
        vocab_size=vocab_size,
        block_size=settings.block_size,
        target_hidden_size=text_config.hidden_size,
        target_layers=tuple(_key(layer, num_layers) for layer in outputs),
        num_target_layers=num_layers,
        mask_token_id=mask,
        sample_from_anchor=settings.sample_from_anchor,
        causal=settings.causal,
        max_positions=getattr(text_config, "max_position_embeddings", None) or 40960,
        markov_rank=settings.markov_rank,
        markov_gated=settings.markov_gated and settings.markov_rank > 0,
        confidence=settings.confidence,
        confidence_with_markov=settings.confidence and settings.markov_rank > 0,
        trained_for=setup.name,
    )


def _key(layer: int, num_layers: int) -> int:
    """A layer's output is what enters the next one; after the last stands the final norm."""
    return layer + 1 if layer + 1 < num_layers else -1


def _least_used(setup: RecipeSetup) -> int:
    """A token whose embedding means nothing else here: the last of the rarest."""
    counts = setup.token_counts
    return int((counts == counts.min()).nonzero()[-1])
