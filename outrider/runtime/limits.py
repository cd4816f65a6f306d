"""Measure the passes of a loaded model on the executor: a row's bits must not depend on the other
rows.

The kernels keep one order of sums for every output by construction, which the tests show on many
shapes, with samples that another order could not pass (`tests/unit/runtime`). What is checked at
load is that this model, on this machine, agrees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.models.lm import LM, PassLimits
from outrider.models.probes.probe import probe_tokens

PREFIXES = (7, 3)  # tokens before the passes of two rows
CHAIN = 6  # tokens of a pass
CUT = 2  # where the chain is cut into two passes
# The chain's tokens 0 .. 5 as columns of a tree, with another branch among them
TREE_PATH = [0, 1, 3, 4, 6, 8]
TREE_PARENTS = [-1, -1, 0, 2, 1, 3, 4, 5]  # of the nodes after the pending token


@torch.inference_mode()
def find_native_limits(lm: LM, widest: int = 0) -> PassLimits:
    """Limits of passes, of which there are none, and whether tokens kept their bits. The cache is
    empty, before and after.

    `widest`: tokens of a wide pass that is tried as well, where kernels might choose another way
    for it.
    """
    lm.limits = PassLimits(granularity=1)
    tokens = probe_tokens(
        lm.shape.vocab_size, PREFIXES[0] + CHAIN + len(TREE_PARENTS) + 1, lm.device
    )
    for _ in PREFIXES:
        lm.kv.add_row()
    lm.catch_up([tokens[0, : length + 1].tolist() for length in PREFIXES])
    chain = tokens[:, PREFIXES[0] : PREFIXES[0] + CHAIN]
    others = tokens[:, -len(TREE_PARENTS) - 1 :]
    together = lm.forward(torch.cat([chain, others[:, :CHAIN]])).logits[0]
    in_tree = _in_tree(lm, chain, others)
    whole = lm.forward(chain).logits[0]
    alone = lm.forward(chain[:, :1]).logits[0]
    long = torch.cat([chain, others.repeat(1, -(-widest // others.shape[1]))], dim=1)
    wide = lm.forward(long[:, : max(widest, CHAIN)]).logits[0]
    lm.kv.advance(0, CUT)
    late = lm.forward(chain[:, CUT:]).logits[0]
    for _ in PREFIXES:
        lm.kv.swap_remove(0)
    exact_rows = (
        torch.equal(together, whole)
        and torch.equal(alone, whole[:1])
        and torch.equal(late, whole[CUT:])
    )
    exact_rows = exact_rows and torch.equal(wide[:CHAIN], whole)
    return PassLimits(granularity=1, exact_trees=torch.equal(in_tree, whole), exact_rows=exact_rows)


def _in_tree(lm: LM, chain: Tensor, others: Tensor) -> Tensor:
    """Logits (CHAIN, V) of the chain as a path of a tree whose other nodes are `others`."""
    tree = others.clone()
    tree[:, TREE_PATH] = chain
    return lm.forward(tree, torch.tensor([TREE_PARENTS], device=lm.device)).logits[0, TREE_PATH]
