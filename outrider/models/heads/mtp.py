"""The MTP head of a checkpoint: a projection and one decoder layer of the target's own kind,
applied again and again.

    pair t of a text:  (token x_{t+1}, the target's state h_t)  ->  state o_t  ->  logits of x_{t+2}

    o_t = layer(projection [norm(embedding of x_{t+1}) ; norm(h_t)])        logits = the target's output head (norm(o_t))

When drafting, the pair after the last known state takes the head's own state instead, normed as
the target's is. A head of several layers has one for each token of a draft: layer k reads
(x_{t+1+k}, the state of layer k - 1 at t). Embedding and output head are the target's. The layer is
transformers' code for the target's family (`mtp_body.py`), so its attention, rotary embedding and
experts are the family's, too; it attends over a cache of the head's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.kv import LayerShape
from outrider.models.attention import make_known
from outrider.models.heads.head_lm import HeadLM
from outrider.models.indexer import indexer_layers, number_indexers
from outrider.models.pass_plan import PassPlan, following
from outrider.models.signals import AFTER_NORM

BY_FUNCTION = "outrider-by-function"  # the attention of a head in training
_by: ContextVar[Callable[..., Tensor]] = ContextVar(
    "the function that attends in the pass that this thread makes"
)


@dataclass(frozen=True)
class MtpConfig:
    """The facts of a head that its layer's own config does not state."""

    layout: str
    hidden_size: int
    hidden_first: bool = False  # the projection's input begins with the hidden state
    max_position_embeddings: int | None = None  # by its own files; None: as far as the target
    trained_for: str = ""  # name of the target, of a head that was trained here
    # the target's hidden state that a pair reads, by its key of `models/signals.py`
    signals: tuple[int, ...] = (AFTER_NORM,)

    @property
    def feature_size(self) -> int:
        """Width of the hidden states that a pair reads."""
        return self.hidden_size


def _copied(norm: nn.Module) -> nn.Module:
    """A norm with weights of its own, made on the CPU: a deep copy takes no tensor that only says
    where it is."""
    weight: Any = norm.weight
    device = weight.device
    duplicate = copy.deepcopy(norm.cpu()).to(device)
    norm.to(device)
    return duplicate


class MtpLayer(nn.Module):
    """One layer with its norms and its projection."""

    def __init__(
        self,
        body: Any,
        norm: nn.Module,
        shape: LayerShape,
        window: int | None,
        size: int,
        *,
        bias: bool,
    ) -> None:
        """`body`: a decoder of one layer that ends without a norm; `norm`: its own; `shape`,
        `window`: of its attention."""
        super().__init__()
        self.shape = shape
        self.window = window
        weight: Any = norm.weight
        self.embed_norm = _copied(norm)
        self.hidden_norm = _copied(norm)
        self.norm = norm
        self.projection = nn.Linear(
            2 * size, size, bias=bias, dtype=weight.dtype, device=weight.device
        )
        self.body = body

    def forward(
        self, embeds: Tensor, features: Tensor, positions: Tensor, *, hidden_first: bool = False
    ) -> Tensor:
        """States o (B, T, H) of embedded tokens and features, both (B, T, H), at positions (B, T)."""
        pair = [self.embed_norm(embeds), self.hidden_norm(features)]
        inputs = self.projection(torch.cat(pair[::-1] if hidden_first else pair, dim=-1))
        return self.body(
            inputs_embeds=inputs, position_ids=positions, use_cache=False
        ).last_hidden_state

    def number(self, index: int, num_layers: int) -> None:
        """Set the index of its layer in the cache, and of an indexer's, which lie after those of
        all layers."""
        for part in self.body.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = index
        number_indexers(self.body, num_layers + index)


