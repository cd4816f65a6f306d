"""A block head guesses all tokens of a draft in one pass (DFlash 2602.06036, DSpark 2607.05147; models/heads/block.py).

    target's cache   x_0 ... x_{n-2}                    their states, of the layers the head reads, are its context
    fed to the head  x_{n-1} mask mask ...              the pending token and masks, at positions n-1, n, ...
    guessed                  x_n  x_{n+1} ...           with the anchor's slot (DSpark); without it (DFlash) one fewer

The context's keys and values are kept in a cache of the head's own, row by row: read once from the prompt (`read`), then from
every pass the committed columns (`commit`); the block's stand behind them for one pass and are overwritten by the next.

With a Markov head the laws of a block depend on the token before, so chains are drawn left to right and a tree's children follow
their own parent, without another pass. The confidence head ends a chain where the guesses so far are unlikely to survive. It
looks at the token BEFORE the one it decides about; a rule that drops a drawn token by its own confidence biases the output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.base import SMALL_TREE, Drafter, DraftSetup
from outrider.drafters.parallel import LawStop, Stop, draft_chain, draft_tree
from outrider.errors import CapabilityError, ConfigError
from outrider.kv.cache import BLOCK, KVCache, LayerShape
from outrider.models.attention import QUERY_BLOCK
from outrider.models.heads.block import BlockConfig, BlockHead
from outrider.models.heads.block_files import block_signals, load_block
from outrider.rows import Row, Rows
from outrider.sampling.confidence import ConfidenceSettings, StopRule
from outrider.settings import setting
from outrider.trees.plan import TreePlan, TreeSettings
from outrider.types import Draft, TargetOutput, Verdict

OWNER = "drafter 'block'"


@dataclass(frozen=True)
class BlockSettings(TreeSettings):
    """How guesses branch, and when a chain of them stops early."""

    head: str = setting("", "folder of the head; --draft names it, too")
    stop: Literal["none", "confidence", "entropy", "product"] = setting(
        "none", "stop drafting early: none, confidence (the head's own), entropy or product"
    )
    stop_below: float = setting(0.3, "threshold of the stop rule; confidence: of the chance that the draft so far is accepted")
    entropy_weight: float = setting(0.2, "entropy: weight of the entropy (nats) in the bound")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.law_rule()
        if self.tree != "chain" and self.stop != "none":
            raise ConfigError(f"stop={self.stop} is for chains; tree '{self.tree}' is cut by its node budget and min_gain")

    def law_rule(self) -> ConfidenceSettings:
        """The stop rule as one that looks at laws. Raises ConfigError for a threshold out of range."""
        return ConfidenceSettings("none" if self.stop == "confidence" else self.stop, self.stop_below, self.entropy_weight)


class BlockGuesses:
    """What one pass says about the next tokens of B rows."""

    def __init__(self, head: BlockHead, states: Tensor) -> None:
        self._head = head
        self._states = states  # (B, guesses, H)
        self._logits = head.logits(states)  # (B, guesses, draft vocabulary)
        self.num_levels = states.shape[1]

    def logits(self, level: int, parents: Tensor) -> Tensor:
        base = self._logits[:, level, None].expand(-1, parents.shape[1], -1)
        states = self._states[:, level, None].expand(-1, parents.shape[1], -1)
        return self._head.in_full(self._head.corrected(base, states, parents))

    def confidence(self, level: int, previous: Tensor) -> Tensor:
        """(B,): chance that this level's token is accepted, given that those before it are."""
        return self._head.confidence(level, self._states[:, level], previous)


class ConfidenceStop:
    """Ends a chain where the chance that all of it is accepted falls under a threshold."""

    needs_law = False

    def __init__(self, guesses: BlockGuesses, stop_below: float, num_rows: int, device: torch.device) -> None:
        self._guesses, self._stop_below = guesses, stop_below
        self._survival = torch.ones(num_rows, device=device)
        self.going = torch.ones(num_rows, dtype=torch.bool, device=device)

    def before(self, node: int, law: Tensor, previous: Tensor) -> None:
        self._survival *= self._guesses.confidence(node, previous)
        self.going &= self._survival >= self._stop_below

    def after(self, law: Tensor, token: Tensor) -> None:
        """The token itself plays no part."""


