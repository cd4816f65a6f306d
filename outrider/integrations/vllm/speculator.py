"""The drafter of vLLM's new model runner (Model Runner V2), where requests have names and their
texts lie on the GPU.

A step costs one copy to the host: lengths, numbers of new tokens, and the last K + 1 tokens of each
text. A text that begins is copied whole, once. The runner verifies K tokens a row whatever is
drafted, so what is left over is filled with the row's last token, as vLLM's own n-gram speculator
does. Imported only inside vLLM, and only where this runner is asked for; read in 0.32.
"""

from __future__ import annotations

import inspect
import os
import time
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from outrider.errors import CapabilityError
from outrider.integrations.vllm.drafting import Ask
from outrider.integrations.vllm.lookups import LookupPlan
from outrider.integrations.vllm.options import read_options
from outrider.integrations.vllm.proposer import ProposalLimits, build
from outrider.integrations.vllm.ranks import Ranks

ARGUMENTS = (  # of `BaseSpeculator.propose` in vLLM 0.32
    "self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", "num_sampled",
    "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds", "dp_sync_state", "dummy_run",
    "skip_attn_for_dummy_run", "mm_inputs", "is_profile", "num_speculative_tokens",
)  # fmt: skip


def check_interface(base: type = BaseSpeculator) -> None:
    """Raises CapabilityError for a vLLM whose runner would call the speculator otherwise, or want
    more of it."""
    arguments = tuple(inspect.signature(base.propose).parameters)  # type: ignore[attr-defined]
    wanted = set(getattr(base, "__abstractmethods__", ())) - {
        "init_cudagraph_manager",
        "capture",
        "propose",
    }
    if arguments == ARGUMENTS and not wanted:
        return
    differences = [f"takes {', '.join(arguments)}"] * (arguments != ARGUMENTS) + [
        f"wants {name}" for name in sorted(wanted)
    ]
    raise CapabilityError(
        "Outrider knows the new model runner of vLLM 0.32, and the speculator of this one "
        f"{'; '.join(differences)}. Use the old "
        "runner (unset VLLM_USE_V2_MODEL_RUNNER), or vLLM 0.32."
    )


class Speculator(BaseSpeculator):
    """Look-up drafters of Outrider for one worker of the new runner."""

    supports_mm_inputs = False
    # nothing is drawn: a draft token is accepted with the target's own probability
    draft_logits = None

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        check_interface()
        self._limits = ProposalLimits(vllm_config)
        plan = LookupPlan.choose(
            read_options(getattr(vllm_config, "additional_config", None), os.environ)
        )
        ranks = Ranks(vllm_config.parallel_config, repeatable=plan.repeatable)
        if ranks.shares:
            raise CapabilityError(
                f"drafter '{plan.name}' may answer each rank otherwise, and one rank drafts for "
                "all in the old runner only: "
                "unset VLLM_USE_V2_MODEL_RUNNER"
            )
        self._drafting, self._meter = build(plan, vllm_config, counts=ranks.leads)
        self._states = req_states
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        rows = vllm_config.scheduler_config.max_num_seqs
        self._drafts = torch.zeros(rows, self._limits.num_tokens, dtype=torch.int64, device=device)
        # K + 1 ... 1 tokens before the end
        self._back = torch.arange(self._limits.num_tokens + 1, 0, -1, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: drafts are made on the host, so no graph is recorded."""

    def capture(self) -> None:
        """See `init_cudagraph_manager`."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """(num_reqs, K) int64 on the device, K = `num_speculative_tokens` of the configuration, in
        the order of the batch."""
        num_rows = int(input_batch.num_reqs)
        drafts = self._drafts[:num_rows]
        if dummy_run:
            return drafts
        began = time.perf_counter()
        slots = input_batch.idx_mapping[:num_rows]
        drafts.copy_(
            last_sampled.view(-1)[slots].clamp(0, self._vocab_size - 1)[:, None].expand_as(drafts)
        )
        asks = self._asks(
            input_batch.req_ids, slots, num_sampled[:num_rows], num_rows, num_speculative_tokens
        )
        if asks:
            found = self._drafting.step([ask for _, ask in asks])
            self._fill(
                drafts, {row: draft for (row, _), draft in zip(asks, found, strict=True) if draft}
            )
            if self._meter is not None:
                self._meter.took(time.perf_counter() - began)
        return drafts

    def _asks(
        self,
        names: list[str],
        slots: Tensor,
        num_sampled: Tensor,
        num_rows: int,
        wanted: int | None,
    ) -> list[tuple[int, Ask]]:
        """Rows that got tokens in this step, each with what is asked for it."""
        lengths = self._states.total_len.gpu[slots].to(torch.int64)
        positions = (lengths[:, None] - self._back).clamp(min=0)
        tails = self._states.all_token_ids.gpu[slots[:, None], positions]
        host = torch.cat(
            [lengths[:, None], num_sampled[:, None].to(torch.int64), tails.to(torch.int64)], dim=1
        ).tolist()
        max_nodes = (
            self._limits.max_nodes(num_rows)
            if wanted is None
            else min(wanted, self._limits.num_tokens)
        )
        return [
            (
                row,
                Ask(
                    names[row],
                    length,
                    tail[-count:],
                    self._reader(slots[row], length),
                    self._limits.room(length, max_nodes),
                ),
            )
            for row, (length, count, *tail) in enumerate(host)
            if count > 0
        ]

    def _reader(self, slot: Tensor, length: int) -> Any:
        return lambda: self._states.all_token_ids.gpu[slot, :length].tolist()

    def _fill(self, drafts: Tensor, found: dict[int, list[int]]) -> None:
        """Write the drafts over the fillers, in one copy to the device."""
        if not found:
            return
        table = torch.tensor(
            [draft + [-1] * (drafts.shape[1] - len(draft)) for draft in found.values()]
        )
        table = table.to(drafts.device)
        rows = torch.tensor(list(found), device=drafts.device)
        drafts[rows] = torch.where(table >= 0, table, drafts[rows])
