"""A block head guesses all tokens of a draft in one pass (DFlash 2602.06036, DSpark 2607.05147;
models/heads/block.py).

    target's cache   x_0 ... x_{n-2}                    their states, of the layers the head reads, are its context
    fed to the head  x_{n-1} mask mask ...              the pending token and masks, at positions n-1, n, ...
    guessed                  x_n  x_{n+1} ...           with the anchor's slot (DSpark); without it (DFlash) one fewer

The context's keys and values are kept in a cache of the head's own, row by row
(`block_context.py`): read once from the prompt, then from every pass the committed columns, which
the head's next pass takes along; the block's stand after them for one pass and are overwritten by
the next.

With a Markov head the distributions of a block depend on the token before or on all of the draft so
far, so chains are drawn left to right and a tree's children follow their own parent, without
another pass. The confidence head ends a chain where the guesses so far are unlikely to survive. It
looks at the token BEFORE the one it decides about; a rule that drops a drawn token by its own
confidence biases the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from outrider.drafters.base import SMALL_TREE, Drafter, DraftSetup
from outrider.drafters.heads.block_context import BlockContext
from outrider.drafters.parallel import DistributionStop, Stop, draft_chain, draft_tree
from outrider.drafters.programs import bans_bite, drafted, programs_serve
from outrider.drafters.requirements import Requirements, context_notes
from outrider.errors import CapabilityError, ConfigError
from outrider.kv.cache import KVCache
from outrider.models.heads.block import BlockHead
from outrider.models.heads.block_files import load_block
from outrider.models.heads.block_pass import BlockPasses, Guessed, ModulePasses
from outrider.models.linear.pack import can_pack, pack_linears
from outrider.models.lm import LM
from outrider.models.loaded import ModelMemory
from outrider.models.loading.memory import head_memory
from outrider.rows import Row, Rows
from outrider.runtime.block import BlockRun
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.layers import release_linears
from outrider.runtime.run import NativeRun
from outrider.sampling.confidence import ConfidenceSettings, StopRule
from outrider.settings import checked, setting
from outrider.trees.growth import Growth
from outrider.trees.plan import TreePlan, TreeSettings
from outrider.types import Draft, TargetOutput, Verdict

OWNER = "drafter 'block'"


@checked()
@dataclass(frozen=True)
class BlockSettings(TreeSettings):
    """How guesses branch, and when a chain of them stops early."""

    head: str = setting("", "folder or GGUF file of the head; --draft names it, too")
    stop: Literal["none", "confidence", "entropy", "product"] = setting(
        "none", "stop drafting early: none, confidence (the head's own), entropy or product"
    )
    stop_below: float = setting(
        0.3,
        "threshold of the stop rule; confidence: of the chance that the draft so far is accepted",
    )
    entropy_weight: float = setting(0.2, "entropy: weight of the entropy (nats) in the bound")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.confidence_rule()
        if self.tree != "chain" and self.stop != "none":
            raise ConfigError(
                f"stop={self.stop} is for chains; tree '{self.tree}' is cut by its node budget "
                "and min_gain"
            )

    def confidence_rule(self) -> ConfidenceSettings:
        """The settings of the stop rules that look at distributions. Raises ConfigError for a
        threshold out of range."""
        return ConfidenceSettings(
            "none" if self.stop == "confidence" else self.stop, self.stop_below, self.entropy_weight
        )


class BlockGuesses:
    """The result of one pass for the next tokens of B rows."""

    def __init__(self, head: BlockHead, passes: BlockPasses, guessed: Guessed) -> None:
        self._head = head
        self._passes = passes
        self._guessed = guessed
        self.num_levels = guessed.states.shape[1]
        self._memory: Tensor | None = None  # of the last level's parents

    def logits(self, level: int, parents: Tensor, origins: Tensor) -> Tensor:
        states, logits = self._guessed
        memory = None
        if level and self._memory is not None:
            memory = self._memory.gather(
                1, origins[..., None].expand(-1, -1, self._memory.shape[2])
            )
        corrected = self._passes.corrected(logits[:, level], states[:, level], parents, memory)
        self._memory = corrected.memory
        return self._head.in_full(corrected.logits)

    def confidence(self, level: int, previous: Tensor) -> Tensor:
        """(B,): chance that this level's token is accepted, given that those before it are."""
        return self._head.confidence(
            level, self._guessed.states[:, level : level + 1], previous[:, None]
        )[:, 0]