class BlockDrafter(Drafter):
    """Chains and trees from a block head."""

    needs = "a block head (DFlash, DSpark) trained for the target (--draft FOLDER)"
    needs_head = True
    trained = True
    shape = "chain or tree"
    Settings = BlockSettings

    def __init__(self, head: BlockHead, settings: BlockSettings, dtype: torch.dtype, device: torch.device) -> None:
        """`head`: bound to the target's tables."""
        config = head.config
        self.head = head.to(device=device, dtype=dtype)
        self._settings = settings
        depth = min(settings.max_depth, config.num_guesses)
        self._plan = None if settings.tree == "chain" else TreePlan(replace(settings, max_depth=depth))
        shape = LayerShape(config.num_kv_heads, config.head_dim, config.head_dim)
        self.kv = KVCache([shape] * config.num_layers, dtype, device)  # of the context

    @property
    def notes(self) -> list[str]:
        config = self.head.config
        extras = [name for name, there in (("Markov head", config.markov_rank), ("confidence", config.confidence)) if there]
        return [f"block head: {config.num_guesses} tokens in one pass of {config.num_layers} layers" + "".join(
            f", {name}" for name in extras
        )]  # fmt: skip

    @property
    def signals(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.head.config.target_layers)))

    @classmethod
    def head_signals(cls, head: str, target_config: Any) -> tuple[int, ...]:
        return tuple(sorted(set(block_signals(head, target_config.get_text_config().num_hidden_layers))))

    @classmethod
    def drafts_trees(cls, settings: BlockSettings) -> bool:
        return settings.tree != "chain"

    @classmethod
    def default_num_draft_tokens(cls, settings: BlockSettings) -> int:
        return settings.default_num_nodes() if settings.tree != "chain" else SMALL_TREE

    @classmethod
    def build(cls, setup: DraftSetup) -> BlockDrafter:
        if setup.head is None:
            raise ConfigError(f"{OWNER} needs a head: --draft FOLDER (make one with outrider train block)")
        target, settings = setup.target, setup.settings
        config = target.config.get_text_config()
        head = load_block(setup.head, config.hidden_size, target.lm.shape.vocab_size, config.num_hidden_layers)
        if settings.stop == "confidence" and not head.config.confidence:
            raise CapabilityError(f"head '{setup.head}' has no confidence head for stop=confidence; use entropy or product")
        assert target.tables is not None, "a target loaded for heads keeps its tables"
        head.bind(target.tables.embedding, target.tables.output)
        return cls(head, settings, target.lm.dtype, target.lm.device)

    def start(self, row: Row) -> None:
        self.kv.add_row()

    def read(self, index: int, start: int, hidden: dict[int, Tensor]) -> None:
        count = next(iter(hidden.values())).shape[0]
        positions = torch.arange(start, start + count, device=self.kv.device)[None]
        self._add_context([index], {layer: states[None] for layer, states in hidden.items()}, positions, [count])

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        if max(gamma) <= 0:
            return Draft.empty(len(rows), rows.device)
        guesses = BlockGuesses(self.head, self.head.guessing(self._pass(rows)))
        if self._plan is not None:
            return draft_tree(rows, gamma, guesses, self._plan)
        return draft_chain(rows, gamma, guesses, self._stop_rule(guesses, rows))

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        if self._plan is not None:
            self._plan.observe(draft, verdict)
        counts = [len(columns) for columns in output.kept]
        width = max(counts)
        columns = torch.tensor([line + [0] * (width - len(line)) for line in output.kept], device=self.kv.device)
        starts = torch.tensor([len(row.tokens) - 1 - count for row, count in zip(rows, counts, strict=True)])
        positions = starts.to(self.kv.device)[:, None] + torch.arange(width, device=self.kv.device)
        picked = torch.arange(len(counts), device=self.kv.device)[:, None]
        hidden = {layer: output.hidden[layer][picked, columns] for layer in self.signals}
        self._add_context(range(len(counts)), hidden, positions, counts)

    def stop(self, index: int) -> None:
        self.kv.swap_remove(index)

    # ---------------------------------------------------------------- the head's own passes

    def _stop_rule(self, guesses: BlockGuesses, rows: Rows) -> Stop | None:
        settings = self._settings
        if settings.stop == "none":
            return None
        if settings.stop == "confidence":
            return ConfidenceStop(guesses, settings.stop_below, len(rows), rows.device)
        return LawStop(StopRule(settings.law_rule(), len(rows), rows.device))

    def _add_context(
        self, indices: range | list[int], hidden: dict[int, Tensor], positions: Tensor, counts: list[int]
    ) -> None:
        """Commit the first counts[i] of these states (n, T, target H) at positions (n, T) to the rows at `indices`."""
        config, kv = self.head.config, self.kv
        context = self.head.context([hidden[layer] for layer in config.target_layers])
        known = positions.clamp(max=config.max_positions - 1)
        kv.reserve(kv.num_rows, max(kv.lengths[index] + count for index, count in zip(indices, counts, strict=True)))
        for layer, (keys, values) in enumerate(self.head.context_keys(context, known)):
            for place, (index, count) in enumerate(zip(indices, counts, strict=True)):
                end = slice(kv.lengths[index], kv.lengths[index] + count)
                kv.keys[layer][index, end] = keys[place, :, :count].transpose(0, 1)
                kv.values[layer][index, end] = values[place, :, :count].transpose(0, 1)
        for index, count in zip(indices, counts, strict=True):
            kv.advance(index, count)

    def _pass(self, rows: Rows) -> Tensor:
        """States (B, block size, H) of one block behind every row."""
        config = self.head.config
        anchors = torch.tensor([row.tokens[-1] for row in rows], device=self.kv.device)
        places = torch.arange(config.block_size, device=self.kv.device)
        positions = (rows.positions[:, None] - 1 + places).clamp(max=config.max_positions - 1)
        self.kv.reserve(self.kv.num_rows, max(self.kv.lengths) + config.block_size)
        return self.head(self.head.block_tokens(anchors), positions, _BlockAttend(self.kv, config))


