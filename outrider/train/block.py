"""Kind `block`: a block head (DFlash) with DSpark's Markov head and confidence head, the target
frozen.

    text      x_0 ... x_{a-1} [x_a] x_{a+1} x_{a+2} ...      a: an anchor, drawn at random; many per text and batch
    context   states of x_0 ... x_{a-1}                      as at work, where x_a is the pending token
    fed       x_a mask mask ...                              guess k learns logits[a + k], the distribution of x_{a+1+k}
    Markov    the token before guess k is the text's x_{a+k} (teacher forcing)

All anchors of a text share one pass: a mask keeps every block to itself and to the context before
its anchor. Losses fade with the position, exp(-k / decay): what comes late only counts when all
before it was right. The confidence is trained on the analytic label sum min(p, q), not on coins. A
share of the run begins with KL, whose gradient is not lost where p and q do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import CapabilityError, ConfigError
from outrider.models.heads.block import BlockHead
from outrider.models.heads.block_files import load_block, save_block
from outrider.models.signals import Listening, decoder_layers
from outrider.train.block_settings import OWNER, BlockTraining, new_config
from outrider.train.calibration import sequential_temperatures
from outrider.train.chunked import chunk_size, judged_in_chunks
from outrider.train.expected import chain_means
from outrider.train.losses import TINY, acceptance, kl, parse_loss, softmax_fp32, weighted_mean
from outrider.train.recipe import FeatureBatch, LossReport, RecipeSetup


class Anchors(NamedTuple):
    """The starts of blocks, and which of their guesses count."""

    starts: Tensor  # (B, A) int64
    counts: Tensor  # (B, A, guesses) bool, of each block a beginning


class BlockStates(NamedTuple):
    """Run the head on blocks whose text is known."""

    states: Tensor  # (B, A, guesses, H)
    before: Tensor  # (B, A, guesses) int64: the token before each guess


class BlockRecipe:
    """Trains a block head; satisfies `recipe.Recipe` and `recipe.Calibrates`."""

    Settings: ClassVar[type] = BlockTraining
    drafter: ClassVar[str] = "block head={folder}"
    uses_draft: ClassVar[bool] = False
    default_lr: ClassVar[float | None] = 6e-4

    def __init__(
        self, head: BlockHead, settings: BlockTraining, dtype: torch.dtype | None = None
    ) -> None:
        """`head`: bound to the target's tables. `dtype`: of what is saved; None: as it is trained."""
        self.module: nn.Module = head
        self.signals: tuple[int, ...] = tuple(sorted(set(head.config.target_layers)))
        self.head = head
        self._settings = settings
        self._dtype = dtype
        self._loss = parse_loss(settings.loss)
        self.max_positions = settings.num_anchors

    @classmethod
    def build(cls, setup: RecipeSetup) -> BlockRecipe:
        settings: BlockTraining = setup.settings
        target = setup.target
        count = len(decoder_layers(setup.target))
        config = new_config(settings, target, count, setup)
        Listening(target, config.target_layers)  # refuses a target without these states
        if setup.init is None:
            return cls(BlockHead.new(config, target), settings, setup.saved_dtype)
        head = (
            load_block(setup.init, config.target_hidden_size, config.vocab_size, count)
            .train()
            .requires_grad_(True)
        )
        if head.token_ids is not None or head.config.own_output or head.config.own_embedding:
            raise CapabilityError(
                f"{OWNER}: --init {setup.init} has tables of its own; heads on the target's "
                "tables are trained"
            )
        wanted = replace(
            config, temperatures=head.config.temperatures, trained_for=head.config.trained_for
        )
        differing = [
            name for name in vars(wanted) if getattr(wanted, name) != getattr(head.config, name)
        ]
        if differing:
            raise ConfigError(
                f"{OWNER}: --init {setup.init} has "
                f"{differing[0]}={getattr(head.config, differing[0])}; this run wants "
                f"{getattr(wanted, differing[0])}"
            )
        head.config = config
        embedding = target.get_input_embeddings()
        head.bind(embedding, target.get_output_embeddings())
        return cls(head.to(embedding.weight.device), settings, setup.saved_dtype)

    def loss(self, batch: FeatureBatch) -> LossReport:
        anchors = draw_anchors(batch.mask, self._settings.num_anchors, self.head.config.num_guesses)
        block = self.run(batch, anchors.starts)
        counts = anchors.counts
        # (N, H), (N,)
        states = block.states[counts]
        before = block.before[counts]
        row, anchor, guess = counts.nonzero(as_tuple=True)
        position = anchors.starts[row, anchor] + guess  # of the target's distribution
        weights = self._fading(counts)[counts]
        measure = kl if batch.progress < self._settings.warm_up else self._loss

        def output(part: Tensor, which: Tensor) -> Tensor:
            return self.head.corrected(self.head.logits(part), part, before[which])

        def judge(logits: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
            target_probs = softmax_fp32(batch.logits[row[which], position[which]])
            return measure(target_probs, logits), acceptance(target_probs, logits.detach())

        shares = weights / weights.sum().clamp(min=TINY)
        size = chunk_size(batch.logits.shape[-1], states.device)
        judged = judged_in_chunks(output, judge, states, shares, self.head.output_parameters, size)
        loss = judged.total
        accept = judged.accepted
        parts = {"acceptance": float(weighted_mean(accept, torch.ones_like(accept)))}
        if self.head.confidence_head is not None:
            confidences = self.head.confidence_logits(states, before).float()
            miss = weighted_mean(
                F.binary_cross_entropy_with_logits(confidences, accept, reduction="none"), weights
            )
            parts["confidence"] = float(miss.detach())
            loss = loss + self._settings.confidence_weight * miss
        full = torch.zeros(counts.shape, device=counts.device)
        full[counts] = accept
        per_position, survival, count = chain_means(full.unbind(2), counts.unbind(2))
        return LossReport(loss, per_position, parts, survival, max(count, 1))

    def run(self, batch: FeatureBatch, starts: Tensor) -> BlockStates:
        """One pass over blocks whose anchors stand at `starts` (B, A)."""
        head = self.head
        config = self.head.config
        num_rows, length = batch.tokens.shape
        size = config.block_size
        num_anchors = starts.shape[1]
        device = batch.tokens.device
        positions = torch.arange(length, device=device).expand(num_rows, -1)
        context = head.context([batch.hidden[layer] for layer in config.target_layers])
        held = head.context_keys(context, positions)
        fed = head.block_tokens(batch.tokens.gather(1, starts)).flatten(1)  # (B, A * S)
        slots = (starts[..., None] + torch.arange(size, device=device)).flatten(1)
        visible = _visible(starts, length, size, config.causal)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            all_keys, all_values = (
                torch.cat(pair, dim=2) for pair in zip(held[layer], (keys, values), strict=True)
            )
            grouped = queries.shape[1] != keys.shape[1]
            return F.scaled_dot_product_attention(
                queries, all_keys, all_values, attn_mask=visible, enable_gqa=grouped
            )

        states = head(fed, slots.clamp(max=config.max_positions - 1), attend)
        guessing = head.guessing(states.view(num_rows, num_anchors, size, -1))
        index = starts[..., None] + torch.arange(config.num_guesses, device=device)
        before = (
            batch.tokens[:, None].expand(-1, num_anchors, -1).gather(2, index.clamp(max=length - 1))
        )
        return BlockStates(guessing, before)

    def calibrate(self, batches: Iterable[FeatureBatch]) -> dict[str, float]:
        """Temperatures of the confidences, position by position."""
        if self.head.confidence_head is None:
            return {}
        confidences = []
        accepted = []
        known = []
        for batch in batches:
            anchors = draw_anchors(
                batch.mask, self._settings.num_anchors, self.head.config.num_guesses
            )
            block = self.run(batch, anchors.starts)
            logits = self.head.corrected(self.head.logits(block.states), block.states, block.before)
            target_probs = softmax_fp32(_answers(batch, anchors.starts, anchors.counts.shape[2]))
            confidences.append(
                self.head.confidence_logits(block.states, block.before).float().flatten(0, 1).cpu()
            )
            accepted.append(acceptance(target_probs, logits).flatten(0, 1).cpu())
            known.append(anchors.counts.flatten(0, 1).cpu())
        if not confidences:
            return {}
        temperatures = sequential_temperatures(
            torch.cat(confidences), torch.cat(accepted), torch.cat(known)
        )
        self.head.config = replace(self.head.config, temperatures=temperatures.temperatures)
        return {
            "calibration_error_before": temperatures.error_before,
            "calibration_error": temperatures.error_after,
        }

    def save(self, folder: Path) -> None:
        save_block(self.head, folder, self._dtype)

    def _fading(self, counts: Tensor) -> Tensor:
        """(B, A, guesses): weights by position."""
        starts = torch.arange(counts.shape[2], device=counts.device)
        return torch.exp(-starts / self._settings.decay).expand(counts.shape)


def draw_anchors(mask: Tensor, num_anchors: int, num_guesses: int) -> Anchors:
    """At most `num_anchors` different anchors per row among positions whose prediction counts, in
    no order. Rows with fewer have dummies whose guesses do not count."""
    num = max(1, min(num_anchors, int(mask.sum(dim=1).max())))
    keys = torch.rand(mask.shape).to(mask.device)
    starts = torch.where(mask, keys, torch.full_like(keys, -1.0)).topk(num, dim=1).indices  # (B, A)
    index = starts[..., None] + torch.arange(num_guesses, device=mask.device)
    inside = index < mask.shape[1]
    seen = mask[:, None].expand(-1, num, -1).gather(2, index.clamp(max=mask.shape[1] - 1))
    return Anchors(starts, (inside & seen).cumprod(dim=2).bool())


def _answers(batch: FeatureBatch, starts: Tensor, num_guesses: int) -> Tensor:
    """(B, A, guesses, V): the target's logits of what every guess is about."""
    index = starts[..., None] + torch.arange(num_guesses, device=starts.device)
    rows = torch.arange(len(starts), device=starts.device)[:, None, None]
    return batch.logits[rows, index.clamp(max=batch.logits.shape[1] - 1)]


def _visible(starts: Tensor, length: int, size: int, causal: bool) -> Tensor:
    """(B, 1, A * S, T + A * S) bool: a block sees the context before its anchor, and itself."""
    num_rows, num_anchors = starts.shape
    block = torch.arange(num_anchors * size, device=starts.device)
    context = (
        torch.arange(length, device=starts.device)
        < starts.repeat_interleave(size, dim=1)[..., None]
    )
    same_block = block[:, None] // size == block // size
    if causal:
        same_block = same_block & (block <= block[:, None])
    return torch.cat([context, same_block.expand(num_rows, -1, -1)], dim=2)[:, None]
