"""Our tokenizers of GGUF files against llama.cpp's own vocabularies: its texts with its ids, and
texts with special tokens.

`python tools/llama_vocabularies.py fetch` brings the vocabularies (continuous integration does);
OUTRIDER_LLAMA_VOCABULARIES names another folder. Without them the tests are skipped;
test_tokenizer.py has small vocabularies for the same rules.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import CapabilityError
from outrider.models.gguf import header
from outrider.models.gguf.tokenizer import gguf_tokenizer
from tools.llama_vocabularies import FOLDER, IDS, NOT_SERVED

VOCABULARIES = Path(os.environ.get("OUTRIDER_LLAMA_VOCABULARIES", FOLDER))
SEPARATOR = "\n__ggml_vocab_test__\n"  # between the texts of an .inp file
KNOWN = tuple(f"ggml-vocab-{name}.gguf" for name in (
    "baichuan", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3",
    "qwen2", "qwen35", "refact", "starcoder", "gemma-4",
))  # fmt: skip
WITHOUT_TEXTS = "ggml-vocab-baichuan.gguf"
# the bos token is the chat template's, as in the published tokenizer
TEMPLATE_BEGINS = "ggml-vocab-gemma-4.gguf"
pytestmark = [
    pytest.mark.slow,  # large vocabularies take seconds to build
    pytest.mark.skipif(
        not VOCABULARIES.is_dir(),
        reason=f"no {VOCABULARIES}: python tools/llama_vocabularies.py fetch",
    ),
]


def tokenizer_of(name: str) -> Any:
    path = VOCABULARIES / name
    # read_gguf refuses files without weights
    metadata, _ = header._read_once(path, path.stat().st_mtime_ns)
    return gguf_tokenizer(header.GgufFile((path,), metadata, ()))


@pytest.fixture(scope="module", params=KNOWN)
def known(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """A vocabulary's name and our tokenizer of it, built once for all of its tests."""
    return request.param, tokenizer_of(request.param)


def test_ids_are_those_of_llama_cpp(known: tuple[str, Any]) -> None:
    """llama.cpp's own test of the vocabulary: texts and the ids its authors took from the published
    tokenizers."""
    name, tokenizer = known
    if name == WITHOUT_TEXTS:
        pytest.skip("llama.cpp has no texts of it")
    texts = (
        (VOCABULARIES / f"{name}.inp")
        .read_bytes()
        .decode()
        .removesuffix(SEPARATOR)
        .split(SEPARATOR)
    )
    lines = (VOCABULARIES / f"{name}.out").read_text().splitlines()
    backend = tokenizer.backend_tokenizer
    assert len(texts) == len(lines) >= 46
    for text, line in zip(texts, lines, strict=True):
        expected = [int(number) for number in line.split()]
        assert backend.encode(text, add_special_tokens=False).ids == expected, repr(text)


def test_special_tokens_are_parsed_as_by_llama_cpp(known: tuple[str, Any]) -> None:
    """Special tokens at the beginning, in the middle and at the end, with and without the bos
    token."""
    name, tokenizer = known
    for case in json.loads(IDS.read_text())[name]:
        text = case["text"]
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == case["bare"], repr(text)
        framed = case["bare"] if name == TEMPLATE_BEGINS else case["framed"]
        assert tokenizer(text)["input_ids"] == framed, repr(text)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_a_vocabulary_without_a_known_rule_is_refused(name: str) -> None:
    with pytest.raises(
        CapabilityError, match=r"does not say by which|a tokenizer of kind '(bert|t5)'"
    ):
        tokenizer_of(name)


def test_every_vocabulary_of_llama_cpp_is_in_a_test() -> None:
    assert {path.name for path in VOCABULARIES.glob("*.gguf")} == {*KNOWN, *NOT_SERVED}
