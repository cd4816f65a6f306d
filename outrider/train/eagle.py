"""Kinds `eagle` and `eagle3`: heads that continue the target's hidden states, trained as they draft
(training-time test).

How, and how a reduced vocabulary counts: `unrolled.py`. A head trained on unroll 0 alone has never
read its own states, and is lost from the second draft token on. EAGLE adds the distance of its
state from the target's feature, and noise on the features that it reads.

Sources: EAGLE (2401.15077), EAGLE-3 (2503.01840) and its code; EAGLE-3.1's norms as in speculators.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outrider.errors import CapabilityError, ConfigError
from outrider.models.heads.eagle import STEADY_ROPE, EagleConfig, EagleHead, Kind
from outrider.models.heads.eagle_files import TargetSizes, default_signals, load_eagle, save_eagle
from outrider.models.signals import AFTER_NORM, Listening
from outrider.settings import checked, setting
from outrider.train.losses import TargetDistributions, parse_loss, smooth_l1, weighted_mean
from outrider.train.recipe import FeatureBatch, RecipeSetup
from outrider.train.unrolled import UnrolledRecipe

LOSS_HELP = "losses.py: kl, reverse_kl, jsd, tv, ce, nla, lk_hybrid, or a sum like 0.1*ce+0.9*tv"


@checked()
@dataclass(frozen=True)
class EagleTraining:
    """An EAGLE head."""

    num_layers: int = setting(1, "decoder layers of the head", at_least=1)
    unrolls: int = setting(1, "drafting steps that are trained; 1: the original recipe", at_least=1)
    loss: str = setting("ce", LOSS_HELP)
    loss_weight: float = setting(0.1, "of that loss", at_least=0)
    feature_weight: float = setting(
        1.0, "of the distance from the target's features (SmoothL1)", at_least=0
    )
    noise: float = setting(
        0.2,
        "uniform noise on the features that are read, times 512 / tokens of the text",
        at_least=0,
    )
    step_decay: float = setting(
        0.8, "weight of a drafting step against the one before it", above=0, at_most=1
    )

    def __post_init__(self) -> None:
        if self.loss_weight + self.feature_weight == 0:
            raise ConfigError("kind 'eagle': loss_weight and feature_weight must not both be 0")
        parse_loss(self.loss)


@checked()
@dataclass(frozen=True)
class Eagle3Training:
    """An EAGLE-3 head."""

    num_layers: int = setting(1, "decoder layers of the head", at_least=1)
    unrolls: int = setting(5, "drafting steps that are trained", at_least=1)
    loss: str = setting("lk_hybrid", LOSS_HELP)
    step_decay: float = setting(
        0.8, "weight of a drafting step against the one before it", above=0, at_most=1
    )
    draft_vocab: int = setting(
        0, "tokens the head knows, the most frequent ones; 0: all", at_least=0
    )
    own_output: bool = setting(
        True, "an output layer of its own, begun with the target's; else the target's, not trained"
    )
    layers: str = setting(
        "auto", "target layers whose inputs are read, like 2,8,13; auto: 2, L/2, L-3"
    )
    norm_before_residual: bool = setting(True, "the residual is the normed feature")
    fc_norm: bool = setting(True, "a norm for each of the target's hidden states (EAGLE-3.1)")
    norm_output: bool = setting(
        True, "the next step reads the state after the final norm (EAGLE-3.1)"
    )
    intermediate_size: int = setting(0, "width of the head's MLP; 0: the target's", at_least=0)
    kv_heads: int = setting(
        0,
        "heads of keys and values, through which a token's embedding enters; 0: the target's",
        at_least=0,
    )

    def __post_init__(self) -> None:
        if self.draft_vocab and not self.own_output:
            raise ConfigError("kind 'eagle3': a reduced draft_vocab needs own_output")
        parse_loss(self.loss)

    def signals(self, num_layers: int) -> tuple[int, ...]:
        """Which hidden states. Raises ConfigError."""
        if self.layers == "auto":
            return default_signals(num_layers)
        words = [word.strip() for word in self.layers.split(",")]
        if not all(word.isdecimal() and int(word) <= num_layers for word in words):
            raise ConfigError(
                f"kind 'eagle3': layers must be numbers of 0..{num_layers} like 2,8,13, got "
                f"'{self.layers}'"
            )
        return tuple(int(word) for word in words)


class EagleRecipe(UnrolledRecipe):
    """Trains an EAGLE head; satisfies `recipe.Recipe`."""

    Settings: ClassVar[type] = EagleTraining
    kind: ClassVar[Kind] = "eagle"
    drafter: ClassVar[str] = "eagle head={folder}"
    uses_draft: ClassVar[bool] = False
    default_lr: ClassVar[float | None] = 1e-3

    @classmethod
    def build(cls, setup: RecipeSetup) -> EagleRecipe:
        config = cls.config_for(setup)
        Listening(setup.target, config.signals)  # refuses a target without these states
        table = setup.target.get_input_embeddings().weight
        output = setup.target.get_output_embeddings()
        if table.shape[1] != config.hidden_size:
            widths = f"{table.shape[1]} wide, its states {config.hidden_size}"
            raise CapabilityError(
                f"kind '{cls.kind}': the target's embedding is {widths}; train another kind of "
                "drafter"
            )
        head = (
            _new_head(config, setup) if setup.init is None else _going_on(cls.kind, setup, config)
        )
        head.to(device=table.device).bind(table.detach(), output)
        return cls(head.train().requires_grad_(True), setup.settings, setup.saved_dtype)

    @classmethod
    def config_for(cls, setup: RecipeSetup) -> EagleConfig:
        """The head that these settings mean for this target."""
        settings: EagleTraining = setup.settings
        return replace(
            _like_target(setup, cls.kind), num_layers=settings.num_layers, own_output=False
        )

    def save(self, folder: Path) -> None:
        assert isinstance(self.head, EagleHead)
        save_eagle(self.head, folder, self._dtype)

    def _features(self, batch: FeatureBatch) -> Tensor:
        """(B, T, H) that the head reads, noisy while training."""
        features = self.head.features(batch.hidden)
        if self.head.training and self._settings.noise:
            scale = self._settings.noise * 512 / batch.lengths.to(features.dtype)
            features = features + (torch.rand_like(features) - 0.5) * scale[:, None, None]
        return features

    def _judge(self, target: TargetDistributions, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(loss (n,), acceptance (n,)) of draft logits (n, Vd) where the target's distribution is
        `target`."""
        return self._loss(target.probs, logits) * self._settings.loss_weight, self._acceptance(
            target, logits
        )

    def _feature_loss(
        self, batch: FeatureBatch, rows: Tensor, positions: Tensor, states: Tensor
    ) -> Tensor:
        distance = smooth_l1(batch.hidden[AFTER_NORM][rows, positions].to(states.dtype), states)
        return self._settings.feature_weight * weighted_mean(distance, torch.ones_like(distance))


