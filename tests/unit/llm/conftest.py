"""A small model in a folder, for tests of `LLM`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights over bytes, 64 tokens of context."""
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder, tiny_llama(257, max_position_embeddings=64), byte_tokenizer())
    return folder
