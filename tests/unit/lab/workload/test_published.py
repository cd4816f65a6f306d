"""Benchmarks that model cards quote, from folders as their publishers leave them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.extras import MissingExtraError
from outrider.lab.workload.formats import PLACEHOLDER
from outrider.lab.workload.load import load_workload
from outrider.lab.workload.published import PUBLISHED, part_of_file

# the columns of SPEED-Bench's qualitative set
SPEED = [
    {
        "question_id": f"q{number}",
        "category": category,
        "sub_category": None,
        "turns": [f"first {number}", f"second {number}"],
        "source": "s",
        "src_id": "i",
        "difficulty": "easy",
        "multiturn": True,
    }
    for number, category in enumerate(["coding", "coding", "math", "math", "rag", "rag"])
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """JSON lines, or Parquet as pyarrow writes it, by the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["speed/qualitative/test.parquet", "qualitative.jsonl"])
def test_speed_bench_as_its_script_leaves_it(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, SPEED)
    requests = load_workload(f"speed-bench:{tmp_path}").requests
    assert [request.id for request in requests] == ["q0", "q2", "q4", "q1", "q3", "q5"], (
        "categories take turns, in the order of the file"
    )
    assert requests[0].messages == ({"role": "user", "content": "first 0"},)
    assert requests[0].later == ("second 0",)
    assert [request.task for request in requests[:3]] == ["coding", "math", "rag"]
    assert load_workload(f"speed-bench:{tmp_path}", limit=2).requests == requests[:2]
    assert load_workload(f"speed-bench:{tmp_path}:qualitative").requests == requests
    assert load_workload(f"speed-bench:{tmp_path / name}").requests == requests
    alone = load_workload(f"speed-bench:{tmp_path}", turns="first").requests
    assert not any(request.later for request in alone)


def test_several_configurations_are_not_mixed(tmp_path: Path) -> None:
    for part in ("qualitative", "throughput_1k"):
        write(tmp_path / f"{part}.jsonl", SPEED)
    with pytest.raises(ConfigError, match="has the parts qualitative, throughput_1k: name one"):
        load_workload(f"speed-bench:{tmp_path}")
    with pytest.raises(ConfigError, match=r"no part 'quantitative'. Did you mean 'qualitative'"):
        load_workload(f"speed-bench:{tmp_path}:quantitative")
    assert len(load_workload(f"speed-bench:{tmp_path}:throughput_1k").requests) == 6


def test_placeholders_are_refused_with_the_command_that_fetches_them(tmp_path: Path) -> None:
    rows = [*SPEED[:1], {**SPEED[1], "turns": [f"{PLACEHOLDER} (source: x)"]}]
    write(tmp_path / "qualitative.jsonl", rows)
    message = "line 2: the text of question q1 is a placeholder: .*python prepare_data.py"
    with pytest.raises(ConfigError, match=message):
        load_workload(f"speed-bench:{tmp_path}")


def test_nine_subsets_of_speculator_benchmarks(tmp_path: Path) -> None:
    for part in ("HumanEval", "qa", "tool_call"):
        write(tmp_path / f"{part}.jsonl", [{"prompt": f"{part} {number}"} for number in range(3)])
    requests = load_workload(f"speculator-benchmarks:{tmp_path}", limit=4).requests
    assert [request.task for request in requests] == ["HumanEval", "qa", "tool_call", "HumanEval"]
    assert requests[1].messages == ({"role": "user", "content": "qa 0"},), (
        "in the chat template, as GuideLLM asks it"
    )
    assert len(load_workload(f"speculator-benchmarks:{tmp_path}:qa").requests) == 3


@pytest.mark.parametrize(
    ("name", "row", "task"),
    [
        ("spec-al-gsm8k", {"question": "asked", "answer": "#### 3"}, "reasoning"),
        ("spec_al_math500", {"problem": "asked", "unique_id": "m"}, "reasoning"),
        ("spec-al-humaneval", {"prompt": "asked", "task_id": "HumanEval/0"}, "code"),
        ("spec-al-mbpp", {"text": "asked", "code": "x = 1"}, "code"),
        ("spec-al-mtbench", {"prompt": ["asked", "more"], "category": "writing"}, "chat"),
    ],
)
def test_sets_of_aiperf_are_asked_verbatim(
    tmp_path: Path, name: str, row: dict[str, Any], task: str
) -> None:
    folder = tmp_path / "main"
    for split in ("train", "test"):
        write(folder / f"{split}-00000-of-00001.parquet", [row] if split == "test" else [row, row])
    (request,) = load_workload(f"{name}:{tmp_path}").requests
    assert request.messages == ({"role": "user", "content": "asked"},)
    assert request.task == task
    assert request.later == (("more",) if name == "spec-al-mtbench" else ())


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for name, benchmark in PUBLISHED.items():
        with pytest.raises(ConfigError, match="needs the place of its files"):
            load_workload(name)
        with pytest.raises(ConfigError) as error:
            load_workload(f"{name}:{tmp_path}")
        assert benchmark.source in str(error.value)
        with pytest.raises(ConfigError, match="does not exist"):
            load_workload(f"{name}:{tmp_path / 'nowhere'}")
    file = write(tmp_path / "a.jsonl", SPEED)
    with pytest.raises(ConfigError, match="a part is of a folder"):
        load_workload(f"speed-bench:{file}:qualitative")
    with pytest.raises(ConfigError, match=r"unknown workload 'sped-bench'.*'speed-bench'"):
        load_workload("sped-bench")


def test_rows_of_another_benchmark_are_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": "x", "label": 1}])
    with pytest.raises(ConfigError, match="line 1: no field turns; it has text, label"):
        load_workload(f"speed-bench:{file}")


def test_a_path_may_have_a_colon(tmp_path: Path) -> None:
    folder = tmp_path / "a:b"
    write(folder / "qualitative.jsonl", SPEED)
    assert len(load_workload(f"speed-bench:{folder}").requests) == 6


@pytest.mark.parametrize("keep", [4, 100, -20])
def test_damaged_parquet(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "qualitative.parquet", SPEED)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"qualitative.parquet cannot be read: it is damaged"):
        load_workload(f"speed-bench:{path}")


def test_parquet_without_its_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test.parquet"
    path.write_bytes(b"PAR1 and more")
    monkeypatch.setattr("outrider.extras.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "pyarrow", raising=False)
    with pytest.raises(MissingExtraError, match=r"a Parquet file, needs pyarrow.*\.\[parquet\]"):
        load_workload(f"speed-bench:{path}")


def test_a_folder_of_many_files_is_no_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.lab.workload.published.MAX_FILES", 3)
    for number in range(4):
        write(tmp_path / f"{number}.jsonl", SPEED)
    with pytest.raises(ConfigError, match="more than 3 files"):
        load_workload(f"speed-bench:{tmp_path}")


def test_folders_far_below_are_not_searched(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "c" / "qualitative.jsonl", SPEED)
    assert len(load_workload(f"speed-bench:{tmp_path}").requests) == 6
    with pytest.raises(ConfigError, match=r"has no \.parquet"):
        load_workload(f"speed-bench:{write(tmp_path / 'x/a/b/c/d/q.jsonl', SPEED).parents[4]}")


def test_the_part_of_a_file() -> None:
    assert part_of_file(Path("speed/qualitative/test.parquet")) == "qualitative"
    assert part_of_file(Path("main/test-00000-of-00001.parquet")) == "main"
    assert part_of_file(Path("bench/tool_call.jsonl.gz")) == "tool_call"
