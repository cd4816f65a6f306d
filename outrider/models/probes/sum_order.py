"""Whether kernels add in the same order in every pass: samples in which another order shows, for
`pass_limits.py`.

A number in half precision hides the order of its sum: only about one in 10,000 changes with it, so
a few passes of a model agree by luck. Two kinds of samples do not. Attention gets keys and values
whose sums cancel: what is left is rounding alone, and another order leaves something else. For the
sum of attention weights, and for linear layers, which keep their own weights, enough numbers are
compared.

A sample is a table from the number of tokens in a pass to what the kernel gave, tokens first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.kv import KVCache, LayerShape
from outrider.models.attention import attend
from outrider.models.gguf.linear import BlockLinear
from outrider.models.latent import LatentProduct
from outrider.models.linear.pack import PackedLinear
from outrider.models.linear.panel import PanelLinear, is_transposed
from outrider.models.lm import LM
from outrider.models.plan import plan_pass

Sample = dict[int, Tensor]  # tokens in the pass -> (tokens, numbers)
Inputs = tuple[Tensor, Tensor, Tensor]  # query, key, value (1, heads, tokens, size)
# Attention to be probed: (cache, query, key, value, parents of a tree) -> (tokens, heads * value
# size); None: the module's
Attend = Callable[[KVCache, Tensor, Tensor, Tensor, Tensor | None], Tensor] | None

PREFIXES = (1, 24, 300, 600)  # tokens before a pass: less and more than one key block
TREE_NODES = 63
# nodes between a node and its parent at most: long paths, whose sums differ most from those of a
# chain
REACH = 3
# Numbers compared per linear shape. Measured on random weights: another order of the sum changes 3
# to 16 in 100,000 numbers of bfloat16, ten times as many of float16, and one number in four of
# float32.
NUMBERS = {torch.bfloat16: 150_000, torch.float16: 50_000}
# Numbers of tree nodes compared per kind of attention: another order of the sum of weights alone
# changes 1 in 100,000 of bfloat16 and 4 of float16, measured on torch's attention.
TREE_NUMBERS = {torch.bfloat16: 1_000_000, torch.float16: 300_000}
FEW_NUMBERS = 2_000  # of wider types
MAX_EXPERT_TOKENS = 400  # whose experts are sampled
MAX_COLUMNS = 8192  # outputs kept of each token


class AttentionKind(NamedTuple):
    """The settings that decide how a layer's attention is computed."""

    num_heads: int
    shape: LayerShape
    softcap: float | None
    has_sinks: bool = False
    has_slopes: bool = False

    def sinks(self, device: torch.device | str = "cpu") -> Tensor | None:
        """(heads,) to be sampled with, always the same; None for a layer without."""
        return torch.linspace(-4.0, 8.0, self.num_heads, device=device) if self.has_sinks else None

    def slopes(self, device: torch.device | str = "cpu") -> Tensor | None:
        """(heads,) of ALiBi, likewise."""
        return (
            torch.logspace(-1.0, -8.0, self.num_heads, 2.0, device=device)
            if self.has_slopes
            else None
        )


def same_bits(sample: Sample, widths: list[int]) -> bool:
    """Whether a token has the same bits in passes of all these widths."""
    widest = sample[max(widths)]
    for width in widths:
        count = min(len(sample[width]), len(widest))
        if not torch.equal(sample[width][:count], widest[:count]):
            return False
    return True


def attention_samples(
    kind: AttentionKind, lm: LM, widths: tuple[int, ...], attend: Attend = None
) -> Iterator[Sample]:
    """Three samples per prefix: with sums that cancel among values, with sums that cancel within a
    score, and random ones."""
    bench = _Bench(kind, lm, attend)
    for prefix in PREFIXES:
        for fill in (bench.cancelling_values, bench.cancelling_scores, bench.random):
            query, key, value = fill(prefix, max(widths))
            yield {
                width: bench.attend(query[:, :, :width], key[:, :, :width], value[:, :, :width])
                for width in widths
            }


