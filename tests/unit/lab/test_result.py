"""The envelope of results: written whole, read back as its own class, damage named."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from pydantic import ValidationError

from outrider.errors import ConfigError
from outrider.lab import result as results
from outrider.lab.result import Interval, Result, read_result
from tests.unit.report.results import certificate


class ProbeResult(Result):
    """A kind of its own."""

    kind: Literal["probe"] = "probe"
    speedup: Interval
    answer: float | None = None


@pytest.fixture(autouse=True)
def probe_kind() -> Iterator[None]:
    """`read_result` finds the class as it finds a verb's."""
    results.KINDS["probe"] = f"{__name__}:ProbeResult"
    yield
    del results.KINDS["probe"]


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> ProbeResult:
    monkeypatch.setattr(results, "import_module", lambda name: __import__("sys").modules[__name__])
    return ProbeResult(speedup=Interval(value=2.0, low=1.5, high=2.5), notes=["a note"])


def test_what_is_written_is_read(one: ProbeResult, tmp_path: Path) -> None:
    one.write(tmp_path / "deep" / "r.json")
    found = read_result(tmp_path / "deep" / "r.json")
    assert isinstance(found, ProbeResult)
    assert found == one
    assert {"python", "torch", "outrider"} <= set(found.versions)


def test_nothing_else_is_left_in_the_folder(one: ProbeResult, tmp_path: Path) -> None:
    one.write(tmp_path / "r.json")
    one.write(tmp_path / "r.json")
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_the_machine_is_described_without_names_and_paths(one: ProbeResult, tmp_path: Path) -> None:
    one.write(tmp_path / "r.json")
    text = (tmp_path / "r.json").read_text()
    assert str(Path.home()) not in text
    assert __import__("socket").gethostname() not in json.loads(text)["machine"].values()


def test_infinity_is_read_again(one: ProbeResult, tmp_path: Path) -> None:
    """JSON has no infinities; intervals of a single prompt do."""
    one.model_copy(update={"answer": math.inf}).write(tmp_path / "r.json")
    found = read_result(tmp_path / "r.json")
    assert isinstance(found, ProbeResult)
    assert found.answer == math.inf


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "prob"}, "unknown kind 'prob'. Did you mean 'probe'"),
        ({"kind": []}, "unknown kind"),
        ({"schema_version": 1}, "schema version 1"),
        (
            {"speedup": {"value": 1, "low": "x", "high": 2}},
            r"damaged: speedup.low: .* \(1 problem in all\)$",
        ),
        (
            {"answer": "x", "extra": 1},
            r"has the field 'extra', which this outrider does not know: .* outrider that wrote it",
        ),
    ],
)
def test_what_is_wrong_is_named(
    one: ProbeResult, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    path = tmp_path / "r.json"
    one.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=words):
        read_result(path)


def test_fields_that_changed_have_another_version(tmp_path: Path) -> None:
    """Catches a certificate of before the change that is called damaged."""
    path = tmp_path / "r.json"
    certificate().write(path)
    assert read_result(path) == certificate().model_copy(
        update={"created": read_result(path).created}
    )
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"schema_version": 2, "exact_distribution": {}})
    )
    with pytest.raises(
        ConfigError,
        match="schema version 2; this outrider reads version 4: render it with the outrider that",
    ):
        read_result(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON.*--out FILE.json"),
        ("[1]", "is no result.*--out FILE.json"),
        ('{"a": 1}', "is no result"),
    ],
)
def test_files_that_are_no_results(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_result(tmp_path / "r.json")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_result(tmp_path / "r.json")


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError):
        Interval(value=1, low=0, high=2, width=2)  # type: ignore[call-arg]


def test_a_folder_that_cannot_be_written(one: ProbeResult, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        one.write(tmp_path / "file" / "r.json")


def test_every_kind_that_is_there_says_its_own_name() -> None:
    """A table entry that points at another class would read files as something else."""
    for kind, path in results.KINDS.items():
        if kind == "probe":
            continue
        module, name = path.split(":")
        try:
            found = __import__("importlib").import_module(module)
        except ModuleNotFoundError:
            continue  # not written yet
        assert getattr(found, name).model_fields["kind"].default == kind


def test_a_pipe_is_written_to_and_stays_one(one: ProbeResult, tmp_path: Path) -> None:
    """Catches a result that takes the place of /dev/null, for all who run as root."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        one.write(pipe)
        assert json.loads(os.read(reader, 1 << 16))["kind"] == "probe"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
