"""Speculative prefill: a draft scores which tokens of a long prompt matter, and the target reads
these alone. It changes answers.

    prompt    [ chunk ][ chunk ][ chunk ][ chunk ][ chunk ]
    scored       0.9      0.1      0.2      0.7      1.0      by a draft's attention from the last tokens
    read      [ chunk ]                  [ chunk ][ chunk ]   by the target, each token at its own position

The keys of what was read carry true positions, and what is decoded continues after the whole
prompt: the cache counts the gaps (`KVCache.skipped`). The draft is a model with the target's
tokenizer, or the target's own first layers. A source: SpecPrefill (Liu et al. 2502.02789). There
chunks with the greatest attention are kept; here those to which one of the last tokens attends more
than the others do (docs/algorithms/prefill.md).
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.configuration import name_and_options
from outrider.drafters.base import Drafter
from outrider.drafters.model.self_speculation import own_lm
from outrider.drafters.requirements import Requirements
from outrider.errors import CapabilityError, ConfigError
from outrider.models.attention import watched
from outrider.models.derived.derive import own_module
from outrider.models.derived.truncate import DecoderLayers
from outrider.models.lm import LM, PREFILL_CHUNK, module_run
from outrider.models.loaded import LoadedModel
from outrider.models.probes.probe import probe_tokens
from outrider.models.tokens.vocabulary import tokens_of_one
from outrider.rows import Rows
from outrider.settings import checked, parse_settings, setting

EARLY = "early"  # the target's own first layers
CHUNK = 32  # neighbouring tokens that are read together, or not at all
ASKING = 32  # last tokens of a prompt, whose attention scores the others; they are read always
POOLED = 13  # neighbouring tokens over which attention is averaged
LEAST = 128  # tokens that are kept at least; prompts of which fewer would be are read whole
TINY = 1e-9  # added to weights whose logarithms are taken
WHAT = "prefill"


@checked(f"{WHAT}: ")
@dataclass(frozen=True)
class PrefillSettings:
    """How much of a prompt is read, and who scores it."""

    keep: float = setting(0.2, "share of a prompt that is read", above=0, at_most=1)
    draft: str = setting(
        EARLY, "early:N, the target's first N layers (early: a quarter of them), or a model"
    )

    def __post_init__(self) -> None:
        if self.is_early and self.layers_of(4) < 1:
            raise ConfigError(
                f"{WHAT}: draft=early:N takes a number of layers from 1 on, got '{self.draft}'"
            )

    @classmethod
    def parse(cls, text: str) -> PrefillSettings:
        """From NAME=VALUE words, like 'keep=0.2 draft=early:4'. Raises ConfigError."""
        _, given = name_and_options(f"{WHAT} {text}", "")
        return parse_settings(cls, given, WHAT)

    @property
    def is_early(self) -> bool:
        """Whether the target's first layers score; else a model of its own does."""
        return self.draft.partition(":")[0] == EARLY

    def layers_of(self, count: int) -> int:
        """How many of the target's `count` layers score; 0 where that is no number."""
        _, colon, number = self.draft.partition(":")
        if not colon:
            return max(1, round(count / 4))
        return int(number) if number.isdecimal() else 0


