"""Our attention and mask functions, registered with transformers, so that any of its decoders runs
on our cache.

The model calls `attention` where it would call SDPA or flash attention, while it follows a plan
(pass_plan.py). We write the new keys and values into the cache at the indices the plan names, and
attend from the pass's queries to whole blocks of the cache under one additive mask that says which
positions each query may see (committed prefix, tree ancestors, itself). Positions after a row's
end are masked, and a masked position contributes exactly nothing, so rows of different lengths
share a pass.

Queries are padded to a multiple of `QUERY_BLOCK` here, and keys come in whole blocks: a query's
result then has the same bits whether it is alone, alongside draft tokens, or alongside other rows (probed
in `probes/pass_limits.py`, not assumed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.lazy import transformers
from outrider.models.indexer import CHOOSE, Choose, Scores
from outrider.models.latent import ABSORBED, absorbed
from outrider.models.pass_plan import PassPlan, followed

NAME = "outrider"
# (layer, queries (B, heads, T, D), scaling) of a pass, whose keys are in the cache by then
Watch = Callable[[int, Tensor, float | None], None]
_watch: ContextVar[Watch | None] = ContextVar("who sees the queries of this thread's passes")


def attention(
    module: Any,  # transformers' attention module of one layer
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    indices: Tensor | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """transformers' attention contract, on the plan that is followed: returns (what `attend` gives,
    no weights)."""
    out = attend(
        followed(),
        module.layer_idx,
        query,
        key,
        value,
        scaling=scaling,
        softcap=softcap,
        sliding_window=sliding_window,
        sinks=s_aux,
        slopes=alibi_slopes,
        chosen=indices,
    )
    if (watch := _watch.get(None)) is not None:
        watch(module.layer_idx, query, scaling)
    return out, None


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """`watch` is called with the queries of every layer of passes that this thread makes inside by
    transformers' modules."""
    before = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(before)


def choose(number: int, scores: Scores) -> Tensor:
    """The places in its slot that each token chooses (B, T, count), on the plan that is followed.
    Its new keys are in the cache from now on."""
    plan = followed()
    mask = plan.mask[:, 0]
    keys = _write(plan.keys[number], plan.indices, scores.key[:, None])[
        : len(mask), : mask.shape[2], 0
    ]
    num_tokens, num_heads = scores.query.shape[1:3]
    rows = (0, 0, 0, mask.shape[1] - num_tokens)
    query = F.pad(scores.query.flatten(2), rows).unflatten(2, (num_heads, -1)).flatten(1, 2)
    totals = torch.relu(query.float() @ keys.float().transpose(1, 2) * scores.scale).unflatten(
        1, (-1, num_heads)
    )
    totals = (F.pad(scores.weights, rows)[:, :, None] @ totals)[:, :, 0] + mask
    return totals.sort(dim=-1, descending=True, stable=True).indices[:, :num_tokens, : scores.count]


def attend(
    plan: PassPlan,
    layer: int,
    query: Tensor,  # (B, heads, T, D)
    key: Tensor,  # (B, KV heads, T, D)
    value: Tensor,  # (B, KV heads, T, Dv)
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,  # or a chunk's size: the plan's mask says which
    sinks: Tensor | None = None,  # (heads,)
    slopes: Tensor | None = None,  # (heads,) fp32
    # (B, T, count) places in its slot that each token sees, if the mask shows them; None: all
    chosen: Tensor | None = None,
) -> Tensor:
    """Attend from the pass's queries to one layer's cache, (B, T, heads, Dv), after storing the
    pass's keys and values in it."""
    mask = plan.mask if sliding_window is None or plan.window_mask is None else plan.window_mask
    indices = plan.indices if sliding_window is None or plan.short is None else plan.short.indices
    keys = _write(plan.keys[layer], indices, key)
    in_keys = not plan.values[layer].shape[3]
    values = keys[..., : value.shape[3]] if in_keys else _write(plan.values[layer], indices, value)
    num_rows = query.shape[0]
    num_queries = query.shape[2]
    num_keys = mask.shape[3]
    padded = F.pad(query, (0, 0, 0, mask.shape[2] - num_queries))
    if chosen is not None:
        mask = _of_chosen(mask, chosen)
    keys = keys[:num_rows, :num_keys].transpose(1, 2)
    values = values[:num_rows, :num_keys].transpose(1, 2)
    if softcap is None and sinks is None and slopes is None and not in_keys:
        out = _attend(padded, keys, values, mask, scaling)
    else:
        bias = mask if slopes is None else mask + slopes.view(1, -1, 1, 1) * plan.distances
        out = _attend_written_out(padded, keys, values, bias, scaling, softcap, sinks)
    return out[:, :, :num_queries].transpose(1, 2).contiguous()