class Eagle3Recipe(EagleRecipe):
    """No feature loss: states are free to be whatever drafts best."""

    Settings: ClassVar[type] = Eagle3Training
    kind: ClassVar[Kind] = "eagle3"
    drafter: ClassVar[str] = "eagle3 head={folder}"

    @classmethod
    def config_for(cls, setup: RecipeSetup) -> EagleConfig:
        settings: Eagle3Training = setup.settings
        like = _like_target(setup, cls.kind)
        if like.num_attention_heads % (settings.kv_heads or 1):
            heads = like.num_attention_heads
            raise ConfigError(
                f"kind 'eagle3': kv_heads must divide the {heads} heads, got {settings.kv_heads}"
            )
        if settings.draft_vocab > like.vocab_size:
            raise ConfigError(
                f"kind 'eagle3': draft_vocab {settings.draft_vocab}, but the target has "
                f"{like.vocab_size} tokens"
            )
        return replace(
            like,
            num_layers=settings.num_layers,
            own_output=settings.own_output,
            signals=settings.signals(setup.target.config.get_text_config().num_hidden_layers),
            draft_vocab_size=settings.draft_vocab or like.vocab_size,
            norm_before_residual=settings.norm_before_residual,
            fc_norm=settings.fc_norm,
            norm_output=settings.norm_output,
            intermediate_size=settings.intermediate_size or like.intermediate_size,
            num_key_value_heads=settings.kv_heads or like.num_key_value_heads,
        )

    _features = UnrolledRecipe._features
    _judge = UnrolledRecipe._judge
    _feature_loss = UnrolledRecipe._feature_loss


