"""What a freshly loaded model must show before its first token: that our cache reproduces it, and on which passes.

1. `find_layers`: one plain pass with a recording attention. A layer that never calls it keeps a state instead of keys and
   values, or has attention code of its own: refused by name (`unsupported.py`). One that is windowed must tell its attention:
   a window in transformers' mask alone is lost on ours (`load._reaches`).
2. `check_against_plain`: prefill, chain and tree passes against transformers' own forward of the same tokens. Catches
   what a list of names cannot: an ignored mask, position ids that are not used, ALiBi, attention sinks.
3. `find_pass_limits`: the same tokens in passes of different widths, compared bit for bit. Kernels choose their
   summation order by the shape of the product, so exactness is measured on the model's own weights, not assumed.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from outrider.errors import CapabilityError, NumericalError, OutriderError
from outrider.kv import LayerShape
from outrider.models.attention import NAME, QUERY_BLOCK, _no_mask
from outrider.models.lm import LM, PassLimits
from outrider.models.unsupported import (
    UnsupportedAttentionError,
    refuse_failure,
    refuse_silent_layers,
    why_logits_differ,
)

SHAPES = "outrider-shapes"
# Pass widths tried by find_pass_limits; the last one caps a pass, since untried is unproven. All the small ones, because
# kernels treat remainders apart (seen: 5 rows of a packed fp32 product of width 32, with 2, 3, 6 and 8 agreeing).
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 31, 40, 72)
VECTORS = 32  # elements: two AVX-512 vectors of fp32, what torch's elementwise kernels take at once
PREFIX = 24  # tokens before the probed pass


class Seen(NamedTuple):
    """What the attention of one layer was called with."""

    shape: LayerShape
    is_windowed: bool  # it was told of a window
    takes_keywords: bool  # the keyword arguments of the pass reached it


def _record_layer(
    seen: dict[int, Seen], module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None, outrider_probe: bool = False,
    s_aux: Tensor | None = None, **unused: object,
) -> tuple[Tensor, None]:  # fmt: skip
    if s_aux is not None:
        raise UnsupportedAttentionError("its attention has sinks (a learned score per head), which Outrider's does not compute")
    shape = LayerShape(key.shape[1], key.shape[3], value.shape[3])
    seen[module.layer_idx] = Seen(shape, sliding_window is not None, outrider_probe)
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None


def find_layers(module: Any, num_layers: int, name: str) -> tuple[Seen, ...]:
    """What is seen of every layer in one pass over two tokens. Raises CapabilityError when a layer shows nothing."""
    seen: dict[int, Seen] = {}
    AttentionInterface.register(SHAPES, partial(_record_layer, seen))
    AttentionMaskInterface.register(SHAPES, _no_mask)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(module.parameters()).device)
    positions = torch.arange(2, device=ids.device)[None]
    try:
        module.set_attn_implementation(SHAPES)
        with torch.inference_mode():
            module(input_ids=ids, position_ids=positions, use_cache=False, outrider_probe=True)
    except Exception as error:  # noqa: BLE001  foreign code, perhaps the checkpoint's own: whatever it raises is told
        refuse_failure(module, error, name)
    if silent := [layer for layer in range(num_layers) if layer not in seen or not seen[layer].takes_keywords]:
        refuse_silent_layers(module, silent, silent[0] in seen, name)
    module.set_attn_implementation(NAME)
    return tuple(seen[layer] for layer in range(num_layers))


def probe_tokens(vocab_size: int, count: int, device: torch.device | str) -> Tensor:
    """(1, count) token ids spread over the vocabulary, always the same."""
    generator = torch.Generator().manual_seed(20250101)
    return torch.randint(0, vocab_size, (1, count), generator=generator).to(device)


def check_against_plain(lm: LM, module: Any, name: str, vocab_size: int) -> None:
    """Raise CapabilityError when our passes do not reproduce the module's own logits (up to rounding).

    Raises NumericalError when the module's own are no numbers.
    """
    tokens = probe_tokens(vocab_size, 12, lm.device)
    try:
        compared = _logits_both_ways(lm, module, name, tokens)
    except OutriderError:
        raise
    except Exception as error:  # noqa: BLE001  foreign code: whatever it raises is told
        refuse_failure(module, error, name)
    for what, on_cache, own in compared:
        if (worst := _difference(on_cache, own)) > _tolerance(own):
            raise CapabilityError(
                f"{name}: a {what} on our cache differs from the model's own logits by {worst:.1%} of their range "
                f"(allowed {_tolerance(own):.1%}), so it would not be lossless. "
                f"{why_logits_differ(module, tokens, _tolerance(own))}"
            )


def _logits_both_ways(lm: LM, module: Any, name: str, tokens: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """(kind of pass, logits on our cache, the module's own) of `tokens` (1, 12). Leaves the cache empty."""
    parents = torch.tensor([[-1, -1, 0, 1, 2]], device=lm.device)  # two branches: 0-2-4 and 1-3
    branches = [[6, 7, 9, 11], [6, 8, 10]]  # pending token and nodes, as columns of `tokens`
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        plain = module(input_ids=tokens, use_cache=False).logits
        if not torch.isfinite(plain).all():
            raise NumericalError(
                f"{name}: the model's own logits are NaN or infinite in {str(lm.dtype).removeprefix('torch.')}: "
                + _broken_weight(module)
            )
        paths = [
            module(input_ids=tokens[:, [*range(6), *branch]], use_cache=False).logits[:, 6:] for branch in branches
        ]
        module.set_attn_implementation(NAME)
        lm.kv.add_row()
        ours = lm.forward(tokens[:, :6])
        lm.kv.advance(0, 6)
        chain = lm.forward(tokens[:, 6:])
        tree = lm.forward(tokens[:, 6:], parents)
        lm.kv.swap_remove(0)
    compared = [("prefill", ours, plain[:, :6]), ("chain pass", chain, plain[:, 6:])]
    for branch, path in zip(branches, paths, strict=True):
        compared.append(("tree pass", tree[:, [column - 6 for column in branch]], path))
    return compared


@torch.inference_mode()
def probe_logits(lm: LM) -> Tensor:
    """Logits (1, 12, V) of a short prefix and a short pass behind it: what a change of the arithmetic must reproduce. Both, so
    that a pass that gives what the one before it gave (a CUDA graph that recorded nothing) is found out."""
    tokens = probe_tokens(lm.shape.vocab_size, 12, lm.device)
    lm.kv.add_row()
    prefix = lm.forward(tokens[:, :6])
    lm.kv.advance(0, 6)
    behind = lm.forward(tokens[:, 6:])
    lm.kv.swap_remove(0)
    return torch.cat([prefix, behind], dim=1)


def check_compiled(lm: LM, name: str, expected: Tensor) -> None:
    """Raise CapabilityError when the compiled pass does not reproduce `expected`, the plain one's `probe_logits`."""
    if (worst := _difference(probe_logits(lm), expected)) > _tolerance(expected):
        raise CapabilityError(f"{name}: compiled logits differ by {worst:.1%} of their range. Use --compile off.")


def _difference(ours: Tensor, plain: Tensor) -> float:
    """Largest difference as a share of the largest logit; infinite when it is no number."""
    scale = plain.float().abs().max().clamp(min=1e-6)
    worst = ((ours.float() - plain.float()).abs().max() / scale).item()
    return worst if math.isfinite(worst) else math.inf


def _tolerance(plain: Tensor) -> float:
    return 1e-3 if plain.dtype in (torch.float32, torch.float64) else 8e-2


def _broken_weight(module: Any) -> str:
    """What to look at: the first damaged tensor, else the dtype."""
    for name, tensor in module.state_dict().items():
        if not torch.isfinite(tensor).all():
            return f"the checkpoint is damaged, {name} has NaN or infinite values"
    return "all weights are finite, so the dtype is too narrow for them (try --dtype float32)"


def find_pass_limits(lm: LM, vocab_size: int, projection_sizes: Collection[int] = ()) -> PassLimits:
    """Pass shapes among which a row's bits do not change. Leaves the cache empty.

    Measured on one text, so what differs only now and then must be known: torch computes the end of an array, after the
    last whole pair of vectors, by other code than the rest, and there SiLU and GELU differ in the last bit for one value
    in fifty. `projection_sizes` that are no multiple of VECTORS therefore take passes that are.
    """
    longest = max(WIDTHS)
    tokens = probe_tokens(vocab_size, PREFIX + longest, lm.device)
    lm.limits = PassLimits(granularity=2)
    with torch.inference_mode():
        for _ in range(2):
            lm.kv.add_row()
        lm.catch_up([tokens[0, : PREFIX + 1].tolist(), tokens[0, : PREFIX // 2 + 1].tolist()])
        block = tokens[:, PREFIX:]
        exact_trees = _tree_path_is_exact(lm, block)  # first: they leave their tokens where later passes put a chain
        exact_rows = _neighbours_do_not_matter(lm, block)
        alone = {width: lm.forward(block[:, :width]) for width in WIDTHS}
        beside = lm.forward(block[:, :QUERY_BLOCK].repeat(2, 1))[:1]
        lm.kv.advance(0, longest - QUERY_BLOCK)
        late = lm.forward(block[:, longest - QUERY_BLOCK :])  # tokens that stood at the end of the longest pass
        for _ in range(2):
            lm.kv.swap_remove(0)

    def agree(widths: list[int]) -> bool:
        widest = alone[max(widths)]
        return all(torch.equal(alone[width], widest[:, :width]) for width in widths)

    is_even = all(size % VECTORS == 0 for size in projection_sizes)
    small = [width for width in WIDTHS if width <= QUERY_BLOCK]
    granularity, agreed = (2, small) if is_even and agree(small) else (QUERY_BLOCK, [QUERY_BLOCK])
    if not (torch.equal(beside, alone[QUERY_BLOCK]) and torch.equal(late, alone[longest][:, -QUERY_BLOCK:])):
        return _on(lm.device, PassLimits(granularity, QUERY_BLOCK, exact_trees, exact_rows))
    for width in (w for w in WIDTHS if w > QUERY_BLOCK and (granularity == 2 or w % QUERY_BLOCK == 0)):
        if not agree([*agreed, width]):
            break
        agreed = [*agreed, width]
    return _on(lm.device, PassLimits(granularity, agreed[-1], exact_trees, exact_rows))


def _on(device: torch.device, found: PassLimits) -> PassLimits:
    """On an accelerator a pass over many rows is never split for its bits: every part would read all weights again. Whether rows
    keep their bits all the same was measured, in passes up to the longest of WIDTHS."""
    if device.type == "cpu":
        return found
    agree = found.max_tokens_per_pass >= max(WIDTHS)
    return PassLimits(found.granularity, exact_trees=found.exact_trees, exact_rows=found.exact_rows and agree)


def _neighbours_do_not_matter(lm: LM, block: Tensor) -> bool:
    """Whether a token has the same bits whatever else is in its pass."""
    found = []
    for start in range(1, 4 * QUERY_BLOCK, QUERY_BLOCK - 1):
        others = block[:, start : start + QUERY_BLOCK - 1]
        found.append(lm.forward(torch.cat([block[:, :1], others], dim=1))[:, 0])
    return all(torch.equal(one, found[0]) for one in found)


def _tree_path_is_exact(lm: LM, block: Tensor) -> bool:
    """Whether branches that are scattered over a tree's places have the bits they have as chains."""
    for num_branches in (2, 3, 5):  # in turns: node n follows node n - num_branches
        parents = [max(node - num_branches, -1) for node in range(30)]
        path = [0, *range(num_branches, 31, num_branches)]
        tree = lm.forward(block[:, :31], torch.tensor([parents], device=lm.device))[:, path]
        if not torch.equal(tree, lm.forward(block[:, path])):
            return False
    return True