class ConfidenceStop:
    """Ends a chain where the chance that all of it is accepted falls under a threshold."""

    needs_probs = False

    def __init__(
        self, guesses: BlockGuesses, stop_below: float, num_rows: int, device: torch.device
    ) -> None:
        self._guesses = guesses
        self._stop_below = stop_below
        self._survival = torch.ones(num_rows, device=device)
        self.going = torch.ones(num_rows, dtype=torch.bool, device=device)

    def before(self, node: int, probs: Tensor, previous: Tensor) -> None:
        self._survival *= self._guesses.confidence(node, previous)
        self.going &= self._survival >= self._stop_below

    def after(self, probs: Tensor, token: Tensor) -> None:
        """The token itself plays no part."""


def confident_lengths(
    head: BlockHead, states: Tensor, pending: Tensor, tokens: Tensor, stop_below: float
) -> list[int]:
    """The lengths at which `ConfidenceStop` ends chains that are drafted already, from their
    states.

    `tokens` (B, n) and `states` (B, n, H) are the chains'; `pending` (B,): the tokens that chains
    follow. The token that the rule decides about plays no part, so it may be known.
    """
    before = torch.cat([pending[:, None], tokens[:, :-1]], dim=1)
    return (
        (head.confidence(0, states, before).cumprod(dim=1) >= stop_below)
        .long()
        .cumprod(dim=1)
        .sum(dim=1)
        .tolist()
    )


