"""Which set of instructions is chosen for which processor, and what a machine says of itself."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider import instructions, machine

ARM = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm asimddp
CPU implementer\t: 0x41
"""


@pytest.fixture
def on_arm(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretends to be a Linux machine with ARM processors of these capabilities."""

    def pretend(capabilities: int) -> None:
        library = SimpleNamespace(
            getauxval=lambda which: capabilities if which == instructions.AT_HWCAP else 0
        )
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library)

    return pretend


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        (1 << 10 | 1 << 20, "neon"),
        (1 << 20, None),  # without fp16
        (1 << 10, None),  # without byte products
    ],
)
def test_arm_needs_fp16_and_byte_products(
    on_arm: Callable[[int], None], capabilities: int, expected: str | None
) -> None:
    on_arm(capabilities)
    assert instructions.of_this_architecture() == ("neon",)
    assert instructions.of_this_cpu() == expected


@pytest.mark.parametrize(
    ("system", "processor", "expected"),
    [
        ("darwin", "arm64", ("neon",)),
        ("darwin", "x86_64", ()),
        ("win32", "AMD64", ("avx512", "avx2")),
        ("win32", "ARM64", ()),
        ("freebsd14", "amd64", ()),
    ],
)
def test_which_systems_have_libraries(
    system: str, processor: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS and Windows have no getauxval to ask; a system without libraries is asked nothing."""
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: processor)
    monkeypatch.delattr(ctypes, "CDLL")
    assert instructions.of_this_architecture() == expected
    if system != "win32":  # there torch is asked
        assert instructions.of_this_cpu() == next(iter(expected), None)


def test_an_arm_machine_says_what_its_processors_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: ARM)
    assert machine.cpu_flags() == ["asimddp"]
    assert not [one for one in machine.unavailable() if one["what"] == "fast bfloat16 on CPU"]
