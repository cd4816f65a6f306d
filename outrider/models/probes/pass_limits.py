"""Which passes keep a row's bits: measured on the loaded model, since kernels choose the order of a
sum by its shape.

Two sources of evidence are combined. Whole passes over one text, in every shape the engine makes,
see every operation of the model but few numbers of each. Samples of its linear layers and its
attention (`sum_order.py`) see so many that agreement is no luck.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.linear.panel import is_transposed
from outrider.models.lm import LM, PassLimits
from outrider.models.pass_plan import QUERY_BLOCK
from outrider.models.probes.probe import probe_tokens, see_layers
from outrider.models.probes.sum_order import (
    Sample,
    attention_samples,
    experts_keep_bits,
    linear_samples,
    same_bits,
    trees_keep_bits,
)

# Pass widths tried; the last one caps a pass, since untried is unproven. All the small ones,
# because kernels treat remainders apart (seen: 5 rows of a packed fp32 product of width 32, with 2,
# 3, 6 and 8 agreeing).
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 31, 40, 72)
VECTORS = 32  # elements: two AVX-512 vectors of fp32, what torch's elementwise kernels take at once
PREFIX = 24  # tokens before the probed pass


@torch.inference_mode()
def find_pass_limits(lm: LM, module: Any) -> PassLimits:
    """Pass shapes among which a row's bits do not change. `lm` runs `module` as it is; its cache is
    empty, before and after.

    torch computes the end of an array, after the last whole pair of vectors, by other code than the
    rest, and there SiLU and GELU differ in the last bit for one value in fifty. So a model with
    projections that are no multiple of VECTORS takes passes that are.
    """
    longest = max(WIDTHS)
    tokens = probe_tokens(lm.shape.vocab_size, PREFIX + longest, lm.device)
    lm.limits = PassLimits(granularity=2)
    for _ in range(2):
        lm.kv.add_row()
    lm.catch_up([tokens[0, : PREFIX + 1].tolist(), tokens[0, : PREFIX // 2 + 1].tolist()])
    block = tokens[:, PREFIX:]
    # first: they leave their tokens where later passes put a chain
    exact_trees = tree_path_is_exact(lm, block)
    exact_rows = neighbours_do_not_matter(lm, block) and experts_keep_bits(module, lm)
    # what it scores is not sampled, and a digit changes what it chooses
    if any(shape.is_indexer for shape in lm.shape.layers):
        exact_trees = exact_rows = False
    alone = {width: lm.forward(block[:, :width]).logits for width in WIDTHS}
    beside = lm.forward(block[:, :QUERY_BLOCK].repeat(2, 1)).logits[:1]
    lm.kv.advance(0, longest - QUERY_BLOCK)
    # tokens that stood at the end of the longest pass
    late = lm.forward(block[:, longest - QUERY_BLOCK :]).logits
    for _ in range(2):
        lm.kv.swap_remove(0)
    kinds = dict.fromkeys(layer.kind for layer in see_layers(module).values())
    exact_trees = exact_trees and all(trees_keep_bits(kind, lm) for kind in kinds)
    samples: list[Sample] = [{width: logits[0] for width, logits in alone.items()}]
    samples += [sample for kind in kinds for sample in attention_samples(kind, lm, WIDTHS)]
    samples += linear_samples(module, lm, WIDTHS)

    def agree(widths: list[int]) -> bool:
        return all(same_bits(sample, widths) for sample in samples)

    is_even = all(size % VECTORS == 0 for size in _projection_sizes(module))
    small = [width for width in WIDTHS if width <= QUERY_BLOCK]
    granularity, agreed = (2, small) if is_even and agree(small) else (QUERY_BLOCK, [QUERY_BLOCK])
    if not (
        torch.equal(beside, alone[QUERY_BLOCK])
        and torch.equal(late, alone[longest][:, -QUERY_BLOCK:])
    ):
        return _on(lm.device, PassLimits(granularity, QUERY_BLOCK, exact_trees, exact_rows))
    for width in (
        w for w in WIDTHS if w > QUERY_BLOCK and (granularity == 2 or w % QUERY_BLOCK == 0)
    ):
        if not agree([*agreed, width]):
            break
        agreed = [*agreed, width]
    return _on(lm.device, PassLimits(granularity, agreed[-1], exact_trees, exact_rows))


def _projection_sizes(module: nn.Module) -> set[int]:
    """Widths of what activation functions are applied to: every projection's output but the logits."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    sizes = (
        getattr(m, "nf" if is_transposed(m) else "out_features", None)
        for m in module.modules()
        if m is not head
    )
    return {size for size in sizes if isinstance(size, int)}


def _on(device: torch.device, limits: PassLimits) -> PassLimits:
    """The limits for this device. On an accelerator a pass is never split for its bits, since each
    part reads all weights again.

    Whether rows keep their bits there all the same was measured, in passes up to the longest of
    WIDTHS.
    """
    if device.type == "cpu":
        return limits
    agree = limits.max_tokens_per_pass >= max(WIDTHS)
    return PassLimits(
        limits.granularity, exact_trees=limits.exact_trees, exact_rows=limits.exact_rows and agree
    )


def neighbours_do_not_matter(lm: LM, block: Tensor) -> bool:
    """Whether a token has the same bits whatever else is in its pass."""
    outputs = []
    for start in range(1, 4 * QUERY_BLOCK, QUERY_BLOCK - 1):
        others = block[:, start : start + QUERY_BLOCK - 1]
        outputs.append(lm.forward(torch.cat([block[:, :1], others], dim=1)).logits[:, 0])
    return all(torch.equal(output, outputs[0]) for output in outputs)


def tree_path_is_exact(lm: LM, block: Tensor) -> bool:
    """Whether branches that are scattered over a tree's places have the bits they have as chains."""
    for num_branches in (2, 3, 5):  # in turns: node n follows node n - num_branches
        parents = [max(node - num_branches, -1) for node in range(30)]
        path = [0, *range(num_branches, 31, num_branches)]
        tree = lm.forward(block[:, :31], torch.tensor([parents], device=lm.device)).logits[:, path]
        if not torch.equal(tree, lm.forward(block[:, path]).logits):
            return False
    return True