def _of_chosen(mask: Tensor, chosen: Tensor) -> Tensor:
    """The mask over what each token chose alone; queries that pad a pass see one key."""
    places = F.pad(chosen, (0, 0, 0, mask.shape[2] - chosen.shape[1]))
    hidden = torch.ones_like(mask[:, 0], dtype=torch.bool).scatter_(2, places, False)
    return mask.masked_fill(hidden[:, None], float("-inf"))


def _write(store: Tensor, indices: Tensor, new: Tensor) -> Tensor:
    """Put the pass's keys or values, (B, KV heads, T, D), at their indices; in place, returns the
    store."""
    flat_new = new.transpose(1, 2).reshape(-1, new.shape[1], new.shape[3]).to(store.dtype)
    # inductor of torch 2.11 copies the whole store where it is written to through a view
    if torch.compiler.is_exporting():
        capacity = store.shape[1]
        return store.index_put_((indices // capacity, indices % capacity), flat_new)
    store.view(-1, store.shape[2], store.shape[3]).index_copy_(0, indices, flat_new)
    return store


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    grouped = query.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=grouped
    )


def _attend_written_out(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention in steps, softmax in fp32, for what the fused kernels lack. Query heads of one KV
    head are rows of one product.

    `bias`: the mask and, with ALiBi, each key's distance times a slope of the head (BLOOM). A soft
    cap squashes the scores (Gemma 2). A sink is a learned score of each head whose weight goes to
    no value (gpt-oss). Values that are beginnings of keys (`latent.py`) have another size than
    these.
    """
    heads = (keys.shape[1], query.shape[1] // keys.shape[1])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = _of_each(query, keys.transpose(2, 3), heads) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return _of_each(weights[..., : keys.shape[2]].to(query.dtype), values, heads)


def _of_each(rows: Tensor, matrices: Tensor, heads: tuple[int, int]) -> Tensor:
    """(B, heads, T, in) times (B, KV heads, in, out). `heads`: KV heads, and query heads of each."""
    groups = rows.unflatten(1, heads)
    return (
        torch.matmul(groups.flatten(2, 3), matrices).unflatten(2, groups.shape[2:4]).flatten(1, 2)
    )


def without_mask(*args: object, config: Any = None, **kwargs: object) -> Tensor | None:
    """transformers need not build a mask: the plan carries ours. Code with an indexer takes a part
    of one, so it gets one."""
    return torch.zeros(1, 1, 1, 1) if getattr(config, "index_topk", None) else None


def register() -> None:
    """Make `attn_implementation="outrider"` known to transformers. Idempotent."""
    make_known(NAME, attention, choose)


def make_known(
    name: str,
    function: Callable[..., Any],
    choose: Choose | None = None,
    *,
    reads_latents: bool = True,
) -> None:
    """Register this attention function under this name; modules that are set to the name use it,
    and no mask is made for it.

    `choose`: what indexers ask; None: they run by transformers' code. `reads_latents`: latent
    attention hands it what is kept of a token (`latent.py`), not keys and values of each head.
    """
    if reads_latents:
        ABSORBED.add(name)
        function = absorbed(function)
    if choose is not None:
        CHOOSE[name] = choose
    transformers.AttentionInterface.register(name, function)
    transformers.AttentionMaskInterface.register(name, without_mask)
