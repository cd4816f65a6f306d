"""Shared-noise decoding: the token at text position t is argmax_v log p_t(v) + g_t(v), noise g keyed by
(seed, t).

By the Gumbel-max theorem that token has law p_t, and it is a function of p_t and of the noise alone: same
seed, same text, whichever drafter, draft length, batch, or none at all. A draft token is kept when it
equals the target's own choice; a drafter that maximises log q + g with the same noise agrees with it often,
namely with probability at least (1 - TV)/(1 + TV) (Daliri et al. 2408.07978; Maddison et al. 1411.0030 for
the race). docs/algorithms/coupling.md.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def gumbel_choice(probs: Tensor, noise: Tensor) -> Tensor:
    """The winner of the race per law: probs and noise (..., V) -> (...) int64; lowest id among equals."""
    scores = probs.log() + noise
    if scores.device.type != "cpu":
        return scores.argmax(dim=-1)
    return torch.from_numpy(np.asarray(scores.numpy().argmax(axis=-1)))  # torch looks at one score after the other there
