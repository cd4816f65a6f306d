"""The MTP layer of a target with several residual streams (Qwen3.8-Flash-Next): it reads and carries all of them.

    o_t = layer(projection norm(h_t)[stream] + embed_projection norm(embedding of x_{t+1}), for every stream)

h_t are the target's streams, side by side, before they are mixed; the layer ends with a mixer where others have a norm.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from outrider.kv import LayerShape
from outrider.models.heads.mtp import MtpLayer

MIXER = "hyper_connection_mixer"  # what mixes the streams of a decoder, in place of its final norm


class StreamsLayer(MtpLayer):
    """One layer with its norms, its projections and its mixer."""

    def __init__(self, body: Any, mixer: Any, shape: LayerShape | None, window: int | None, size: int, *, bias: bool) -> None:
        """Takes what `MtpLayer` takes; `size`: of one stream."""
        nn.Module.__init__(self)
        like = mixer.input_mix_weight_down.weight
        made = {"dtype": like.dtype, "device": like.device}
        kind, eps = type(mixer.hc_norm), mixer.hc_norm.eps
        self.shape, self.window, self.body, self.norm, self.output = shape, window, body, mixer, None
        self.embed_norm, self.hidden_norm = (kind(width, eps=eps).to(**made) for width in (size, like.shape[1]))
        self.projection, self.embed_projection = (nn.Linear(size, size, bias=bias, **made) for _ in range(2))

    def inputs(self, embeds: Tensor, features: Tensor, *, hidden_first: bool) -> Tensor:
        streams = self.projection(self.hidden_norm(features).unflatten(-1, (-1, embeds.shape[-1])))
        return (streams + self.embed_projection(self.embed_norm(embeds)).unsqueeze(-2)).flatten(-2)


def as_one_stream(decoder: Any) -> None:
    """Makes a decoder take all its streams as they come, where else it would repeat the embedding for each of them."""
    decoder.config = copy.copy(decoder.config)
    decoder.config.hidden_size *= decoder.config.hc_count
    decoder.config.hc_count = 1
