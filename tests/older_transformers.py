"""Differences of the oldest transformers that is supported, 5.17, from today's: tests of those
skip there and say why.

Such a model still runs there, eagerly or on transformers' own cache, unless transformers itself
fails.
"""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

IS_OLDER = Version(transformers.__version__) < Version("5.23")
OTHERWISE = {  # families that no test's tiny model can be made of there, or that are not lowered
    "aria_text": "its experts are put together by index_copy_, which is not lowered",
    "cohere_compass_text": "its rotary embeddings fail for these parameters",
    "cohere_compass": "its rotary embeddings fail for these parameters",
    "diffusion_gemma": "a random one cannot be made",
    "granite4_vision": "its logits are divided by what its config lacks",
    "longcat_flash": "its router picks other experts by rounding in bfloat16",
    "gemma3n_text": "tokens behind the table of a layer's own embeddings fail",
}


def skip_unless_lowered(family: str) -> None:
    """Skip the test where the installed transformers does not have this family, or in a way that is
    not lowered."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    _skip(OTHERWISE.get(family))


def skip_older(reason: str) -> pytest.MarkDecorator:
    """A mark for tests of what only newer versions do."""
    return pytest.mark.skipif(IS_OLDER, reason=f"transformers {transformers.__version__}: {reason}")


def _skip(reason: str | None) -> None:
    if IS_OLDER and reason is not None:
        pytest.skip(f"transformers {transformers.__version__}: {reason}")
