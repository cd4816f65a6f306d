"""The runner: configurations that take turns on the same models do not disturb one another; traces
measure what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.build import Options
from outrider.configuration import Configuration, parse_configurations
from outrider.errors import CapabilityError, ConfigError
from outrider.lab.runner import Runner, Trace
from outrider.llm import LLM
from outrider.sampling.params import SamplingParams
from tests.helpers import disturbed, save_checkpoint, tiny_llama, word_tokenizer
from tests.unit.lab.bench.fakes import trace_of

WORDS = 24
PROMPT = [3, 5, 7]
GREEDY = SamplingParams(max_tokens=24)
MANY = parse_configurations(
    [
        "none, draft-model k=4, draft-model k=6 tree=2x2, ngram, suffix, draft-model k=auto, quantised bits=8"
    ]
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_llama(WORDS, sharpness=4.0)
    save_checkpoint(folder / "target", target, word_tokenizer(WORDS))
    save_checkpoint(folder / "draft", disturbed(target, 0.3), word_tokenizer(WORDS))
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module")
def runner(folders: tuple[Path, Path]) -> Runner:
    """Models for everybody, loaded once."""
    return Runner(options(folders), MANY)


def options(folders: tuple[Path, Path], *, draft: bool = True, lossy: bool = False) -> Options:
    named = str(folders[1]) if draft else None
    return Options(str(folders[0]), draft=named, lossy=lossy, dtype="float32", threads=1)


@pytest.mark.slow
def test_all_configurations_share_models_and_say_the_same(runner: Runner) -> None:
    """In turn, twice over: whatever one leaves behind in a cache would change another's greedy
    text."""
    contenders = [runner.open(one) for one in MANY]
    texts = [
        one.run([PROMPT], GREEDY)[0].completion.token_ids for _ in range(2) for one in contenders
    ]
    assert all(text == texts[0] for text in texts)
    assert len(texts[0]) == 24
    assert all(one.built.target is runner.models.target for one in contenders)


def test_a_contender_is_what_llm_would_be(runner: Runner, folders: tuple[Path, Path]) -> None:
    one = Configuration.parse("draft-model k=4 verifier=token")
    llm = LLM(
        folders[0], draft=folders[1], dtype="float32", threads=1, max_num_seqs=1, **one.as_dict()
    )
    contender = runner.open(one)
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5)
    (trace,) = contender.run([PROMPT], params)
    (expected,) = llm.generate([PROMPT], params)
    assert trace.completion.token_ids == expected.token_ids
    assert contender.config == llm.config


def test_results_stand_in_the_order_given_whatever_the_batch(runner: Runner) -> None:
    """Rows that end at different times, more prompts than rows."""
    contender = runner.open(Configuration.parse("draft-model k=3"))
    prompts = [[word] for word in (3, 9, 5, 7, 2)]
    params = [
        SamplingParams(max_tokens=3 + 5 * (number % 3), ignore_eos=True) for number in range(5)
    ]
    found = contender.run(prompts, params, batch_size=2)
    assert [trace.completion.prompt_token_ids for trace in found] == prompts
    assert [len(trace.completion.token_ids) for trace in found] == [3, 8, 13, 3, 8]
    assert max(step.rows for trace in found for step in trace.steps) == 2
    assert found[0].ttft_s <= found[2].ttft_s  # who waited
    assert {trace.began_s for trace in found} == {found[0].began_s}


def test_who_keeps_learning(runner: Runner) -> None:
    learning = {one.label: runner.open(one).keeps_learning for one in MANY}
    assert [label for label, learns in learning.items() if learns] == [
        "suffix",
        "draft-model k=auto",
    ]


def test_open_is_a_fresh_start(runner: Runner) -> None:
    """What a suffix drafter has seen makes it draft more the second time; a newly opened one knows
    nothing of it."""
    one = Configuration.parse("suffix")
    first = runner.open(one)
    drafted = [first.run([PROMPT], GREEDY)[0].stats.accepted for _ in range(2)]
    assert drafted[1] > drafted[0]
    assert runner.open(one).run([PROMPT], GREEDY)[0].stats.accepted == drafted[0]


@pytest.mark.parametrize(
    ("text", "draft", "lossy", "words"),
    [
        (
            "draft-model, ngram, draft-model k=2",
            False,
            False,
            r"need a draft model: draft-model, draft-model; give --draft",
        ),
        ("ngram, suffix", True, False, "none of these configurations uses a draft model"),
        ("ngran", False, False, "Did you mean 'ngram'"),
        ("ngram verifier=typical", False, False, "Allow it with --lossy"),
        ("ngram", False, True, "are lossless"),
        ("ngram verifier=typicall", False, True, "Did you mean 'typical'"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_read(
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    draft: bool,
    lossy: bool,
    words: str,
) -> None:
    monkeypatch.setattr(
        "outrider.lab.runner.load_models", lambda *arguments: pytest.fail("a model was read")
    )
    with pytest.raises(ConfigError, match=words):
        Runner(options(folders, draft=draft, lossy=lossy), parse_configurations([text]))


def test_lossy_and_lossless_ones_stand_side_by_side(folders: tuple[Path, Path]) -> None:
    """Plain decoding is the baseline of a lossy verifier, and stays lossless."""
    plain, lossy = parse_configurations(["none, ngram verifier=typical"])
    runner = Runner(options(folders, draft=False, lossy=True), [plain, lossy])
    assert [runner.open(one).config["lossless"] for one in (plain, lossy)] == [True, False]


def test_a_drafter_that_cannot_be_built_fails_alone(runner: Runner) -> None:
    with pytest.raises((CapabilityError, ConfigError), match="exit_layer"):
        runner.open(Configuration.parse("early-exit exit_layer=7"))
    assert runner.open(MANY[1]).run([PROMPT], GREEDY)


# ---------------------------------------------------------------- traces


def test_seconds_to_counts_from_the_first_steps_end() -> None:
    trace = trace_of([3, 2, 4], [0.5, 0.1, 0.2])
    assert trace.ttft_s == pytest.approx(0.5)
    assert [trace.seconds_to(n) for n in (1, 3, 4, 5, 6, 9)] == pytest.approx(
        [0, 0, 0.05, 0.1, 0.15, 0.3]
    )
    assert trace.decode_tokens() == 6


def test_beyond_the_end_the_whole_run_counts() -> None:
    assert trace_of([1, 1], [0.5, 0.1]).seconds_to(50) == pytest.approx(0.1)
    assert trace_of([4], [0.5]).seconds_to(2) == 0


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.data())
def test_seconds_to_grows_evenly_within_steps(takes: list[int], data: st.DataObject) -> None:
    """Monotone, and additive over cuts: nothing is paid twice, nothing is forgotten."""
    gaps = data.draw(st.lists(st.floats(0.001, 1), min_size=len(takes), max_size=len(takes)))
    trace: Trace = trace_of(takes, gaps)
    total = sum(takes)
    curve = [trace.seconds_to(n) for n in range(total + 1)]
    assert curve == sorted(curve)
    assert curve[-1] == pytest.approx(sum(gaps[1:]))
    begins = takes[0]
    for taken, gap in zip(takes[1:], gaps[1:], strict=True):
        assert curve[begins + taken] - curve[begins] == pytest.approx(gap)
        assert curve[begins + 1] - curve[begins] == pytest.approx(gap / taken)
        begins += taken
