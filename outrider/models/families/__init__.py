"""What single model families need beyond the code that serves all of them: one file for each family, named after it.

General code asks the tables here.
"""

from __future__ import annotations

from outrider.models.families import deepseek, gemma, mimo, nemotron, qwen
from outrider.models.heads.mtp_layout import MtpLayout

# How tensors of MTP heads are called, in the order in which a checkpoint's names are looked at
MTP_LAYOUTS: dict[str, MtpLayout] = {layout.name: layout for layout in (qwen.MTP, nemotron.MTP, deepseek.MTP, mimo.MTP)}

# That of families whose GGUF files no layout names
MTP_USUAL: MtpLayout = deepseek.MTP

# By the beginning of `model_type`, what its MTP head has that is not read
MTP_NOT_READ: dict[str, str] = deepseek.MTP_NOT_READ

# Checkpoints of their own that draft on the target's keys and values
ASSISTANTS: gemma.Assistants = gemma.ASSISTANTS