def trees_keep_bits(kind: AttentionKind, lm: LM, attend: Attend = None) -> bool:
    """Whether a node of a tree gets the bits that it has at the end of its own path as a chain."""
    bench = _Bench(kind, lm, attend)
    dice = random.Random(1)
    for prefix in PREFIXES:
        parents, path = _some_tree(dice)
        if not bench.agrees(bench.cancelling_values(prefix, TREE_NODES + 1, path), parents, path):
            return False
        inputs = bench.random(prefix, TREE_NODES + 1)
        numbers = 0
        while numbers < TREE_NUMBERS.get(lm.dtype, FEW_NUMBERS) // len(PREFIXES):
            parents, path = _some_tree(dice)
            if not bench.agrees(inputs, parents, path):
                return False
            numbers += len(path) * kind.num_heads * kind.shape.value_size
    return True


def linear_samples(module: nn.Module, lm: LM, widths: tuple[int, ...]) -> Iterator[Sample]:
    """One sample per shape of linear layer, with the model's own weights and random inputs; two of
    a latent's matrix."""
    kinds = (nn.Linear, PackedLinear, PanelLinear, BlockLinear)
    seen: set[object] = set()
    layer: Any
    for layer in module.modules():
        if (
            isinstance(layer, LatentProduct)
            and (key := (layer.weight.shape, layer.key_size, layer.value_size)) not in seen
        ):
            seen.add(key)
            yield _by_head_sample(layer.to_latent, layer.num_heads, layer.key_size, lm, widths)
            yield _by_head_sample(layer.from_latent, layer.num_heads, layer.rank, lm, widths)
        if not isinstance(layer, kinds) and not is_transposed(layer):
            continue
        inputs, outputs = (
            (layer.nx, layer.nf)
            if is_transposed(layer)
            else (layer.in_features, layer.out_features)
        )
        form = layer.form if isinstance(layer, BlockLinear) else None
        kind = (type(layer), inputs, outputs, layer.bias is None, form)
        if kind not in seen:
            seen.add(kind)
            yield _linear_sample(layer, inputs, outputs, lm, widths)


