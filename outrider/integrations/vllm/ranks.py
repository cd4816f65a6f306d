"""One rank drafts for all, where a drafter asked twice would answer twice otherwise: a clock or a
network decides in it.

vLLM runs one proposer for each rank of a tensor-parallel group, and all must give the same tokens,
or the ranks' passes part. Look-ups agree by themselves. Of the others the first rank alone has one,
and hands its drafts to the rest over the group's own channel.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


class Ranks:
    """The tensor-parallel group of this worker."""

    def __init__(self, parallel_config: Any, *, repeatable: bool) -> None:
        """Read the ranks from vLLM's ParallelConfig. `repeatable`: whether equal calls give equal
        drafts on every rank."""
        self.leads = parallel_config.rank % parallel_config.tensor_parallel_size == 0
        self.shares = parallel_config.tensor_parallel_size > 1 and not repeatable

    @property
    def drafts_here(self) -> bool:
        """Whether this rank needs a drafter of its own."""
        return self.leads or not self.shares

    def agreed(self, draft: Callable[[], list[list[int]]]) -> list[list[int]]:
        """The drafts of this step: this rank's own, or the first one's. Called by all ranks in
        every step, or by none."""
        if not self.shares:
            return draft()
        group = import_module("vllm.distributed").get_tp_group()
        agreed_lists: list[list[int]] = group.broadcast_object(
            draft() if self.leads else None, src=0
        )
        return agreed_lists