class MtpHead(nn.Module):
    """An MTP head. `bind` must name the target's tables before the first pass."""

    draft_ids: Tensor | None = None  # it knows every token of the target

    def __init__(self, config: MtpConfig, layers: Sequence[MtpLayer]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layers)
        for index, layer in enumerate(layers):
            layer.number(index, len(layers))
        self._shared: tuple[nn.Module, ...] = ()  # the target's, so no children of ours

    def bind(self, embedding: nn.Module, output: nn.Module) -> MtpHead:
        """The target's embedding, tokens to (..., H), and output head, (..., H) to (..., V)."""
        self._shared = (embedding, output)
        return self

    @property
    def shared(self) -> tuple[nn.Module, nn.Module]:
        """The target's embedding and output head."""
        embedding, output = self._shared
        return embedding, output

    @property
    def dtype(self) -> torch.dtype:
        weight = self.layer(0).embed_norm.weight
        assert isinstance(weight, Tensor)
        return weight.dtype

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """The shape of a token's cache entry: of each layer, then of their indexers."""
        return [
            *(self.layer(index).shape for index in range(len(self.layers))),
            *indexer_layers(self),
        ]

    @property
    def window(self) -> int | None:
        """Tokens that attention sees back; None: all."""
        return next(
            (
                layer.window
                for layer in map(self.layer, range(len(self.layers)))
                if layer.window is not None
            ),
            None,
        )

    def layer(self, index: int) -> MtpLayer:
        mtp_layer = self.layers[index]
        assert isinstance(mtp_layer, MtpLayer)
        return mtp_layer

    @property
    def output_parameters(self) -> list[Tensor]:
        """The head's own tensors that `logits` reads."""
        return list(self.layer(0).norm.parameters())

    def features(self, hidden: dict[int, Tensor]) -> Tensor:
        """The features that pairs read, (..., H), from the target's hidden states by signal."""
        return self.fuse(self.join(hidden))

    def join(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The target's state that a pair reads, (..., H)."""
        (signal,) = self.config.signals
        return hidden[signal].to(self.dtype)

    def fuse(self, joined: Tensor) -> Tensor:
        """The feature itself: `join` did the work."""
        return joined

    def on_cache(
        self, tokens: Tensor, features: Tensor, positions: Tensor, plan: PassPlan, layer: int = 0
    ) -> Tensor:
        """States o (B, T, H) of the pairs (tokens (B, T), features (B, T, H)) at positions (B, T)."""
        with following(plan):
            return self.states(tokens, features, positions, layer)

    def states(self, tokens: Tensor, features: Tensor, positions: Tensor, layer: int = 0) -> Tensor:
        """`on_cache`, with whatever attention its layers have been given."""
        embeds = self.shared[0](tokens).to(features.dtype)
        return self.layer(layer)(embeds, features, positions, hidden_first=self.config.hidden_first)

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Callable[..., Tensor]
    ) -> Tensor:
        """The result of `on_cache`, attending by a function of (layer, query, key, value, scaling):
        for training."""
        body = self.layer(0).body
        before = _by.set(attend)
        if body.config._attn_implementation != BY_FUNCTION:
            make_known(BY_FUNCTION, _by_function, reads_latents=False)
            body.set_attn_implementation(BY_FUNCTION)
        try:
            return self.states(tokens, features, positions)
        finally:
            _by.reset(before)

    def carry(self, states: Tensor, layer: int = 0) -> Tensor:
        """The features of the pairs that follow, as far as the head can tell: (..., H) -> (..., H)."""
        return self.layer(layer).norm(states)

    def logits(self, states: Tensor, layer: int = 0) -> Tensor:
        """(..., H) -> (..., V)."""
        states = self.layer(layer).norm(states)
        output = self.shared[1]
        table = getattr(output, "weight", None)
        if (
            states.dtype != torch.float32
            or not isinstance(table, Tensor)
            or table.dtype not in (torch.bfloat16, torch.float16)
        ):
            return output(states)
        # in training the head is fp32, whatever the target is
        return output(states.to(table.dtype)).to(states.dtype)

    def in_full(self, logits: Tensor) -> Tensor:
        """The logits are over the target's whole vocabulary."""
        return logits


def _by_function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """transformers' attention contract."""
    return _by.get()(module.layer_idx, query, key, value, scaling), None


