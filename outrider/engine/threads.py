"""How many processor threads one engine's arithmetic uses, beside other engines in the same process."""

from __future__ import annotations

import torch


def use_threads(count: int | None) -> None:
    """For the thread that calls; None: as torch chose. torch keeps the number per thread, but gives a thread that computes for
    the first time what was set last in the whole process, by an engine that was loaded after this one. So that happens first."""
    torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
