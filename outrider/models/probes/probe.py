"""The checks of a freshly loaded model before its first token: that our cache reproduces it, and on
which passes.

1. `find_layers`: one plain pass with a recording attention. A layer that never calls it keeps a
   state instead of keys and
   values, or has attention code of its own: not for our cache (`unsupported.py`). One that is
   windowed must tell its attention: a window in transformers' mask alone is lost on ours
   (`context.reaches`).
2. `check_against_plain`: prefill, chain and tree passes against transformers' own forward of the
   same tokens. Catches
   what a list of names cannot: an ignored mask, position ids that are not used, ALiBi.

What fails here runs on transformers' own cache (`stateful/`). What passes keep a row's bits is
measured next, in `pass_limits.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import CapabilityError, NumericalError, OutriderError
from outrider.kv import LayerShape
from outrider.models.attention import NAME, make_known
from outrider.models.lm import LM
from outrider.models.loading.unsupported import (
    refuse_failure,
    refuse_other_logits,
    refuse_silent_layers,
)
from outrider.models.probes.reference import plain_logits
from outrider.models.probes.sum_order import AttentionKind
from outrider.models.quantised.scheme import has_experts

SHAPES = "outrider-shapes"
NUM_ROUNDINGS = 3
MAX_ROUNDING = 0.25  # of the logits' range


class AttentionCall(NamedTuple):
    """The arguments of one layer's attention call."""

    kind: AttentionKind
    window: int | None  # that it was called with

    def kept(self, device: torch.device) -> LayerShape:
        """The shape of our cache: of a layer with a window only the last positions, where torch's
        sums do not depend on those before.

        Those of its fused attention on a CPU do not, in whole blocks. Those of our kernels never
        do: `runtime/windows.py`.
        """
        kind = self.kind
        shape = self.kind.shape
        written_out = (
            kind.softcap is not None
            or kind.has_sinks
            or kind.has_slopes
            or shape.key_size != shape.value_size
        )
        return (
            shape
            if written_out or device.type != "cpu"
            else replace(shape, window=self.window or None)
        )


def _record_layer(
    seen: dict[int, AttentionCall],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    values_in_keys: bool = False,
    **unused: object,
) -> tuple[Tensor, None]:
    shape = LayerShape(key.shape[1], key.shape[3], value.shape[3], values_in_keys)
    kind = AttentionKind(
        query.shape[1], shape, softcap, s_aux is not None, alibi_slopes is not None
    )
    seen[module.layer_idx] = AttentionCall(kind, sliding_window)
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


def find_layers(module: Any, num_layers: int) -> tuple[AttentionCall, ...]:
    """The attention calls of every layer in one pass. Raises OwnCacheNeededError when a layer makes
    none."""
    seen = see_layers(module)
    if silent := [layer for layer in range(num_layers) if layer not in seen]:
        refuse_silent_layers(module, silent)
    return tuple(seen[layer] for layer in range(num_layers))


def see_layers(module: Any) -> dict[int, AttentionCall]:
    """The layers, by number, that call our attention in one pass over two tokens, and their
    calls."""
    seen: dict[int, AttentionCall] = {}
    make_known(SHAPES, partial(_record_layer, seen))
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(module.parameters()).device)
    positions = torch.arange(2, device=ids.device)[None]
    try:
        module.set_attn_implementation(SHAPES)
        with torch.inference_mode():
            module(input_ids=ids, position_ids=positions, use_cache=False)
    except Exception as error:  # noqa: BLE001  foreign code, perhaps the checkpoint's own: whatever it raises is reported
        refuse_failure(error)
    module.set_attn_implementation(NAME)
    return seen


def probe_tokens(vocab_size: int, count: int, device: torch.device | str) -> Tensor:
    """(1, count) token ids spread over the vocabulary, always the same."""
    generator = torch.Generator().manual_seed(20250101)
    return torch.randint(0, vocab_size, (1, count), generator=generator).to(device)


def check_against_plain(lm: LM, module: Any, name: str, vocab_size: int) -> None:
    """Raise OwnCacheNeededError when our passes do not reproduce the module's own logits (up to
    rounding).

    Raises CapabilityError where no cache would help, NumericalError when the module's own are no
    numbers.
    """
    tokens = probe_tokens(vocab_size, 12, lm.device)
    try:
        compared = _logits_both_ways(lm, module, name, tokens)
    except OutriderError:
        raise
    except Exception as error:  # noqa: BLE001  foreign code: whatever it raises is reported
        refuse_failure(error)
    picks = has_experts(module.config)
    worst, what = max(
        (difference(ours, expected, lm.dtype, picks_experts=picks), what)
        for what, ours, expected in compared
    )
    if not is_rounding(worst, module, lm.dtype):
        allowed = tolerance(lm.dtype)
        differs = f"a {what} on our cache differs from the model's own logits by {worst:.1%} of their range"
        refuse_other_logits(module, name, tokens, allowed, f"{differs} (allowed {allowed:.1%})")


