"""What is wrong with a GGUF file is reported in one line, whatever it is."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from outrider.errors import CapabilityError, CheckpointError, OutriderError
from outrider.models.gguf import header
from outrider.models.gguf.header import Count, long_list, read_gguf
from tests.gguf_files import Kind, add_tensor, finish


def a_file(path: Path, **metadata: str) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"t{number}" for number in range(5000)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 5000)
    for key, value in metadata.items():
        writer.add_string(key.replace("_", "."), value)
    add_tensor(writer, "a.weight", np.ones((4, 64)), Kind.Q8_0)
    add_tensor(writer, "b.weight", np.ones(3), Kind.F32)
    return finish(writer, path)


def test_a_header_says_where_everything_lies(tmp_path: Path) -> None:
    """The bytes of each tensor, and long lists only where they are asked for."""
    file = read_gguf(a_file(tmp_path / "m.gguf"))
    first, second = file.tensors
    assert (first.name, first.shape, first.kind) == ("a.weight", (4, 64), Kind.Q8_0)
    assert first.read().shape == (4, 68)
    assert second.read().view(np.float32).tolist() == [1, 1, 1]
    assert isinstance(file.metadata["tokenizer.ggml.tokens"], Count)
    assert long_list(file, "tokenizer.ggml.tokens")[4999] == "t4999"
    assert long_list(file, "tokenizer.ggml.scores")[4999] == 0.5
    with pytest.raises(CheckpointError, match="has no list tokenizer"):
        long_list(file, "tokenizer.ggml.merges")


def test_a_long_list_is_read_without_the_rest_of_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vocabularies have 100,000 words and more, and a first start asks for three such lists."""
    file = read_gguf(a_file(tmp_path / "m.gguf"))

    def read(self: header._HeaderReader) -> None:
        raise AssertionError("the metadata is read again")

    monkeypatch.setattr(header._HeaderReader, "metadata", read)
    assert long_list(file, "tokenizer.ggml.tokens")[:2] == ["t0", "t1"]
    assert long_list(file, "tokenizer.ggml.scores") == [0.5] * 5000


def test_a_file_cut_anywhere_is_damaged(tmp_path: Path) -> None:
    """Also in the middle of a number, a name, a list, a tensor: never another error, never a hang."""
    whole = a_file(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [
        0,
        1,
        3,
        5,
        9,
        23,
        24,
        25,
        40,
        100,
        20_000,
        70_000,
        len(whole) - 200,
        len(whole) - 30,
    ]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"is damaged: \d+ bytes|is no GGUF file"):
            read_gguf(cut)


def test_damage_within_is_reported(tmp_path: Path) -> None:
    """Any byte of the start of the header changed: still a file, or an error of ours, never another
    one and never a hang."""
    whole = bytearray(a_file(tmp_path / "m.gguf").read_bytes())
    broken = tmp_path / "broken.gguf"
    for index in range(4, 120):
        for value in (0, 0xFF):
            broken.write_bytes(whole[:index] + bytes([value]) + whole[index + 1 :])
            with contextlib.suppress(OutriderError):
                read_gguf(broken)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
        (b"PK\x03\x04 and more", "zip archive"),
        (b"<!DOCTYPE html>", "web page"),
        (struct.pack("<Q", 10) + b"{" * 40, "safetensors file under another name"),
        (b"some text that is no model", r"begins with b'some' instead of b'GGUF'"),
    ],
)
def test_what_is_no_gguf_is_named(tmp_path: Path, start: bytes, message: str) -> None:
    path = tmp_path / "renamed.gguf"
    path.write_bytes(start)
    with pytest.raises(CheckpointError, match=message):
        read_gguf(path)


def test_other_versions_and_byte_orders_are_refused(tmp_path: Path) -> None:
    whole = a_file(tmp_path / "m.gguf").read_bytes()
    for version, message in (
        (struct.pack(">I", 3), "big-endian"),
        (struct.pack("<I", 1), "GGUF version 1"),
        (b"\x09\0\0\0", "version 9"),
    ):
        path = tmp_path / "other.gguf"
        path.write_bytes(whole[:4] + version + whole[8:])
        with pytest.raises(CapabilityError, match=message):
            read_gguf(path)


def test_an_unknown_format_is_refused_by_its_tensor(tmp_path: Path) -> None:
    whole = a_file(tmp_path / "m.gguf").read_bytes()
    at = whole.index(b"a.weight") + len("a.weight") + 4 + 16
    (tmp_path / "new.gguf").write_bytes(whole[:at] + struct.pack("<I", 999) + whole[at + 4 :])
    with pytest.raises(
        CapabilityError,
        match=r"'a.weight' is stored as type 999, which the installed gguf package does not know",
    ):
        read_gguf(tmp_path / "new.gguf")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("adapter", "a LoRA adapter"),
        ("mmproj", "vision or audio part"),
        ("imatrix", "importance matrix"),
    ],
)
def test_files_that_hold_no_language_model_are_named(
    tmp_path: Path, kind: str, message: str
) -> None:
    with pytest.raises(CapabilityError, match=message):
        read_gguf(a_file(tmp_path / "m.gguf", general_type=kind))


def test_older_vision_parts_are_known_by_their_architecture(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "clip")
    add_tensor(writer, "v.weight", np.ones(3), Kind.F32)
    with pytest.raises(CapabilityError, match="vision or audio part"):
        read_gguf(finish(writer, tmp_path / "m.gguf"))


def test_a_vocabulary_alone_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="a vocabulary and no weights"):
        read_gguf(finish(GGUFWriter(tmp_path / "m.gguf", "llama"), tmp_path / "m.gguf"))


@pytest.mark.slow
def test_without_the_library_only_gguf_files_are_refused() -> None:
    """An installation without gguf: everything can be imported, and what needs it says so."""
    script = (
        "import sys; sys.modules['gguf'] = None\n"
        "import outrider.loader\nfrom outrider.models.gguf import library\n"
        "try:\n    library.GGUFReader\nexcept outrider.errors.CapabilityError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "pip install gguf" in done.stdout
