"""MTP heads of Qwen3-Next, Qwen3.5 and later; Mellum and EXAONE MoE have them, too, and `outrider
train mtp` writes them so."""

from __future__ import annotations

from outrider.models.heads.mtp_layout import MtpLayout
from outrider.models.heads.names import Names

MTP = MtpLayout(
    "qwen",
    Names(
        ("mtp.pre_fc_norm_embedding.{rest}", "embed_norm.{rest}"),
        ("mtp.pre_fc_norm_hidden.{rest}", "hidden_norm.{rest}"),
        ("mtp.fc.{rest}", "projection.{rest}"),
        ("mtp.norm.{rest}", "norm.{rest}"),
        ("mtp.layers.{layer}.{rest}", "{layer}.block.{rest}"),
    ),
    sign="mtp.fc.weight",
    gguf=("qwen35", "qwen35moe", "qwen3next", "exaone4"),
)