class _BlockAttend:
    """Attention of one pass: the block's keys and values are written behind each row's context, queries see both.

    As in `models/attention.py`, queries come in whole blocks of 8 and keys in whole blocks of the cache.
    """

    def __init__(self, kv: KVCache, config: BlockConfig) -> None:
        self._kv = kv
        size, lengths = config.block_size, torch.tensor(kv.lengths, device=kv.device)
        self._num_keys = min(-(-(max(kv.lengths) + size) // BLOCK) * BLOCK, kv.capacity)
        self._padding = -size % QUERY_BLOCK
        keys = torch.arange(self._num_keys, device=kv.device)
        seen = torch.arange(size, device=kv.device) + 1 if config.causal else torch.full((size,), size, device=kv.device)
        seen = F.pad(seen, (0, self._padding), value=size)  # what padding computes is never read
        allowed = keys < lengths[:, None, None] + seen[:, None]  # (B, S, K)
        self._mask = torch.zeros(allowed.shape, dtype=kv.dtype, device=kv.device).masked_fill_(~allowed, float("-inf"))[:, None]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        kv, size = self._kv, keys.shape[2]
        stores = kv.keys[layer], kv.values[layer]
        for store, new in zip(stores, (keys, values), strict=True):
            for row, length in enumerate(kv.lengths):
                store[row, length : length + size] = new[row].transpose(0, 1)
        all_keys, all_values = (store[: kv.num_rows, : self._num_keys].transpose(1, 2) for store in stores)
        padded = F.pad(queries, (0, 0, 0, self._padding))
        grouped = queries.shape[1] != keys.shape[1]
        mixed = F.scaled_dot_product_attention(
            padded, all_keys, all_values, attn_mask=self._mask, enable_gqa=grouped
        )  # fmt: skip
        return mixed[:, :, :size]