def _like_target(setup: RecipeSetup, kind: Kind) -> EagleConfig:
    """A layer of the target's own sizes."""
    text = setup.target.config.get_text_config()
    sizes = TargetSizes.of(text, setup.target.get_output_embeddings().weight.shape[0])
    heads = text.num_attention_heads
    rope = dict(getattr(text, "rope_parameters", None) or {})
    if "rope_theta" not in rope or rope.get("rope_type", "default") not in STEADY_ROPE:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    return EagleConfig(
        kind=kind,
        hidden_size=sizes.hidden_size,
        target_hidden_size=sizes.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * sizes.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or sizes.hidden_size // heads,
        vocab_size=sizes.vocab_size,
        draft_vocab_size=sizes.vocab_size,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-6,
        rope=rope,
        max_position_embeddings=getattr(text, "max_position_embeddings", None),
        trained_for=setup.name,
    )


def _new_head(config: EagleConfig, setup: RecipeSetup) -> EagleHead:
    """Weights to begin with: the target's own output layer and final norm where they fit, small
    random ones elsewhere.

    An EAGLE-3 head begins as the deepest of the hidden states it reads, and its layer adds nothing
    to that yet: random states would be guesses of great confidence, which the first hundreds of
    steps would have to take back.
    """
    ids = None
    if config.draft_vocab_size < config.vocab_size:
        counts = setup.token_counts.long()
        counts = nn.functional.pad(counts, (0, config.vocab_size - len(counts)))
        order = counts.sort(descending=True, stable=True).indices  # among equals the lower id
        ids = order[: config.draft_vocab_size].sort().values
    head = EagleHead(config, ids)
    with torch.no_grad():
        for layer in head.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(0.0, layer.in_features**-0.5)
        if config.kind == "eagle3" and config.target_hidden_size == config.hidden_size:
            _begin_as_deepest_state(head)
        output = setup.target.get_output_embeddings().weight.float().cpu()
        if head.lm_head is not None:
            head.lm_head.weight.copy_(output if ids is None else output[ids])
        norm = getattr(getattr(setup.target.get_decoder(), "norm", None), "weight", None)
        if (
            head.norm is not None
            and isinstance(norm, Tensor)
            and norm.shape == head.norm.weight.shape
        ):
            head.norm.weight.copy_(norm.float().cpu())
    return head


def _begin_as_deepest_state(head: EagleHead) -> None:
    size = head.config.hidden_size
    deepest = max(range(len(head.config.signals)), key=lambda index: head.config.signals[index])
    head.fc.weight.zero_()
    head.fc.weight[:, deepest * size : (deepest + 1) * size] = torch.eye(size)
    layer: Any
    for layer in head.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def _going_on(kind: Kind, setup: RecipeSetup, wanted: EagleConfig) -> EagleHead:
    """The head in `setup.init`. Raises ConfigError where it is another one than these settings
    mean."""
    assert setup.init is not None
    text = setup.target.config
    head = load_eagle(setup.init, kind, TargetSizes.of(text, wanted.vocab_size)).float()
    named = ("intermediate_size",) if getattr(setup.settings, "intermediate_size", 0) else ()
    for name in (
        *named,
        "num_layers",
        "num_key_value_heads",
        "signals",
        "draft_vocab_size",
        "own_output",
        "norm_before_residual",
        "fc_norm",
        "norm_output",
        "mask_token",  # P-EAGLE's: trained in another way
    ):
        actual = getattr(head.config, name)
        asked = getattr(wanted, name)
        if actual != asked:
            raise ConfigError(
                f"kind '{kind}': --init {setup.init} has {name}={actual}, this run wants {asked}"
            )
    head.config = replace(head.config, trained_for=setup.name)
    return head
