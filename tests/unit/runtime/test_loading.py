"""Loading on the native runtime: whose passes run there, what is reported of the others, and that
texts are the plain ones."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.cli import doctor
from outrider.errors import CapabilityError
from outrider.instructions import of_this_cpu
from outrider.runtime import building, library
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama, word_tokenizer
from tests.unit.runtime.families import make

PROMPTS = ["the cat sat on the mat, the cat", "one"]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = byte_tokenizer()
    return save_checkpoint(tmp_path / "model", tiny_llama(len(tokenizer), sharpness=4.0), tokenizer)


def texts(llm: LLM) -> list[str]:
    return [out.text for out in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "ngram", "recycling", "lookahead"])
def test_texts_are_the_plain_ones(
    model: Path, drafter: str, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches drafts of any shape whose verdict depends on the pass they are in. fp32, so that no
    logits are equal."""
    plain = texts(LLM(model, drafter="none", dtype="float32", threads=1, runtime="eager"))
    monkeypatch.setattr(library, "find", lambda cache: library_path)
    llm = LLM(model, drafter=drafter, dtype="float32", threads=1)
    assert llm.config["runtime"] == "native"
    assert llm.config["exact"] is True
    assert texts(llm) == plain


@pytest.mark.slow
def test_a_model_that_cannot_be_lowered_runs_plainly_and_says_so(
    tmp_path: Path, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "find", lambda cache: library_path)
    folder = save_checkpoint(tmp_path / "model", make("bert"), word_tokenizer(97))
    llm = LLM(folder, drafter="none", dtype="float32", threads=1)
    assert llm.config["runtime"] == "eager"
    assert any("runs eagerly, which is slower" in note for note in llm.notes)
    with pytest.raises(
        CapabilityError, match=r"does not run on runtime 'native': .* Use --runtime eager"
    ):
        LLM(folder, drafter="none", dtype="float32", threads=1, runtime="native")


def test_what_takes_long_at_the_first_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches minutes of silence on a busy machine, which look like a process that hangs."""
    monkeypatch.setattr(library, "compiler", lambda: "g++")
    monkeypatch.setattr(library, "of_this_cpu", lambda: "avx2")
    monkeypatch.setattr(library, "build", lambda path, kind: path.touch())
    monkeypatch.setattr(library, "PREBUILT", tmp_path / "none")
    for _ in range(2):
        assert library.find(tmp_path).exists()
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "compiling the native runtime"
    ]


def test_starting_together_builds_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a build for each worker of a server that starts from a checkout: minutes of
    compiling, several at once."""
    built: list[Path] = []

    def build_slowly(path: Path, kind: str) -> None:
        built.append(path)
        time.sleep(0.2)  # the others come meanwhile
        path.touch()

    monkeypatch.setattr(library, "compiler", lambda: "g++")
    monkeypatch.setattr(library, "of_this_cpu", lambda: "avx2")
    monkeypatch.setattr(library, "build", build_slowly)
    monkeypatch.setattr(library, "PREBUILT", tmp_path / "none")
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(library.find, [tmp_path / "cache"] * 4))
    assert [*found] == built == [tmp_path / "cache" / building.file_name("avx2")]


@pytest.mark.slow
def test_no_library_and_no_compiler(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation without the library must run, and doctor must say what is missing."""
    monkeypatch.setattr(building, "compiler", lambda: None)
    monkeypatch.setattr(library, "compiler", lambda: None)
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    assert "install g++" in (library.why_missing() or "")
    with pytest.raises(CapabilityError, match="compiler"):
        library.find(tmp_path / "cache")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    llm = LLM(model, drafter="none", dtype="float32", threads=1)
    assert any("no C++ compiler" in note for note in llm.notes)
    assert texts(llm)


DAMAGE = {  # what is done to a library's bytes, and what is said
    "cut": (lambda content: content[:40], "the native library cannot be loaded"),
    "another processor": (
        lambda content: content[:18] + b"\xf3\x00" + content[20:],  # RISC-V
        "the native library cannot be loaded",
    ),
    "a newer system": (lambda content: content.replace(b"GLIBC_2.", b"GLIBC_9."), "GLIBC_9"),
    "other functions": (
        lambda content: content.replace(b"outrider_noise", b"outrider_voice"),
        "outrider_noise",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_library_in_the_package_that_cannot_be_loaded(
    what: str, library_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor` names it, with what to do, and models get the slow path."""
    change, said = DAMAGE[what]
    (tmp_path / library_path.name).write_bytes(change(library_path.read_bytes()))
    kind = library_path.name.split("-")[1]
    monkeypatch.setattr(library, "of_this_cpu", lambda: kind)
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    runtime = doctor.examine()["runtime"]
    assert (runtime["name"], runtime["library"]) == ("eager", None)
    assert said in runtime["why_not_native"]
    assert "Install outrider again, or from its sources" in runtime["why_not_native"]
    assert "\n" not in runtime["why_not_native"]


@pytest.mark.slow
def test_a_model_on_a_library_that_cannot_be_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = of_this_cpu() or "avx2"
    monkeypatch.setattr(library, "of_this_cpu", lambda: kind)
    (tmp_path / building.file_name(kind)).write_bytes(b"no library")
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    llm = LLM(model, drafter="none", dtype="bfloat16", threads=1)
    assert llm.config["runtime"] == "eager"
    (note,) = [note for note in llm.notes if "runs eagerly" in note]
    assert "the native library cannot be loaded" in note
    assert texts(llm)


def test_a_wheel_of_another_processor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed by force, or copied from another machine."""
    monkeypatch.setattr(library, "of_this_cpu", lambda: "avx2")
    monkeypatch.setattr(library, "compiler", lambda: None)
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    (tmp_path / building.file_name("neon", "darwin")).touch()
    said = rf"another processor, system or version \({building.file_name('neon', 'darwin')}\)"
    with pytest.raises(CapabilityError, match=said):
        library.find(tmp_path / "cache")
    assert re.search(said, doctor.examine()["runtime"]["why_not_native"])


def test_a_processor_without_a_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel on an older processor."""
    monkeypatch.setattr(library, "of_this_cpu", lambda: None)
    runtime = doctor.examine()["runtime"]
    assert (runtime["name"], runtime["instructions"]) == ("eager", None)
    assert "CPUs with AVX2" in runtime["why_not_native"]


def test_the_library_in_use_is_named(library_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "of_this_cpu", lambda: library_path.name.split("-")[1])
    monkeypatch.setattr(library, "PREBUILT", library_path.parent)
    runtime = doctor.examine()["runtime"]
    assert runtime["library"] == str(library_path)
    assert runtime["library_made_by"].startswith(("GCC", "Clang", "Apple"))


@pytest.mark.parametrize(("runtime", "device"), [("graphs", "cpu")])
def test_a_runtime_of_another_device_is_refused(model: Path, runtime: str, device: str) -> None:
    """`--runtime graphs` must not silently mean another one."""
    with pytest.raises(
        CapabilityError,
        match=f"runtime '{runtime}' runs on a CUDA device, and the device here is {device}",
    ):
        LLM(model, drafter="none", device=device, runtime=runtime)
