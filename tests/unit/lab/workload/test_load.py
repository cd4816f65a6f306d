"""Workloads by name, by file and mixed: which requests, in which order, under which ids, and what
is reported."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ConfigError
from outrider.lab.workload import builtin
from outrider.lab.workload.builtin import BUILTIN, EMBEDDED
from outrider.lab.workload.load import _with_own_ids, load_workload
from outrider.lab.workload.types import WorkloadRequest
from tools.agent_session import session


@pytest.fixture(autouse=True)
def _no_data_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def lines(path: Path, *entries: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in entries),
        encoding="utf-8",
    )
    return str(path)


def numbered(path: Path, count: int, **more: Any) -> str:
    return lines(path, *({"prompt": f"{path.stem}{n}", **more} for n in range(1, count + 1)))


def prompts(spec: str, **options: Any) -> list[str | None]:
    return [request.prompt for request in load_workload(spec, **options).requests]


# ---------------------------------------------------------------- choosing


def test_limit_takes_the_first(tmp_path: Path) -> None:
    spec = numbered(tmp_path / "a.jsonl", 5)
    assert prompts(spec, limit=2) == ["a1", "a2"]
    assert prompts(spec, limit=9) == prompts(spec) == ["a1", "a2", "a3", "a4", "a5"]


def test_limit_counts_requests_not_lines(tmp_path: Path) -> None:
    spec = lines(
        tmp_path / "a.jsonl", {"prompt": "1"}, "{bad", "", {"prompt": "2"}, "{bad", {"prompt": "3"}
    )
    workload = load_workload(spec, limit=2, on_bad="skip")
    assert [r.prompt for r in workload.requests] == ["1", "2"]
    assert [line.number for line in workload.skipped] == [2]  # line 5 was not read


# ---------------------------------------------------------------- bad lines


def test_refusal_names_the_first_five_and_the_count(tmp_path: Path) -> None:
    entries = [{"prompt": "ok"}, *("{" for _ in range(7)), {"prompt": "ok"}]
    spec = lines(tmp_path / "a.jsonl", *entries)
    with pytest.raises(ConfigError) as error:
        load_workload(spec)
    text = str(error.value)
    assert "7 bad lines and 2 good ones" in text
    assert [f"line {n}:" in text for n in range(1, 10)] == [False, *[True] * 5, False, False, False]
    assert "and 2 more.\nCorrect them, or" in text, "printed on one line, these are sentences"
    assert "--reading on_bad=skip" in text


def test_skipping_keeps_all_of_them(tmp_path: Path) -> None:
    spec = lines(tmp_path / "a.jsonl", {"prompt": "ok"}, *("{" for _ in range(7)), {"prompt": "ok"})
    workload = load_workload(spec, on_bad="skip")
    assert [line.number for line in workload.skipped] == [2, 3, 4, 5, 6, 7, 8]
    assert "7 bad lines skipped" in workload.notes[0]


def test_nothing_usable_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    spec = lines(tmp_path / "a.jsonl", {"text": "x"}, {"text": "y"})
    with pytest.raises(
        ConfigError, match=r'(?s)no usable line, but 2 bad lines.*\{"prompt": "..."\}'
    ):
        load_workload(spec, on_bad="skip")


# ---------------------------------------------------------------- ids


def test_doubled_ids_are_made_unique_and_it_is_reported(tmp_path: Path) -> None:
    ids = ["x", "x#2", "x", "x", None, "x#2"]
    spec = lines(tmp_path / "a.jsonl", *({"prompt": "p", "id": name} for name in ids))
    workload = load_workload(spec)
    found = [request.id for request in workload.requests]
    assert found[:2] == ["x", "x#2"]
    assert len(set(found)) == len(ids)
    assert found[4] == "a.jsonl:5"
    assert workload.notes[-1].startswith("3 requests have an id that came before")


@given(ids=st.lists(st.sampled_from(["x", "x#2", "x#2#2", "x#3", "y"]), max_size=12))
def test_ids_are_unique_whatever_they_were(ids: list[str]) -> None:
    """A renamed id may itself be taken, before or after."""
    found, renamed = _with_own_ids(WorkloadRequest(name, "p") for name in ids)
    assert len({request.id for request in found}) == len(ids)
    assert renamed == sum(a != b.id for a, b in zip(ids, found, strict=True))
    assert all(request.id.startswith(name) for name, request in zip(ids, found, strict=True))


# ---------------------------------------------------------------- mixes


def test_a_mix_takes_turns_and_keeps_tasks(tmp_path: Path) -> None:
    a = numbered(tmp_path / "a.jsonl", 4, task="law")
    b = numbered(tmp_path / "b.jsonl", 2, task="tax")
    c = numbered(tmp_path / "c.jsonl", 1)
    workload = load_workload(f"{a}+{b} + {c}")
    assert [r.prompt for r in workload.requests] == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]
    assert [r.task for r in workload.requests] == [
        "law",
        "tax",
        "other",
        "law",
        "tax",
        "law",
        "law",
    ]
    assert workload.name == f"{a}+{b} + {c}"
    assert prompts(f"{a}+{b}+{c}", limit=4) == ["a1", "b1", "c1", "a2"]


def test_notes_of_a_mix_count_what_is_used(tmp_path: Path) -> None:
    a = numbered(tmp_path / "a.jsonl", 9)
    b = numbered(tmp_path / "b.jsonl", 1)
    notes = load_workload(f"{a}+{b}", limit=5).notes
    assert notes == (f"{a} (4 prompts)", f"{b} (1 prompt)")


def test_bad_lines_of_a_mix_say_where(tmp_path: Path) -> None:
    a = numbered(tmp_path / "a.jsonl", 1)
    b = lines(tmp_path / "b.jsonl", {"prompt": "b"}, "{bad")
    (bad,) = load_workload(f"{a}+{b}", on_bad="skip").skipped
    assert bad.number == 2
    assert bad.reason.startswith(f"{b}: not JSON")


def test_a_file_with_a_plus_in_its_name_is_one_file(tmp_path: Path) -> None:
    assert prompts(numbered(tmp_path / "a+b.jsonl", 1)) == ["a+b1"]


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("gsm8", "Did you mean 'gsm8k'"),
        ("spec-bench:rga", "Did you mean 'rag'"),
        ("demo:x", "has no parts"),
        ("gsm8k:", "has no part ''"),
        ("folder/x.jsonl", "does not exist"),
        ("demo+demo", "twice"),
        ("demo++gsm8k", "empty part"),
        ("", "empty part"),
        ("~nobody-of-this-name/x.jsonl", "does not exist"),
        (".", "is a folder"),
        ("a\0b", "does not exist"),
        ("x" * 5000, "unknown workload"),
    ],
)
def test_wrong_names(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_workload(spec)


@pytest.mark.parametrize("options", [{"limit": 0}, {"limit": -1}])
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        load_workload("demo", **options)


def test_a_built_in_name_wins_over_a_file(tmp_path: Path) -> None:
    numbered(tmp_path / "demo", 1)
    assert len(load_workload("demo").requests) == 64
    assert prompts("./demo") == ["demo1"]


def test_all_turns_reach_the_file(tmp_path: Path) -> None:
    turns = [{"from": who, "value": who} for who in ("human", "gpt", "human", "gpt")]
    spec = lines(tmp_path / "s.json", {"conversations": turns}, {"id": "k", "conversations": turns})
    assert [r.id for r in load_workload(spec).requests] == ["s.json:1", "k"]
    assert [r.id for r in load_workload(spec, turns="all").requests] == [
        "s.json:1/1",
        "s.json:1/2",
        "k/1",
        "k/2",
    ]


# ---------------------------------------------------------------- built in: where the data is

PROBLEM = {"question": "q", "answer": "#### 1"}


def test_embedded_prompts_stand_in_and_a_note_says_so() -> None:
    workload = load_workload("gsm8k")
    assert len(workload.requests) == 12
    assert "no gsm8k/test.jsonl found, so a small embedded set stands in" in workload.notes[0]
    assert "$OUTRIDER_DATA" in workload.notes[0]


@pytest.mark.parametrize("file", ["gsm8k/test.jsonl", "gsm8k_test.jsonl"])
def test_data_is_found_by_option_environment_and_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    for folder in ("option", "named", "cache/data"):
        lines(tmp_path / folder / file, {**PROBLEM, "question": folder})
    asked = "Question: {}\nAnswer:".format
    assert prompts("gsm8k") == [asked("cache/data")]
    monkeypatch.setenv("OUTRIDER_DATA", str(tmp_path / "named"))
    assert prompts("gsm8k") == [asked("named")]
    workload = load_workload("gsm8k", data=tmp_path / "option")
    assert [r.prompt for r in workload.requests] == [asked("option")]
    assert workload.notes == (f"gsm8k: {file} (1 prompt)",)  # and not the folder: results travel
    assert workload.requests[0].id == "gsm8k:1"


def test_a_named_data_folder_must_have_the_data(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file for the workload 'gsm8k'.*gsm8k/test.jsonl"):
        load_workload("gsm8k", data=tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        load_workload("gsm8k", data=tmp_path / "nowhere")
    assert len(load_workload("demo", data=tmp_path).requests) == 64  # embedded by nature


def test_parts_are_known_by_their_category(tmp_path: Path) -> None:
    rows = [
        {"question_id": n, "category": c, "turns": [c]}
        for n, c in enumerate(["writing", "rag", "math_reasoning", "qa", "coding"])
    ]
    lines(
        tmp_path / "spec_bench" / "question.jsonl",
        *rows,
        {"category": "rag", "turns": []},
        {"turns": []},
    )

    def ids(part: str) -> list[str]:
        return [r.id for r in load_workload(part, data=tmp_path, on_bad="skip").requests]

    assert ids("spec-bench") == ["0", "1", "2", "3", "4"]
    assert ids("spec-bench:mt-bench") == ["0", "4"]
    assert ids("spec-bench:math_reasoning") == ids("spec-bench:math-reasoning") == ["2"]
    assert ids("spec-bench:coding") == ["4"]
    bad = load_workload("spec-bench:rag", data=tmp_path, on_bad="skip").skipped
    assert [line.number for line in bad] == [6, 7]  # an entry without category could be any part's
    assert [
        line.number for line in load_workload("spec-bench:qa", data=tmp_path, on_bad="skip").skipped
    ] == [7]


def test_math_by_subject_in_both_spellings(tmp_path: Path) -> None:
    lines(
        tmp_path / "math.jsonl",
        {"problem": "a", "solution": "\\boxed{1}", "type": "Counting & Probability"},
        {"problem": "b", "answer": "1", "solution": "", "subject": "Algebra"},
        {"problem": "c", "answer": "1", "solution": "", "subject": "Counting & Probability"},
    )
    assert [p and p[10] for p in prompts("math:counting-probability", data=tmp_path)] == ["a", "c"]
    with pytest.raises(ConfigError, match="no prompts for 'math:geometry'"):
        load_workload("math:geometry", data=tmp_path)


@pytest.mark.parametrize(
    "name", [*BUILTIN, *(f"{name}:{part}" for name, one in BUILTIN.items() for part in one.parts)]
)
def test_every_name_works_without_data(name: str) -> None:
    workload = load_workload(name)
    assert len(workload.requests) >= 12
    assert len({request.id for request in workload.requests}) == len(workload.requests)


@pytest.mark.parametrize(
    ("name", "count", "graded"),
    [
        ("gsm8k", 600, 600),
        ("gsm8k:train", 7473, 7473),
        ("math", 4000, 3183),
        ("humaneval", 100, 0),
        ("spec-bench", 298, 50),
        ("spec-bench:rag", 50, 0),
        ("spec-bench:mt-bench", 48, 0),
    ],
)
def test_real_files(shared: Path, name: str, count: int, graded: int) -> None:
    workload = load_workload(name, data=shared / "data")
    assert len(workload.requests) == count
    assert sum(request.reference is not None for request in workload.requests) == graded
    assert not workload.skipped


def test_files_work_by_path_as_well(shared: Path, tmp_path: Path) -> None:
    """What a benchmark is, is read from its content: a renamed copy is read alike."""
    copy = shutil.copy(shared / "data" / "humaneval" / "problems.jsonl", tmp_path / "some.data")
    named = load_workload("humaneval", data=shared / "data")
    assert load_workload(str(copy)).requests == named.requests


def test_table_and_folder_agree() -> None:
    """A set without its file, or a file that nobody reads."""
    sets = {
        kind
        for one in BUILTIN.values()
        for files in (one.prompts, *one.parts.values())
        for kind in files.embedded
    }
    assert sets == {path.stem for path in EMBEDDED.glob("*.jsonl")}
    assert set(builtin.KINDS) | {"demo", "agent"} == sets


def test_an_agent_s_session_grows_from_turn_to_turn() -> None:
    requests = load_workload("agent").requests
    assert [request.turn for request in requests] == list(range(1, 31))
    assert [request.id for request in requests[:2]] == ["agent/1", "agent/2"]
    for before, after in pairwise(requests):
        assert before.messages is not None
        assert after.messages is not None
        assert after.messages[: len(before.messages)] == before.messages
    assert (EMBEDDED / "agent.jsonl").read_text(encoding="utf-8") == session()


def test_the_page_tells_the_truth(tmp_path: Path) -> None:
    """The examples of docs/workloads.md are read, and the page names everything there is."""
    page = (Path(__file__).parents[4] / "docs" / "workloads.md").read_text(encoding="utf-8")
    examples = page.partition("```json\n")[2].partition("```")[0].splitlines()
    workload = load_workload(lines(tmp_path / "examples.jsonl", *examples))
    assert len(workload.requests) == len(examples) == 6
    assert [request.answer for request in workload.requests] == [
        None,
        None,
        "Hi!",
        None,
        "Hi!",
        "Hi!",
    ]
    assert all(f"`{name}`" in page for name in BUILTIN)
    assert all(one.home in page for one in BUILTIN.values())
