"""What vLLM would not read of a head, or read otherwise, one line each. Empty: nothing known (read in vLLM 0.32)."""

from __future__ import annotations

from torch import nn

from outrider.models.heads.block import BlockHead
from outrider.models.heads.block_config import BlockConfig
from outrider.models.heads.eagle import EagleConfig, EagleHead


def obstacles(head: nn.Module) -> list[str]:
    """The obstacles of any head."""
    if isinstance(head, EagleHead):
        return _of_eagle(head.config)
    if isinstance(head, BlockHead):
        return _of_block(head.config)
    return []


def _of_eagle(config: EagleConfig) -> list[str]:
    found = []
    if config.fc_bias:
        found.append("its fc layer has a bias, which vLLM does not read")
    if config.qk_norm and config.kind == "eagle":
        found.append("its layer norms queries and keys, which vLLM's EAGLE has no place for")
    if config.logit_scale != 1.0 and config.kind == "eagle":
        found.append(f"its logits are scaled by {config.logit_scale}, which vLLM's EAGLE ignores")
    if config.own_output and config.kind == "eagle":
        found.append("it has an output layer of its own, where vLLM's EAGLE uses the target's")
    if len(config.signals) != len(set(config.signals)):
        found.append(f"it reads one hidden state twice: {list(config.signals)}")
    return found


def _of_block(config: BlockConfig) -> list[str]:
    found = []
    is_dspark = bool(config.markov_rank) or config.confidence
    if config.sample_from_anchor and not is_dspark:
        found.append("its anchor's slot guesses, too, where vLLM's DFlash has only the masks guess (sample_from_anchor=false)")
    if config.markov_gated or config.markov_recurrent:
        kind = "gated" if config.markov_gated else "recurrent"
        found.append(f"its Markov head is {kind}; vLLM knows only 'vanilla'")
    if not config.qk_norm:
        found.append("its layers do not norm queries and keys, which vLLM always does")
    scaled = {
        "embeddings": config.embedding_scale != 1.0, "logits": config.logit_scale != 1.0, "capped logits": bool(config.softcap),
    }  # fmt: skip
    found += [f"it has scaled {what}, which vLLM ignores" for what, there in scaled.items() if there]
    return found
