"""A whole tuning with everything that was trained for a target: tiny models, real passes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.build import Options
from outrider.cli.app import run
from outrider.errors import ConfigError
from outrider.lab.bench.notes import RunNote
from outrider.lab.bench.stages import Rounds
from outrider.lab.tune.drafts import read_drafts
from outrider.lab.tune.run import choose_space, gather_prompts, run_tune
from outrider.lab.tune.space import TuneRequest
from outrider.lab.tune.tune_result import TuneResult
from outrider.lab.workload.types import Workload, WorkloadRequest
from outrider.report.markdown import to_markdown
from outrider.report.render import render
from tests.heads import ACCEPTANCE, HEADS
from tests.helpers import byte_tokenizer, disturbed, save_checkpoint, tiny_llama

PROMPTS = Workload(
    "tests",
    tuple(WorkloadRequest(str(number), "abc " * (number + 2), task="code") for number in range(4)),
)
TRAINED = ("eagle3", "medusa", "block", "acceptance")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tuned")
    target = tiny_llama(257, sharpness=4.0, num_hidden_layers=4)
    save_checkpoint(root / "target", target, byte_tokenizer())
    save_checkpoint(root / "draft", disturbed(target, 0.1), byte_tokenizer())
    for kind, write in {**HEADS, **ACCEPTANCE}.items():
        write(target, root / kind)
    return root


def options(root: Path) -> Options:
    return Options(str(root / "target"), dtype="float32", runtime="eager", threads=1)


def tuned(
    root: Path, tmp_path: Path, *names: str, drafters: tuple[str, ...] = (), **changes: Any
) -> TuneResult:
    wishes: dict[str, Any] = {
        "sampling": SamplingParams(max_tokens=16, ignore_eos=True),
        "prompts": 4,
        "load_sizes": (),
        "finalists": 1,
        **changes,
    }
    request = TuneRequest(
        drafters=frozenset(drafters), drafts=tuple(str(root / name) for name in names), **wishes
    )
    result = run_tune(options(root), request, PROMPTS, tmp_path / "journal")
    return result


@pytest.mark.slow
def test_everything_that_was_trained_competes(root: Path, tmp_path: Path) -> None:
    result = tuned(root, tmp_path, "draft", *TRAINED, drafters=("draft-model", *TRAINED[:3]))
    families = {one.family: one.failure for one in result.families}
    for kind in TRAINED[:3]:
        assert f"{kind} head={root / kind}" in families
    assert f"draft-model stop=acceptance acceptance_head={root / 'acceptance'}" in families
    assert not any(families.values()), "all of them ran"
    assert {one.family for one in result.forecasts} == set(families), "everything was forecast"
    assert all(one.identical == one.texts for one in result.confirmed), (
        "greedy texts are plain decoding's"
    )
    assert [one.kind for one in result.tried.heads] == list(TRAINED)
    assert result.tried.draft == str(root / "draft")
    assert TuneResult.model_validate_json(result.model_dump_json()) == result


@pytest.mark.slow
def test_a_head_s_settings_are_loaded_again(root: Path) -> None:
    """A settings file names the head's folder."""
    asked = TuneRequest(SamplingParams(), drafters=frozenset({"eagle3"}))
    family, *_ = choose_space(
        options(root), asked, read_drafts(options(root), [str(root / "eagle3")])
    )
    settings = family.member(3).options(draft=None)
    assert settings["drafter_options"] == {"head": str(root / "eagle3")}
    llm = LLM(str(root / "target"), dtype="float32", runtime="eager", threads=1, **settings)
    assert llm.generate(["abc abc"], SamplingParams(max_tokens=4))[0].token_ids


@pytest.mark.slow
def test_a_window_is_tried_where_texts_are_longer_than_the_draft_s(
    root: Path, tmp_path: Path
) -> None:
    """Catches a window that nobody tries, and one tried where it hides nothing."""
    short = disturbed(tiny_llama(257, sharpness=4.0, num_hidden_layers=4), 0.1)
    short.config.max_position_embeddings = 24
    save_checkpoint(tmp_path / "draft", short, byte_tokenizer())
    named = {"drafters": ("draft-model",), "trees": False}
    result = tuned(root, tmp_path, str(tmp_path / "draft"), **named)
    assert "draft-model window=auto" in {one.family for one in result.families if not one.failure}
    result = tuned(root, tmp_path / "again", "draft", **named)
    assert "draft-model window=auto" not in {one.family for one in result.families}