class MtpTurnsLM(HeadLM):
    """A head whose layers take turns: the first token of a draft is the first layer's, the second
    the second's.

    Layer k stands at the same positions as the first and reads what layer k - 1 made of them, next
    to tokens that are k later:

        slot of a row's cache     0              1              ...   n - 2
        layer 0                   (x_1, h_0)     (x_2, h_1)           (x_{n-1}, h_{n-2})      -> x_n
        layer 1                   (x_2, o_0)     (x_3, o_1)           (x_n, o_{n-2})          -> x_{n+1}

    So the last positions of all layers but the first hold guesses. They are never committed: the
    target's states of the last `lag` positions are fed again with those that come after them.
    Drafts are chains of at most one token a layer.
    """

    def __init__(
        self, head: MtpHead, vocab_size: int, context_length: int, window: int | None = None
    ) -> None:
        super().__init__(head, vocab_size, context_length, window)
        self._layers = head
        self._num_turns = len(head.layers)
        self.max_chain = self._num_turns
        self.lag = self._num_turns - 1
        self._turn = 0  # the layer that makes the next pass
        self._line = torch.empty(0)  # (B, T) tokens of the last pass
        self._begun: list[int] = []  # lengths of the rows' caches before the first turn

    def give(self, features: Sequence[Tensor]) -> None:
        super().give(features)
        self._turn = 0

    def own_logits(
        self, tokens: Tensor, parents: Tensor | None = None, columns: Tensor | None = None
    ) -> Tensor:
        """Logits (B, T, V) of the positions given, then (B, 1, V) for one more token at a time."""
        assert parents is None, "its drafts are chains"
        if self._turn:
            return self._next(tokens)
        self._line, self._begun = tokens, list(self.kv.lengths)
        self._carried, logits = self._pass(
            tokens, self._features(tokens.shape[1], None), None, 0, self._all(tokens)
        )
        self._turn = 1
        return logits

    def settle(self) -> None:
        """Run the layers whose turn did not come, so that all that is committed is in every layer's
        cache."""
        while 0 < self._turn < self._num_turns:
            self._next(self._line.new_zeros(len(self._line), 1))

    def feed(self, row: int, tokens: Sequence[int], features: Tensor) -> None:
        """Feed and commit positions of one row: the target's features (n, H) for them, tokens (n +
        lag,)."""
        count = len(features)
        carried = features[None]
        for turn in range(self._num_turns):
            self._turn = turn
            part = torch.tensor([list(tokens[turn : turn + count])], device=self.device)
            carried, _ = self._pass(part, carried, None, row, None)
        self._turn = 0
        self.kv.advance(row, count)

    def _next(self, tokens: Tensor) -> Tensor:
        """The next layer at the positions of the first, each row's last token being one of `tokens`
        (B, 1)."""
        assert self._carried is not None
        rows = torch.arange(len(tokens), device=self.device)
        last = torch.tensor([len(given) - 1 for given in self._given], device=self.device)
        self._line = F.pad(self._line[:, 1:], (0, 1))
        self._line[rows, last] = tokens[:, 0]
        lengths = list(self.kv.lengths)
        for row, begun in enumerate(self._begun):
            self.kv.truncate(row, begun)
        self._carried, logits = self._pass(
            self._line, self._carried, None, 0, self._all(self._line)
        )
        for row, length in enumerate(lengths):
            self.kv.advance(row, length - self.kv.lengths[row])
        self._turn += 1
        return logits[rows, last][:, None]

    def _all(self, tokens: Tensor) -> Tensor:
        return torch.arange(tokens.shape[1], device=self.device)

    def _states(
        self, tokens: Tensor, features: Tensor, positions: Tensor, plan: PassPlan
    ) -> Tensor:
        return self._layers.on_cache(tokens, features, positions, plan, self._turn)

    def _carry(self, states: Tensor) -> Tensor:
        return self._layers.carry(states, self._turn)

    def _logits(self, states: Tensor) -> Tensor:
        return self._layers.logits(states, self._turn)