def _linear_sample(
    layer: nn.Module, inputs: int, outputs: int, lm: LM, widths: tuple[int, ...]
) -> Sample:
    count = -(-NUMBERS.get(lm.dtype, FEW_NUMBERS) // outputs)
    generator = torch.Generator().manual_seed(inputs)
    x = (
        torch.randn(1, count + max(widths), inputs, generator=generator)
        .to(_dtype_of(layer, lm))
        .to(lm.device)
    )
    found = {width: _in_passes(layer, x, width, count) for width in widths if width > 1}
    return {width: found[max(width, 2)] for width in widths}  # `LM` never sends a single token


def _by_head_sample(
    multiply: Callable[[Tensor], Tensor],
    num_heads: int,
    inputs: int,
    lm: LM,
    widths: tuple[int, ...],
) -> Sample:
    generator = torch.Generator().manual_seed(inputs)
    x = (
        torch.randn(1, max(widths), num_heads, inputs, generator=generator)
        .to(lm.dtype)
        .to(lm.device)
    )
    return {width: multiply(x[:, : max(width, 2)])[0, :width].flatten(1) for width in widths}


def _dtype_of(layer: Any, lm: LM) -> torch.dtype:
    """The dtype of a layer's products: a router may be kept in fp32 where the model runs in
    bf16."""
    if isinstance(layer, BlockLinear):
        return layer.dtype
    weight = (
        layer.packed
        if isinstance(layer, PackedLinear)
        else layer.panels
        if isinstance(layer, PanelLinear)
        else layer.weight
    )
    return weight.dtype if weight.is_floating_point() else lm.dtype


def _in_passes(layer: nn.Module, x: Tensor, width: int, count: int) -> Tensor:
    """(tokens, outputs) of at least `count` tokens, `width` at a time."""
    parts = [
        _product(layer, x[:, start : start + width])[0, :, :MAX_COLUMNS]
        for start in range(0, count, width)
    ]
    return torch.cat(parts)


def _product(layer: Any, x: Tensor) -> Tensor:
    """The product of a linear layer, without the choice of experts that a router may make besides
    (Phi MoE)."""
    out = layer(x)
    return out if isinstance(out, Tensor) else F.linear(x, layer.weight, layer.bias)


def experts_keep_bits(module: Any, lm: LM) -> bool:
    """Whether a token has the same bits whatever other tokens its experts are given. False for
    experts that cannot be sampled.

    Experts are modules with their own weights in three dimensions, (experts, out, in), convolutions
    apart. They are called as in transformers 5 with hidden states (tokens, size) and the indices
    and weights (tokens, k) of each token's experts.
    """
    seen = set()
    for experts in module.modules():
        if isinstance(experts, nn.Conv1d | nn.ConvTranspose1d):
            continue
        weights = [weight for weight in experts.parameters(recurse=False) if weight.dim() == 3]
        kind = (type(experts), *(weight.shape for weight in weights))
        if weights and kind not in seen:
            seen.add(kind)
            if not _are_independent(
                experts, len(weights[0]), module.config.get_text_config().hidden_size, lm
            ):
                return False
    return True


def _are_independent(experts: nn.Module, num_experts: int, size: int, lm: LM) -> bool:
    count = min(MAX_EXPERT_TOKENS, 2 + NUMBERS.get(lm.dtype, FEW_NUMBERS) // size)
    generator = torch.Generator().manual_seed(num_experts)
    hidden = torch.randn(count, size, generator=generator).to(lm.dtype).to(lm.device)
    chosen = torch.rand(count, num_experts, generator=generator).argsort(dim=1)[:, :2].to(lm.device)
    weights = torch.full(chosen.shape, 0.5, dtype=lm.dtype, device=lm.device)
    sums = []
    for tokens in (2, 5, 40):
        parts = [slice(start, start + tokens) for start in range(0, count, tokens)]
        try:
            sums.append(
                torch.cat([experts(hidden[part], chosen[part], weights[part]) for part in parts])
            )
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001  any model's code, which may be called in another way
            return False
    return all(torch.equal(total, sums[0]) for total in sums)


class _Bench:
    """One layer's attention over a cache of its own."""

    def __init__(self, kind: AttentionKind, lm: LM, attend: Attend) -> None:
        self._attend = attend
        self._kind = kind
        self._dtype = lm.dtype
        self._device = lm.device
        self._generator = torch.Generator().manual_seed(20250102)
        self._kv = KVCache([kind.shape], lm.dtype, lm.device)
        self._kv.add_row()

    def random(self, prefix: int, width: int) -> Inputs:
        """Normal numbers."""
        return self._behind(
            prefix,
            self._normal(width, "query"),
            self._normal(prefix + width, "key"),
            self._normal(prefix + width, "value"),
        )

    def cancelling_scores(self, prefix: int, width: int) -> Inputs:
        """Every product of a query and a key adds up to nothing but rounding, of the size of one."""
        query = torch.full((self._kind.num_heads, width, self._kind.shape.key_size), 256.0)
        keys = self._cancelling(
            self._kind.shape.key_size, (self._kind.shape.num_kv_heads, prefix + width)
        ).permute(1, 2, 0)
        return self._behind(prefix, query, keys, self._normal(prefix + width, "value"))

    def cancelling_values(self, prefix: int, width: int, path: Sequence[int] = ()) -> Inputs:
        """All weights are equal; values of the prefix and `path` (tokens of the pass) together add
        up to nothing but rounding."""
        shape = self._kind.shape
        total = prefix + width
        query = torch.zeros(self._kind.num_heads, width, shape.key_size)
        values = 2.0**-10 * self._normal(total, "value")
        seen = [*range(prefix), *(prefix + node for node in path)]
        values[:, seen] = self._cancelling(
            len(seen), (shape.num_kv_heads, shape.value_size)
        ).transpose(0, 1)
        keys = self._normal(total, "key")
        if shape.values_in_keys:
            keys[..., : shape.value_size] = values
        return self._behind(prefix, query, keys, values)

    def _behind(self, prefix: int, query: Tensor, keys: Tensor, values: Tensor) -> Inputs:
        """Put keys and values (KV heads, prefix + width, size) of the prefix into the cache; the
        rest is the pass."""
        if self._kind.shape.values_in_keys:
            values = keys[..., : self._kind.shape.value_size]
        keys, values, query = (
            tensor.to(self._dtype).to(self._device) for tensor in (keys, values, query)
        )
        self._kv.truncate(0, 0)
        self._kv.reserve(1, keys.shape[1])
        self._kv.advance(0, prefix)
        self._kv.keys[0][0, :prefix] = keys[:, :prefix].transpose(0, 1)
        if not self._kind.shape.values_in_keys:
            self._kv.values[0][0, :prefix] = values[:, :prefix].transpose(0, 1)
        return query[None], keys[None, :, prefix:], values[None, :, prefix:]

    def _normal(self, count: int, what: Literal["query", "key", "value"]) -> Tensor:
        """(heads, count, size)"""
        shape = self._kind.shape
        heads = self._kind.num_heads if what == "query" else shape.num_kv_heads
        size = shape.value_size if what == "value" else shape.key_size
        return torch.randn(heads, count, size, generator=self._generator)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, parents: Tensor | None = None
    ) -> Tensor:
        """(tokens, heads * value size) of a pass over these."""
        if self._attend is not None:
            return self._attend(self._kv, query, key, value, parents)
        plan, _ = plan_pass(self._kv, 1, query.shape[2], parents, last_position=1 << 20)
        sinks = self._kind.sinks(self._device)
        slopes = self._kind.slopes(self._device)
        out = attend(
            plan,
            0,
            query,
            key,
            value,
            scaling=1.0,
            softcap=self._kind.softcap,
            sinks=sinks,
            slopes=slopes,
        )
        return out[0].flatten(1)

    def agrees(self, inputs: Inputs, parents: list[int], path: list[int]) -> bool:
        """Whether the path to a tree's last node has the same bits as a chain of its tokens alone."""
        query, key, value = inputs
        tree = self.attend(query, key, value, torch.tensor([parents], device=self._device))
        chain = self.attend(query[:, :, path], key[:, :, path], value[:, :, path])
        return torch.equal(tree[path], chain)

    def _cancelling(self, count: int, others: tuple[int, ...]) -> Tensor:
        """(count, *others): along the first dimension pairs of opposite numbers of many sizes, in
        random order."""
        half = (count // 2, *others)
        # beyond what the largest leaves of fp32's 24 bits
        smallest = -13 if self._dtype == torch.float16 else -30
        sizes = 2.0 ** torch.randint(smallest, 14, half, generator=self._generator).float()
        sizes = (sizes * (1 + torch.rand(half, generator=self._generator))).to(self._dtype).float()
        pairs = torch.cat([sizes, -sizes, torch.zeros(count % 2, *others)])
        order = torch.rand(pairs.shape, generator=self._generator).argsort(dim=0)
        return pairs.gather(0, order)


def _some_tree(dice: random.Random) -> tuple[list[int], list[int]]:
    """Parents of the nodes of a random tree, and the columns of a pass (0: the pending token) down
    to its last node."""
    parents = [dice.randrange(max(-1, node - REACH), node) for node in range(TREE_NODES)]
    path = []
    node = TREE_NODES - 1
    while node >= 0:
        path.append(node + 1)
        node = parents[node]
    return parents, [0, *reversed(path)]