class SparsePrefill:
    """Chooses what the target reads of long prompts, and has it read that."""

    def __init__(self, scorer: LM, module: Any, keep: float, scored_by: str) -> None:
        """`scorer`: the draft; `module`: transformers' of the same, whose attention can be seen;
        `scored_by`: its name for the user."""
        self.keep = keep
        self._scorer = scorer
        self._module = module
        self._scored_by = scored_by

    @classmethod
    def of(
        cls, settings: PrefillSettings, target: LoadedModel, draft: LoadedModel
    ) -> SparsePrefill:
        """`draft`: what scores; the target itself, with its module, where its first layers do.
        Raises ConfigError for layers that it does not have, CapabilityError for models whose
        layers cannot read or score a text with gaps."""
        _check_reads_gaps(target)
        if not settings.is_early:
            _check_scores(draft, target)
            return cls(draft.lm, draft.module, settings.keep, f"'{draft.label}'")
        layers = DecoderLayers(own_module(target.module, WHAT), target.lm, target.label)
        early = settings.layers_of(len(layers))
        if early >= len(layers):
            raise ConfigError(
                f"{WHAT}: draft=early:N takes 1 to {len(layers) - 1} of the {len(layers)} layers of "
                f"{target.label}, got '{settings.draft}'"
            )
        module = layers.without(range(early, len(layers)))
        base = target.lm.twin()
        base.lay_out(target.lm.shape.layers[:early])
        notes: list[str] = []
        name = f"the first {early} of {len(layers)} layers of '{target.label}'"
        return cls(
            own_lm(module, base, name, notes), module, settings.keep, "; ".join([name, *notes])
        )

    @property
    def note(self) -> str:
        """The sentence for the user: what is read, and that answers change."""
        return (
            f"{WHAT} is lossy: of prompts from {self._least} tokens on the target reads about "
            f"{self.keep:.0%}, chosen by {self._scored_by}; answers are not those to the whole prompt"
        )

    @property
    def _least(self) -> int:
        """Tokens from which on prompts are read sparsely."""
        return math.ceil(LEAST / self.keep)

    def check_drafter(self, required: Requirements, drafter: Drafter) -> None:
        """Raises CapabilityError for a drafter that needs what the target skips."""
        if required.module or drafter.signals:
            what = "keys" if required.module else "hidden states"
            raise CapabilityError(
                f"drafter '{drafter.name}' drafts on the target's {what} of the whole prompt, of "
                f"which --{WHAT} skips most. Use a drafter that reads the text itself: ngram, "
                "suffix, draft-model, ..., or leave one of them out."
            )

    def takes(self, num_prompt: int) -> bool:
        """Whether a prompt of this many tokens is long enough to be read sparsely."""
        return self.keep < 1 and num_prompt >= self._least

    def reading(self, prompt: list[int]) -> SparseReading:
        """A prompt about to be read."""
        return SparseReading(prompt, self._positions(prompt))

    def read(self, lm: LM, rows: Rows) -> None:
        """The target reads the prompts of those rows that are new and long enough."""
        for index, row in enumerate(rows):
            if lm.kv.text_length(index) or not self.takes(row.num_prompt):
                continue
            prompt = row.tokens[: row.num_prompt]
            reading = self.reading(prompt)
            while not reading.advance(lm, index):
                pass
            row.prompt_share = reading.share

    def _positions(self, prompt: list[int]) -> Generator[None, None, list[int]]:
        """The positions that the target is to read of a prompt but for its last token, which is
        pending. Yields after each of the draft's passes."""
        lm = self._scorer.twin()
        lm.kv.add_row()
        lm.kv.reserve(1, len(prompt) + PREFILL_CHUNK)
        tokens = torch.tensor([prompt], device=lm.device)
        column = torch.zeros(1, dtype=torch.int64, device=lm.device)
        asking = len(prompt) - ASKING
        for start in range(0, asking, PREFILL_CHUNK):
            chunk = tokens[:, start : min(start + PREFILL_CHUNK, asking)]
            lm.forward(chunk, columns=column)
            lm.kv.advance(0, chunk.shape[1])
            yield
        return chosen(self._scores(lm, tokens[:, asking:]), self.keep)

    def _scores(self, lm: LM, asking: Tensor) -> Tensor:
        """(tokens of the prompt,) how much more one of the last tokens attends to each of them than
        these do on average: in logarithms, the greatest of all heads and layers, averaged over the
        last tokens."""
        start = lm.kv.lengths[0]
        num_asking = asking.shape[1]
        count = start + num_asking
        places = torch.arange(count, device=lm.device)
        future = places > places[start:, None]
        best = torch.full((num_asking, count), float("-inf"), device=lm.device)

        def watch(layer: int, query: Tensor, scaling: float | None) -> None:
            keys = lm.kv.keys[layer][0, :count].float()  # (S, KV heads, D)
            groups = query[0].float().unflatten(0, (keys.shape[1], -1))  # (KV heads, group, T, D)
            scale = query.shape[3] ** -0.5 if scaling is None else scaling
            products = groups @ keys.permute(1, 2, 0)[:, None] * scale
            weights = products.masked_fill(future, float("-inf")).softmax(-1).flatten(0, 1)
            pooled = F.avg_pool1d(weights, POOLED, 1, POOLED // 2, count_include_pad=False)
            logs = (pooled + TINY).log()  # (heads, T, S)
            torch.maximum(best, (logs - logs.mean(1, keepdim=True)).amax(0), out=best)

        eager = LM(module_run(self._module), lm.shape, lm.dtype, lm.device, kv=lm.kv)
        with watched(watch):
            eager.forward(asking, columns=torch.zeros(1, dtype=torch.int64, device=lm.device))
        return best.mean(0)


class SparseReading:
    """A prompt that is being read, a pass at a time: first by the draft, then by the target."""

    def __init__(self, prompt: list[int], choosing: Generator[None, None, list[int]]) -> None:
        self._choosing = choosing
        self._prompt = prompt
        self._left: list[int] | None = None  # positions that the target has not read yet
        self.share = 1.0  # of the prompt that is read, once it is known

    @torch.inference_mode()
    def advance(self, lm: LM, row: int) -> bool:
        """Makes one pass; True where that was the target's last one over the prompt."""
        if self._left is None:
            try:
                next(self._choosing)
            except StopIteration as stop:
                self._left = stop.value
                self.share = (len(stop.value) + 1) / len(self._prompt)
            return False
        chunk = self._left[:PREFILL_CHUNK]
        del self._left[:PREFILL_CHUNK]
        tokens = torch.tensor([self._prompt[at] for at in chunk], device=lm.device)
        lm.read_at(tokens, torch.tensor(chunk, device=lm.device), row)
        return not self._left


def _check_reads_gaps(model: LoadedModel) -> None:
    """Raises CapabilityError for a target whose layers need every token, or do not look at
    positions."""
    why = _whole_texts(model.lm)
    if why is None and not _looks_at_positions(model.lm):
        why = "its passes do not look at position ids (as with ALiBi)"
    if why is not None:
        raise CapabilityError(
            f"--{WHAT} has the target read a prompt with gaps, which '{model.label}' cannot: {why}. "
            f"Leave --{WHAT} out, or take a target whose layers all attend to the whole text."
        )


def _check_scores(draft: LoadedModel, target: LoadedModel) -> None:
    """Raises CapabilityError for a draft of another tokenizer, or whose layers do not attend to the
    whole text."""
    why = _whole_texts(draft.lm)
    if target.tokenizer is None or draft.tokenizer is None:
        why = f"nothing shows that its tokens are those of '{target.label}'"
    elif tokens_of_one(target.tokenizer, draft.tokenizer) is None:
        ours = len(target.tokenizer.get_vocab())
        theirs = len(draft.tokenizer.get_vocab())
        why = (
            f"it has another tokenizer than '{target.label}' ({theirs} against {ours} tokens), so "
            "its scores are of other tokens"
        )
    if why is not None:
        raise CapabilityError(
            f"--{WHAT} draft='{draft.label}' cannot score the target's prompts: {why}. Use a model "
            f"of the target's family, or draft={EARLY}:N, the target's own first layers."
        )


def _whole_texts(lm: LM) -> str | None:
    """Why a model's layers cannot do without some tokens of a text; None: they can."""
    windows = [shape.window for shape in lm.shape.layers if shape.window is not None]
    if lm.shape.states or not lm.kv.by_position:
        return "it has recurrent layers, whose state is made of every token in turn"
    if windows or lm.shape.sliding_window is not None:
        size = lm.shape.sliding_window or max(windows)
        return f"it has sliding layers, which see the last {size} tokens alone"
    return None


@torch.inference_mode()
def _looks_at_positions(lm: LM) -> bool:
    """Whether position ids change what a model computes."""
    logits = []
    tokens = probe_tokens(lm.shape.vocab_size, 9, lm.device)
    for gap in (0, 5):
        twin = lm.twin()
        twin.kv.add_row()
        places = torch.tensor([0, 1, 2, 3, *range(4 + gap, 8 + gap)], device=lm.device)
        twin.read_at(tokens[0, :8], places, 0)
        logits.append(twin.forward(tokens[:, 8:]).logits)
    return not torch.equal(*logits)


def chosen(scores: Tensor, keep: float) -> list[int]:
    """The positions of the best chunks, the first and the last always among them, but for the last
    position of all. Chunks are counted from the end."""
    count = len(scores)
    first = count % CHUNK or CHUNK
    sizes = [first, *[CHUNK] * ((count - first) // CHUNK)]
    means = torch.stack([chunk.mean() for chunk in scores.split(sizes)])
    means[0] = means[-1] = float("inf")
    best = means.topk(max(2, math.ceil(keep * len(sizes)))).indices.sort().values.tolist()
    ends = torch.tensor(sizes).cumsum(0).tolist()
    positions = [at for each in best for at in range(ends[each] - sizes[each], ends[each])]
    return positions[:-1]
