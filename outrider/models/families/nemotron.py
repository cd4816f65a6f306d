"""Nemotron-H's MTP heads: a layer is two of the family's blocks, attention and experts.

The first block has the norms and the projection next to its own tensors, the last one the norm
after the layer. In GGUF files both lie in one block.
"""

from __future__ import annotations

import re

from outrider.models.heads.mtp_layout import MtpLayout
from outrider.models.heads.names import Names

MTP = MtpLayout(
    "nemotron",
    Names(
        ("mtp.layers.0.enorm.{rest}", "embed_norm.{rest}"),
        ("mtp.layers.0.hnorm.{rest}", "hidden_norm.{rest}"),
        ("mtp.layers.0.eh_proj.{rest}", "projection.{rest}"),
        ("mtp.layers.{last}.final_layernorm.{rest}", "norm.{rest}"),
        ("mtp.layers.{block}.{rest}", "block.{block}.{rest}"),
    ),
    sign="mtp.layers.0.norm.weight",
    kinds="mtp_layers_block_type",
    gguf=("nemotron_h_moe",),
    second_block=re.compile(r"ffn_|exp_probs_b|post_attention_norm"),
)
