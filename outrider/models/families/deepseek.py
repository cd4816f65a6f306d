"""DeepSeek's MTP heads: one more decoder layer after the target's last. GLM 4.5 and later, Ling
and Hunyuan 3 have them, too."""

from __future__ import annotations

from outrider.models.heads.mtp_layout import MtpLayout
from outrider.models.heads.names import Names

MTP = MtpLayout(
    "deepseek",
    Names(
        ("layers.{layer}.enorm.{rest}", "{layer}.embed_norm.{rest}"),
        ("layers.{layer}.hnorm.{rest}", "{layer}.hidden_norm.{rest}"),
        ("layers.{layer}.eh_proj.{rest}", "{layer}.projection.{rest}"),
        ("layers.{layer}.shared_head.norm.{rest}", "{layer}.norm.{rest}"),
        ("layers.{layer}.final_layernorm.{rest}", "{layer}.norm.{rest}"),  # Hunyuan's
        ("layers.{layer}.embed_tokens.weight", "copy"),
        ("layers.{layer}.shared_head.head.weight", "copy"),
        ("layers.{layer}.{rest}", "{layer}.block.{rest}"),
    ),
    sign="layers.{layer}.eh_proj.weight",
    counts_on=True,
    under="model.",
)
MTP_NOT_READ = {  # of families whose heads have these names
    "dots3_note": "an embedding of the head's own", "glm5_next": "a layer without the target's hyper-connections",
    "hy_v4": "a layer without the target's hyper-connections",
}  # fmt: skip
