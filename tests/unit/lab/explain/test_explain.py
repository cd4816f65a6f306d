"""The whole of it on small pairs: results that add up, can be read again, what is known after an
interruption, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.build import Options
from outrider.configuration import Configuration
from outrider.errors import CapabilityError, ConfigError
from outrider.lab.explain.explain import check, explain
from outrider.lab.explain.explain_result import ExplainResult
from outrider.lab.explain.regions import KINDS, SECTIONS
from outrider.lab.journal import Journal
from outrider.lab.result import read_result
from outrider.lab.runner import Contender, Runner, Trace
from outrider.lab.workload.prompts import PreparedPrompt
from outrider.lab.workload.types import WorkloadRequest
from outrider.sampling.params import SamplingParams
from tests.unit.lab.explain.pairs import PROMPTS, save_pair

GREEDY = SamplingParams(max_tokens=30)
WARM = SamplingParams(max_tokens=30, temperature=1.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("pair"), noise=0.12)


def prepared(tokens: list[int], name: str, max_tokens: int = 30) -> PreparedPrompt:
    return PreparedPrompt(WorkloadRequest(id=name), tokens, max_tokens)


def prompts_of(runner: Runner) -> list[PreparedPrompt]:
    return [prepared(tokens, f"q{number}") for number, tokens in enumerate(PROMPTS)]


def explained(
    pair: tuple[str, str], configuration: str, params: SamplingParams, **extra: Any
) -> ExplainResult:
    wanted = Configuration.parse(configuration)
    draft = pair[1] if wanted.parts().requirements.draft else None
    options = Options(pair[0], draft=draft, dtype="float32", threads=1)
    return explain(options, wanted, prompts_of, params, **extra)


@pytest.mark.parametrize(
    ("configuration", "params"),
    [
        ("draft-model k=4", GREEDY),
        ("draft-model k=4 verifier=token", WARM),
        ("draft-model k=6 tree=2x2", WARM),
        ("ngram k=4", WARM),
        ("universal k=3 method=reencode", GREEDY),
        ("composite k=6 parts=draft-model+suffix", GREEDY),
        ("composite k=6 parts=draft-model+suffix options=draft-model.tree=2x2", WARM),
        ("draft-model k=4 stop=entropy stop_below=0.6", GREEDY),
        ("draft-model k=auto:4", GREEDY),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_results_add_up(
    pair: tuple[str, str], tmp_path: Path, configuration: str, params: SamplingParams
) -> None:
    result = explained(pair, configuration, params)
    assert sum(row.tokens for row in result.causes) == pytest.approx(
        result.ideal - result.emitted, abs=1e-6
    )
    assert result.emitted == sum(len(text.places) for text in result.texts)
    assert result.tested == sum(row.tested for row in result.by_kind)
    assert (
        result.accepted
        == sum(row.kept for row in result.by_kind)
        == sum(row.kept for row in result.by_level)
    )
    assert sum(row.tokens for row in result.by_kind) == result.emitted
    assert result.tau.value == pytest.approx(result.emitted / result.steps)
    places = [place for text in result.texts for place in text.places]
    assert all(place.kind in KINDS and place.section in SECTIONS for place in places)
    if "composite" in configuration:
        assert set(result.by_part) == {"draft-model", "suffix"}
        assert sum(counts.drafted for counts in result.by_part.values()) == result.drafted
        assert sum(counts.accepted for counts in result.by_part.values()) == result.accepted
    else:
        assert result.by_part == {}
    assert result.has_draft_probs == ("draft-model" in configuration)
    path = tmp_path / "result.json"
    result.write(path)
    assert read_result(path) == result.model_validate_json(result.model_dump_json())


def test_a_result_stays_small(pair: tuple[str, str], tmp_path: Path) -> None:
    """700 bytes a token at most, so that 4000 tokens stay below 3 MB; and no more tokens are shown
    than asked for."""
    result = explained(pair, "draft-model k=4", WARM)
    path = tmp_path / "result.json"
    result.write(path)
    bare = result.model_copy(update={"texts": []})
    assert (path.stat().st_size - len(bare.model_dump_json(indent=1))) / result.emitted < 700
    few = explained(pair, "draft-model k=4", WARM, max_shown=31)
    assert len(few.texts) == 1
    assert few.emitted == result.emitted
    assert any("the first 1 of 3" in note for note in few.notes)


def test_seeds_differ_by_prompt_and_repeat_by_run(pair: tuple[str, str]) -> None:
    same = [prepared(PROMPTS[0], str(number)) for number in range(2)]
    texts = []
    for _ in range(2):
        options = Options(pair[0], draft=pair[1], dtype="float32", threads=1)
        result = explain(options, Configuration.parse("draft-model k=4"), lambda _: same, WARM)
        texts.append([[place.piece for place in text.places] for text in result.texts])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_an_interrupted_run_explains_what_was_finished(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = explained(pair, "draft-model k=4", WARM)
    run = Contender.run
    decoded: list[object] = []

    def counted(contender: Contender, *arguments: Any) -> list[Trace]:
        if len(decoded) == 2:
            raise KeyboardInterrupt
        decoded.append(arguments)
        return run(contender, *arguments)

    monkeypatch.setattr(Contender, "run", counted)
    known = explained(pair, "draft-model k=4", WARM)
    assert known.interrupted
    assert known.texts == whole.texts[:2], "what was finished before Ctrl-C is explained"
    assert "the run was stopped: 2 of 3 prompts were explained" in known.notes
    with pytest.raises(KeyboardInterrupt):
        explained(pair, "draft-model k=4", WARM)


@pytest.mark.parametrize("done", [1, 2])
@pytest.mark.parametrize(
    "configuration", ["draft-model k=4", "ngram-cache k=4", "draft-model k=auto:4"]
)
def test_a_resumed_run_explains_as_if_it_had_not_been_interrupted(
    pair: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    configuration: str,
    done: int,
) -> None:
    """Nothing finished is decoded again, except to teach a drafter that learns."""
    path = tmp_path / "j"
    run = Contender.run
    decoded: list[list[int]] = []

    def counted(contender: Contender, prompts: list[list[int]], params: Any) -> list[Trace]:
        if len(decoded) == stop_after:
            raise KeyboardInterrupt
        decoded.append(prompts[0])
        return run(contender, prompts, params)

    monkeypatch.setattr(Contender, "run", counted)
    stop_after = 99
    whole = explained(pair, configuration, WARM)
    decoded.clear()
    stop_after = done
    with Journal.open(path, {}, resume=False) as journal:
        assert explained(pair, configuration, WARM, journal=journal).interrupted
    decoded.clear()
    stop_after = 99
    with Journal.open(path, {}, resume=True) as journal:
        assert len(journal) == done
        resumed = explained(pair, configuration, WARM, journal=journal)
    learns = configuration != "draft-model k=4"
    assert decoded == [*(PROMPTS[:done] if learns else []), *PROMPTS[done:]]
    if "auto" in configuration:  # its lengths follow the clock
        assert [text.id for text in resumed.texts] == [text.id for text in whole.texts]
        return
    timed = {"created", "times", "tokens_per_s", "causes", "other_cpu", "advice"}
    assert resumed.model_dump(exclude=timed) == whole.model_dump(exclude=timed)
    assert [row.tokens for row in resumed.causes] == [row.tokens for row in whole.causes]


def test_refusals(pair: tuple[str, str]) -> None:
    """By name, and those that need no model before any is read."""
    for text, params, error, words in [
        ("none", GREEDY, ConfigError, "nothing to explain"),
        ("ngram verifier=typical", GREEDY, CapabilityError, "lossy"),
    ]:
        with pytest.raises(error, match=words):
            check(Configuration.parse(text), params, lossy="typical" in text)
    options = Options(pair[0], dtype="float32", threads=1)
    with pytest.raises(ConfigError, match="no prompt"):
        explain(options, Configuration.parse("ngram"), lambda _: [], GREEDY)


@pytest.mark.slow
def test_the_demo() -> None:
    """The embedded pair, as `outrider explain demo` runs it."""

    def asked(runner: Runner) -> list[PreparedPrompt]:
        text = "Question: A cake costs $2 and a cup costs $5. Olivia buys 6 cakes and 5 cups. How much is it?\nAnswer:"
        return [prepared(runner.tokenizer(text)["input_ids"], "cakes", 60)]

    options = Options("demo", threads=1)
    params = SamplingParams(max_tokens=60)
    result = explain(options, Configuration.parse("draft-model k=5"), asked, params)
    assert result.ideal > result.emitted
    assert {row.name for row in result.by_kind} >= {"number", "word", "punctuation"}
    assert (
        "".join(place.piece for place in result.texts[0].places)
        .strip()
        .startswith("The cakes cost")
    )
    assert result.advice