class BlockDrafter(Drafter):
    """Chains and trees from a block head."""

    needs = "a block head (DFlash, DFlash2, DSpark) trained for the target (--draft FOLDER or GGUF file)"
    requires = Requirements(head=True)
    trained = True
    shape = "chain or tree"
    Settings = BlockSettings

    def __init__(
        self,
        head: BlockHead,
        settings: BlockSettings,
        passes: BlockPasses,
        dtype: torch.dtype,
        device: torch.device,
        notes: Sequence[str] = (),
    ) -> None:
        """`head`: bound to the target's tables; `passes`: how it is run."""
        self.head = head
        self._settings = settings
        self._notes = list(notes)
        self._passes = passes
        self._run = passes if isinstance(passes, BlockRun) else None
        depth = min(settings.max_depth, head.config.num_guesses)
        self._plan = (
            None if settings.tree == "chain" else TreePlan(replace(settings, max_depth=depth))
        )
        self._growths: list[Growth] = []  # of every row's tree, until it is judged
        self.context = BlockContext(head.config, passes, dtype, device)

    @property
    def kv(self) -> KVCache:
        """The cache of the context."""
        return self.context.kv

    @property
    def notes(self) -> list[str]:
        config = self.head.config
        markov = "recurrent Markov head" if config.markov_recurrent else "Markov head"
        parts = (
            (markov, config.markov_rank),
            ("selector", config.selector_rank),
            ("confidence", config.confidence),
        )
        extras = [name for name, there in parts if there]
        return [
            f"block head: {config.num_guesses} tokens in one pass of {config.num_layers} layers"
            + "".join(f", {name}" for name in extras),
            *self._notes,
        ]

    @property
    def signals(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.head.config.target_layers)))

    @property
    def runs_modules(self) -> bool:
        return self._run is None

    @classmethod
    def requirements(cls, settings: BlockSettings) -> Requirements:
        is_tree = settings.tree != "chain"
        nodes = settings.default_num_nodes() if is_tree else SMALL_TREE
        return replace(super().requirements(settings), trees=is_tree, num_draft_tokens=nodes)

    @classmethod
    def weigh_head(cls, head: str, target_config: Any, dtype: torch.dtype) -> ModelMemory:
        target = target_config.get_text_config()
        outline = load_block(
            head, target.hidden_size, target.vocab_size, target.num_hidden_layers, outline=True
        )
        config = outline.config
        return head_memory(
            head, outline, config.num_layers * config.num_kv_heads * config.head_dim * 2, dtype
        )

    @classmethod
    def build(cls, setup: DraftSetup) -> BlockDrafter:
        if setup.head is None:
            raise ConfigError(
                f"{OWNER} needs a head: --draft FOLDER (make one with outrider train block)"
            )
        target = setup.target
        settings = setup.settings
        card = target.card
        lm = target.lm
        head = load_block(setup.head, card.hidden_size, lm.shape.vocab_size, card.num_layers)
        if settings.stop == "confidence" and not head.config.confidence:
            raise CapabilityError(
                f"head '{setup.head}' has no confidence head for stop=confidence; use entropy or "
                "product"
            )
        assert target.tables is not None, "a target loaded for heads keeps its tables"
        head.bind(target.tables.embedding, target.tables.output)
        head.to(device=lm.device, dtype=lm.dtype)
        passes, notes = _passes_of(head, lm)
        notes += context_notes(setup.head, head.config.max_positions, lm.shape.context_length)
        return cls(head, settings, passes, lm.dtype, lm.device, notes)

    def start(self, row: Row) -> None:
        self.context.add_row()

    @property
    def text_caches(self) -> list[KVCache]:
        return [self.kv]

    def pack(self, index: int) -> list[Tensor]:
        self.context.settle()
        return self.kv.read(index, 0, self.kv.lengths[index])

    def unpack(self, state: list[Tensor]) -> None:
        self.kv.put(self.kv.num_rows - 1, 0, state)

    def read(self, index: int, start: int, hidden: dict[int, Tensor]) -> None:
        # of these tokens, from pages that reach further than the target's
        known = max(0, self.kv.lengths[index] - start)
        if known < len(next(iter(hidden.values()))):
            self.context.read(
                index, start + known, {layer: states[known:] for layer, states in hidden.items()}
            )

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        known = self.head.config.max_positions
        gamma = [
            max(0, min(asked, known - len(row.tokens)))
            for asked, row in zip(gamma, rows, strict=True)
        ]
        if not any(gamma):
            return Draft.empty(len(rows), rows.device)
        whole = self._whole(rows, gamma)
        if whole is not None:
            return whole
        guesses = BlockGuesses(self.head, self._passes, self.context.guess(rows))
        if self._plan is not None:
            draft, self._growths = draft_tree(rows, gamma, guesses, self._plan)
            return draft
        return draft_chain(rows, gamma, guesses, self._stop_rule(guesses, rows))

    def _whole(self, rows: Rows, gamma: list[int]) -> Draft | None:
        """Whole chains from one call; None where that cannot make them."""
        settings = self._settings
        if self._run is None or not self._run.drafts_whole or self._plan is not None:
            return None
        if settings.stop not in ("none", "confidence") or not programs_serve(rows):
            return None
        lengths = [min(wanted, self.head.config.num_guesses) for wanted in gamma]
        found = self.context.draft(self._run, rows, max(lengths))
        if found is None:
            return None
        if settings.stop == "confidence":
            pending = torch.tensor([row.tokens[-1] for row in rows])
            sure = confident_lengths(
                self.head, found.states, pending, found.tokens, settings.stop_below
            )
            lengths = [min(pair) for pair in zip(lengths, sure, strict=True)]
        if not any(lengths):
            return Draft.empty(len(rows), rows.device)
        draft = drafted(rows, found.tokens, found.probs, lengths)
        return None if bans_bite(rows, draft) else draft

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        if self._plan is not None:
            self._plan.observe(draft, verdict, self._growths)
            self._growths = []
        self.context.commit(output.hidden, output.kept, [len(row.tokens) - 1 for row in rows])

    def stop(self, index: int) -> None:
        self.context.swap_remove(index)

    def _stop_rule(self, guesses: BlockGuesses, rows: Rows) -> Stop | None:
        settings = self._settings
        if settings.stop == "none":
            return None
        if settings.stop == "confidence":
            return ConfidenceStop(guesses, settings.stop_below, len(rows), rows.device)
        rule = StopRule(
            settings.confidence_rule(),
            len(rows),
            rows.device,
            ends=[row.stop_tokens for row in rows],
        )
        return DistributionStop(rule)


def _passes_of(head: BlockHead, lm: LM) -> tuple[BlockPasses, list[str]]:
    """How the head is run, on the native runtime where its target runs there, and what a person
    should know of it."""
    notes: list[str] = []
    if isinstance(lm.run, NativeRun):
        try:
            run = BlockRun(head, lm.run.path)
            release_linears(
                head,
                kept_modules=[head.confidence_head]
                if run.drafts_whole
                else [head.confidence_head, head.markov_head],
            )
            return run, notes
        except NotLoweredError as error:
            notes.append(f"the block head runs without the native runtime: {error}")
    if can_pack(lm.device, lm.dtype):
        pack_linears(head)
    return ModulePasses(head), notes
