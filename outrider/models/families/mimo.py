"""MiMo's MTP heads, whose projection reads the hidden state first."""

from __future__ import annotations

from outrider.models.heads.mtp_layout import MtpLayout
from outrider.models.heads.names import Names

MTP = MtpLayout(
    "mimo",
    Names(
        ("mtp_layers.{layer}.token_layernorm.{rest}", "{layer}.embed_norm.{rest}"),
        ("mtp_layers.{layer}.hidden_layernorm.{rest}", "{layer}.hidden_norm.{rest}"),
        ("mtp_layers.{layer}.input_proj.{rest}", "{layer}.projection.{rest}"),
        ("mtp_layers.{layer}.final_layernorm.{rest}", "{layer}.norm.{rest}"),
        ("mtp_layers.{layer}.{rest}", "{layer}.block.{rest}"),
    ),
    sign="mtp_layers.{layer}.input_proj.weight",
    hidden_first=True,
    under="model.",
)
