"""What replicas of one model are compared by."""

from __future__ import annotations

import shutil
from pathlib import Path

from outrider.remote.target.facts import weights_hash
from tests.gguf_files import write_model
from tests.helpers import tiny_llama


def test_gguf_files_are_compared_by_their_content(tmp_path: Path) -> None:
    """A file's path says nothing: machines keep models in folders of their own, and another file may lie under the same path."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    first = write_model(here / "m.gguf", tiny_llama(300, seed=0), "llama")
    copy = shutil.copy(first, there / "m.gguf")
    found = weights_hash(str(first), None)
    assert weights_hash(str(copy), None) == found
    write_model(there / "m.gguf", tiny_llama(300, seed=1), "llama")
    assert weights_hash(str(copy), None) != found