def _logits_both_ways(
    lm: LM, module: Any, name: str, tokens: Tensor
) -> list[tuple[str, Tensor, Tensor]]:
    """(kind of pass, logits on our cache, the module's own) of `tokens` (1, 12). Leaves the cache
    empty."""
    parents = torch.tensor([[-1, -1, 0, 1, 2]], device=lm.device)  # two branches: 0-2-4 and 1-3
    branches = [[6, 7, 9, 11], [6, 8, 10]]  # pending token and nodes, as columns of `tokens`
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        plain = own_logits(module, name, lm.dtype, tokens)
        paths = [
            plain_logits(module, tokens[:, [*range(6), *branch]])[:, 6:] for branch in branches
        ]
        module.set_attn_implementation(NAME)
        with _row_of_its_own(lm):
            ours = lm.forward(tokens[:, :6]).logits
            lm.kv.advance(0, 6)
            chain = lm.forward(tokens[:, 6:]).logits
            tree = lm.forward(tokens[:, 6:], parents).logits
    compared = [("prefill", ours, plain[:, :6]), ("chain pass", chain, plain[:, 6:])]
    for branch, path in zip(branches, paths, strict=True):
        compared.append(("tree pass", tree[:, [column - 6 for column in branch]], path))
    return compared


@torch.inference_mode()
def own_logits(module: Any, name: str, dtype: torch.dtype, tokens: Tensor) -> Tensor:
    """The module's own logits (B, T, V) of texts. Raises NumericalError where these are no numbers."""
    plain = plain_logits(module, tokens)
    if not torch.isfinite(plain).all():
        what = f"NaN or infinite in {str(dtype).removeprefix('torch.')}"
        raise NumericalError(f"{name}: the model's own logits are {what}: {broken_weight(module)}")
    return plain


@contextmanager
def _row_of_its_own(lm: LM) -> Iterator[None]:
    """The only row of an empty cache, removed whatever happens: a row left behind would be read in
    the first answer's place."""
    lm.kv.add_row()
    try:
        yield
    finally:
        lm.kv.swap_remove(0)


@torch.inference_mode()
def probe_logits(lm: LM) -> Tensor:
    """Logits (1, 12, V) of a short prefix and a short pass after it: what a change of the
    arithmetic must reproduce. Both, so that a pass that gives what the one before it gave (a CUDA
    graph that recorded nothing) is found out."""
    tokens = probe_tokens(lm.shape.vocab_size, 12, lm.device)
    with _row_of_its_own(lm):
        prefix = lm.forward(tokens[:, :6]).logits
        lm.kv.advance(0, 6)
        rest = lm.forward(tokens[:, 6:]).logits
    return torch.cat([prefix, rest], dim=1)


def check_same_logits(
    lm: LM, expected: Tensor, module: Any, *, picks_experts: bool = False
) -> None:
    """Raise CapabilityError when the model's passes do not reproduce `expected`, the plain module's
    `probe_logits`."""
    worst = difference(probe_logits(lm), expected, lm.dtype, picks_experts=picks_experts)
    if not is_rounding(worst, module, lm.dtype):
        raise CapabilityError(
            f"its logits there differ from the plain ones by {worst:.1%} of their range"
        )


def difference(ours: Tensor, plain: Tensor, dtype: torch.dtype, *, picks_experts: bool) -> float:
    """Largest difference as a share of the largest logit; infinite when it is no number. `dtype`:
    the model's, whose logits may be widened.

    `picks_experts`: in 16 bits rounding changes a router's pick now and then, and with it that
    token's logits: there the token in the middle counts, of which half of all tokens differ less.
    """
    scale = plain.float().abs().max().clamp(min=1e-6)
    apart = (ours.float() - plain.float()).abs().amax(-1) / scale
    if not torch.isfinite(apart).all():
        return math.inf
    is_rounded = dtype not in (torch.float32, torch.float64)
    return (apart.median() if picks_experts and is_rounded else apart.max()).item()


def tolerance(dtype: torch.dtype) -> float:
    return 1e-3 if dtype in (torch.float32, torch.float64) else 8e-2


def is_rounding(worst: float, module: Any, dtype: torch.dtype) -> bool:
    """Whether rounding explains a `difference`: one within the tolerance, or within twice what
    rounding does to these logits.

    Deep models with weights of few bits are moved by more than the tolerance. Where rounding moves
    logits by so much that it would hide what the checks look for, it explains nothing.
    """
    if worst <= tolerance(dtype):
        return True
    return worst <= MAX_ROUNDING and worst <= 2 * rounding_noise(module, dtype)


@torch.inference_mode()
def rounding_noise(module: Any, dtype: torch.dtype) -> float:
    """The largest `difference` in a module's own logits when its embeddings are rounded to
    neighbouring numbers."""
    embedding = module.get_input_embeddings()
    tokens = probe_tokens(
        module.config.get_text_config().vocab_size, 12, next(module.parameters()).device
    )
    generator = torch.Generator().manual_seed(20250101)
    before = module.config._attn_implementation

    def move(layer: Any, inputs: Any, vectors: Tensor) -> Tensor:
        shares = (torch.rand(vectors.shape, generator=generator) - 0.5) * torch.finfo(dtype).eps
        return vectors * (1 + shares.to(vectors))

    if before == NAME:  # it reads a cache
        module.set_attn_implementation("eager")
    try:
        logits = plain_logits(module, tokens)
        with embedding.register_forward_hook(move):
            moved = [plain_logits(module, tokens) for _ in range(NUM_ROUNDINGS)]
    finally:
        if before == NAME:
            module.set_attn_implementation(before)
    return max(
        difference(plain, logits, dtype, picks_experts=has_experts(module.config))
        for plain in moved
    )


def broken_weight(module: Any) -> str:
    """A hint at the cause: the first damaged tensor, otherwise the dtype."""
    for name, tensor in module.state_dict().items():
        if not torch.isfinite(tensor).all():
            return f"the checkpoint is damaged, {name} has NaN or infinite values"
    return "all weights are finite, so the dtype is too narrow for them (try --dtype float32)"
