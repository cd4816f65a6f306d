"""Names of model families stand in `models/families/` and nowhere else in the package: what one
family needs is one file.

Looked at are string constants and identifiers, not prose. A name is a model type of transformers or
an architecture of llama.cpp.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import MODEL_ARCH_NAMES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

PACKAGE = Path(__file__).resolve().parent.parent / "outrider"
FAMILIES = PACKAGE / "models" / "families"
OTHER_WORDS = {  # names of families that are words of other things, too
    # English, keys, programs
    "align", "arctic", "beam", "bit", "clip", "ctrl", "encoder-decoder", "git", "opt", "rag", "sam",
    "mamba", "mamba2",  # kinds of layers, and transformers' functions for them, in many families
    # the encoder that error messages give as an example; a program and the name of its files
    "bert", "llama", "llama.cpp",
}  # fmt: skip
EXCEPTIONS = {  # modules, or folders, and why they name families
    "models/gguf/architectures.py": "the one table of GGUF architectures",
    "models/gguf/computed.py": "functions that rows of that table name",
    "models/gguf/config.py": "kinds of draft heads in GGUF files",
    "models/gguf/tokenizer.py": "llama.cpp's names of pre-tokenizers",
    "serve/tools/": "vLLM's names of parsers of tool calls",
    "serve/api/reasoning_formats.py": "vLLM's names of parsers of thoughts",
    "models/heads/block.py": "the layers of DFlash heads are transformers' of this family",
    "models/heads/block_files.py": "model types that published folders of block heads state",
    "models/heads/eagle_files.py": "model types that published folders of EAGLE heads state",
}


def names() -> set[str]:
    """Lower-case names of families, as they are and as words of an identifier."""
    given = {*CONFIG_MAPPING_NAMES, *MODEL_ARCH_NAMES.values()}
    return {name.lower() for name in given} - OTHER_WORDS


def texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of string constants that are no docstrings, and of identifiers."""
    tree = ast.parse(source)
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(node.body[0] if node.body else None, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def words(text: str) -> Iterator[str]:
    """Words of a text as they are written, and the parts of those that are put together: `_falcon`,
    `FalconAttention`."""
    yield from re.findall(r"[\w.-]+", text)
    yield from re.findall(
        r"[A-Za-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text.replace("_", " "))
    )


def named(source: str) -> list[str]:
    """'line: word' of each family that a module names."""
    known = names()
    return [
        f"{line}: {word}"
        for line, text in texts(source)
        for word in words(text)
        if word.lower() in known
    ]


def is_excepted(module: str) -> bool:
    return module.startswith(("models/families/", *EXCEPTIONS))


def test_no_other_module_names_a_family() -> None:
    found = {
        module: hits
        for path in sorted(PACKAGE.rglob("*.py"))
        if not is_excepted(module := path.relative_to(PACKAGE).as_posix())
        and (hits := named(path.read_text(encoding="utf-8")))
    }
    assert not found, (
        "move what is special to outrider/models/families/<family>.py, or do without it"
    )


@pytest.mark.parametrize("exception", EXCEPTIONS)
def test_exceptions_are_needed(exception: str) -> None:
    path = PACKAGE / exception
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert any(named(file.read_text(encoding="utf-8")) for file in files), (
        f"{exception} names no family: take it out"
    )


def test_a_file_of_families_is_named_after_one() -> None:
    known = {name.replace("-", "_") for name in names() | OTHER_WORDS}
    stems = {path.stem for path in FAMILIES.glob("*.py")} - {"__init__"}
    assert not {stem for stem in stems if not any(name.startswith(stem) for name in known)}
    table = (FAMILIES / "__init__.py").read_text(encoding="utf-8")
    assert all(re.search(rf"\b{stem}\b", table) for stem in stems), "a file that nothing asks"


def test_names_are_found() -> None:
    """Catches a search that sees no classes of transformers, no identifiers and no keys."""
    source = 'KINDS = {"FalconAttention": 1}\ndef _gemma2(x):\n    return x == "glm4_moe"\n'
    assert {hit.split(": ")[1] for hit in named(source)} >= {"Falcon", "gemma2", "glm4_moe"}
    assert not named('"""Falcon runs."""\nx = "a bit of llama.cpp"  # gemma\n')