def test_exits_and_bits_of_the_target_itself(root: Path) -> None:
    """Of as many layers as its config says."""
    asked = TuneRequest(SamplingParams(), drafters=frozenset({"early-exit", "quantised"}))
    space = choose_space(options(root), asked, read_drafts(options(root)))
    exits = [f"early-exit exit_layer={layer}" for layer in (1, 2, 3)]
    assert [family.label for family in space] == [*exits, "quantised bits=8", "quantised bits=4"]


@pytest.mark.parametrize(
    ("names", "drafters", "message"),
    [
        (("eagle3",), ("ngram",), "--drafters does not name: leave one out"),
        (
            ("draft", "acceptance"),
            ("ngram",),
            "is for drafter 'draft-model', which --drafters does not name",
        ),
        ((), ("medusa",), "cannot tune medusa here; there are: early-exit, lookahead, ngram"),
        ((), ("universal",), "cannot tune universal here"),
        ((), ("none",), "cannot tune none here"),
    ],
)
def test_wishes_that_cannot_be(
    root: Path, names: tuple[str, ...], drafters: tuple[str, ...], message: str
) -> None:
    """A head that is named and not used would be an option that is ignored."""
    request = TuneRequest(SamplingParams(), drafters=frozenset(drafters))
    with pytest.raises(ConfigError, match=message):
        choose_space(
            options(root), request, read_drafts(options(root), [str(root / name) for name in names])
        )


def test_a_prompt_that_is_skipped_leaves_its_place_to_the_next_one() -> None:
    """As in `bench`: four prompts of a task are four that can be run."""
    texts = ["abc", "x" * 100, "abcd", "abcde", "bcd", "cde"]
    workload = Workload(
        "tests", tuple(WorkloadRequest(str(n), text, task="code") for n, text in enumerate(texts))
    )
    runner: Any = SimpleNamespace(tokenizer=byte_tokenizer(), context=64, answer=None)
    asked = TuneRequest(SamplingParams(max_tokens=16), prompts=4)
    prompts, notes = gather_prompts(workload, runner, asked, on_bad="skip", chat_template=False)
    assert [prompt.request.id for prompt in prompts] == ["0", "2", "3", "4"]
    assert notes


@pytest.mark.parametrize("sizes", [{"batch_size": 5000}, {"load_sizes": (4, 5000)}])
def test_a_load_that_no_decoder_takes_is_refused_before_the_work(sizes: dict[str, Any]) -> None:
    """Other loads are tried last."""
    with pytest.raises(ConfigError, match="batch sizes must be at most 4096, got 5000"):
        TuneRequest(SamplingParams(), **sizes)


def test_two_models_on_the_command_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last of several --draft must not win without a word."""
    assert (
        run(["tune", str(root / "target"), "--draft", str(root / "draft"), "--draft", "org/other"])
        == 2
    )
    error = capsys.readouterr().err
    assert "one draft model at a time" in error
    assert len(error.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("groups", [0, 1])
def test_ctrl_c_after_the_forecasts_leaves_what_is_known(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    """Forecasts, and what was confirmed, as a result that says that it was cut short; the same
    command can go on."""
    done: list[int] = []
    measured = Rounds._measured

    def counted(*arguments: Any) -> tuple[list[RunNote], dict[int, str]]:
        if len(done) == groups:
            raise KeyboardInterrupt
        done.append(1)
        return measured(*arguments)

    monkeypatch.setattr(Rounds, "_measured", counted)
    request = TuneRequest(
        SamplingParams(max_tokens=16, ignore_eos=True),
        prompts=4,
        load_sizes=(),
        finalists=1,
        drafters=frozenset({"ngram"}),
        most_share=1.0,
    )
    result = run_tune(options(root), request, PROMPTS, tmp_path / "journal")
    assert result.interrupted
    assert result.forecasts
    assert bool(result.confirmed) == bool(groups)
    assert "this is what was known" in to_markdown(render(result))
    assert (tmp_path / "journal").exists()
