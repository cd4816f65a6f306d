"""`outrider generate`: streaming, marking, JSON, prompts from everywhere, Ctrl-C."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.options import ModelOptions
from outrider.errors import NumericalError

TEXT = "Paris is the capital.\n"
KEYS = [
    "text", "token_ids", "finish_reason", "stop_reason", "lossless", "prompt_share", "verifier", "stats", "control", "config",
    "versions", "notes",
]  # fmt: skip
STATS = [
    "steps", "emitted", "drafted", "tested", "accepted", "tau", "alpha", "draft_utilisation",
    "accepted_per_position", "experts_per_pass", "parts", "first_tokens", "ttft_s", "decode_s", "tpot_s", "decode_tokens_per_s",
    "tokens_per_s", "time_s",
]  # fmt: skip
EVERY_OPTION = (
    "--drafter 'draft-model max_ngram=3 tree=t' --draft d --num-draft-tokens 3 "
    "--verifier token --dtype float32 --quantise 4 --device cpu "
    "--threads 1 --runtime eager --max-model-len 99 --revision r --trust-remote-code --max-tokens 9 "
    "--temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 0.2 "
    "--frequency-penalty 0.3 --seed 5 --stop A --stop B"
)


def test_streams_text_to_stdout_and_stats_to_stderr(cli: Callable[..., Any], fake: Any) -> None:
    result = cli("generate", "demo", "Where?", "--no-chat-template")
    assert (result.code, result.out) == (0, TEXT)
    assert "5 tokens" in result.err
    assert "accepted 3 of" in result.err
    assert fake.prompts == ["Where?"]


def test_a_seeded_answer_says_by_what_it_was_verified(cli: Callable[..., Any], fake: Any) -> None:
    assert (
        "seed 5, verifier gumbel"
        in cli("generate", "demo", "x", "--temperature", "1", "--seed", "5").err
    )
    for options in (("--temperature", "1"), ("--seed", "5")):
        assert "verifier" not in cli("generate", "demo", "x", *options).err


def test_the_form_of_an_answer(cli: Callable[..., Any], fake: Any, tmp_path: Path) -> None:
    """Each way to ask for one; what is wrong is reported by the option's name before a model is
    loaded."""
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    (tmp_path / "yes.gbnf").write_text('root ::= "yes"')
    for form, kind in (
        (f"--json-schema={tmp_path}/schema.json", "json"),
        ("--regex=[0-9]+", "regex"),
        ("--choice=a", "choice"),
        (f"--grammar={tmp_path}/yes.gbnf", "grammar"),
    ):
        assert cli("generate", "demo", "x", form).code == 0
        assert fake.params[-1].structured_outputs.kind == kind
    loaded = len(fake.asked)
    (tmp_path / "bad.json").write_text('{"properties": {"a": {"uniqueItems": true}}}')
    for forms, message in (
        (["--regex=(a"], "--regex is not usable"),
        (["--regex=a", "--choice=b"], "--regex and --choice: an answer has one"),
        ([f"--json-schema={tmp_path}/bad.json"], "--json-schema.properties.a: "),
        ([f"--grammar={tmp_path}/none"], f"--grammar {tmp_path}/none cannot be read: No such file"),
    ):
        result = cli("generate", "demo", "x", *forms)
        assert result.code == 2
        assert message in result.err
    assert len(fake.asked) == loaded


def test_no_stream_prints_the_same_text(cli: Callable[..., Any], fake: Any) -> None:
    assert cli("generate", "demo", "Where?", "--no-stream").out == TEXT


def test_show_drafts_marks_accepted_runs_without_colour(cli: Callable[..., Any], fake: Any) -> None:
    """One pair of marks a step, the legend beside it, and the text unchanged once they are taken
    out."""
    result = cli("generate", "demo", "Where?", "--show-drafts")
    assert result.out == "‹Paris› is‹ the capital›.\n"
    assert "‹drafted and accepted›" in result.err


def test_json_is_one_object_with_the_promised_keys(cli: Callable[..., Any], fake: Any) -> None:
    result = cli("generate", "demo", "Where?", "--json", "--temperature", "0.7")
    found = json.loads(result.out)
    assert result.out.count("\n") == 1
    assert list(found) == KEYS
    assert list(found["stats"]) == STATS
    assert list(found["stats"]["time_s"]) == ["draft", "target", "verify", "other"]
    assert (found["text"], found["finish_reason"], found["token_ids"]) == (
        TEXT,
        "stop",
        [0, 1, 2, 3, 4],
    )
    assert found["config"]["sampling"]["seed"] == 7, (
        "the seed that was drawn, so that the run can be repeated"
    )
    assert found["stats"]["tau"] == pytest.approx(5 / 3)
    assert found["stats"]["first_tokens"] == 2
    assert found["stats"]["decode_tokens_per_s"] == pytest.approx(3 / 0.5)
    assert found["stats"]["tpot_s"] == pytest.approx(0.5 / 3)


def test_json_with_logprobs_and_origins(cli: Callable[..., Any], fake: Any) -> None:
    """Minus infinity is no JSON."""
    result = cli("generate", "demo", "Where?", "--json", "--logprobs", "2", "--show-drafts")
    found = json.loads(result.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["logprobs"][0] == {"0": -0.5, "1": None}
    assert found["origins"] == ["accepted", "correction", "accepted", "accepted", "bonus"]


def test_options_reach_the_library(cli: Callable[..., Any], fake: Any) -> None:
    """An option that is accepted and ignored is a lie."""
    assert cli("generate", "demo", "x", *shlex.split(EVERY_OPTION)).code == 0
    target, options = fake.asked[0]
    assert target == "demo"
    assert options == ModelOptions(
        drafter="draft-model max_ngram=3 tree=t",
        draft="d",
        num_draft_tokens="3",
        verifier="token",
        dtype="float32",
        quantise=4,
        device="cpu",
        threads=1,
        runtime="eager",
        max_model_len=99,
        revision="r",
        trust_remote_code=True,
    )
    named = {name: value for name, value in vars(options).items() if name != "settings"}
    settings = {"max_ngram": "3", "tree": "t"}
    expected = named | {
        "drafter": "draft-model",
        "max_num_seqs": 1,
        "drafter_options": settings,
        "verifier_options": {},
    }
    assert options.llm_arguments() == expected
    given = fake.params[0]
    assert (given.max_tokens, given.temperature, given.top_k, given.top_p, given.min_p) == (
        9,
        0.5,
        4,
        0.9,
        0.1,
    )
    assert (given.repetition_penalty, given.presence_penalty, given.frequency_penalty) == (
        1.1,
        0.2,
        0.3,
    )
    assert (given.seed, given.stop) == (5, ["A", "B"])


@pytest.mark.parametrize(
    ("options", "drafter"),
    [
        ("", "prediction"),
        ("--drafter 'prediction near=4'", "prediction near=4"),
        ("--draft d", "composite parts=draft-model+prediction mode=best"),
        ("--drafter 'composite parts=ngram+prediction'", "composite parts=ngram+prediction"),
    ],
)
def test_a_prediction_is_drafted_from(
    cli: Callable[..., Any], fake: Any, tmp_path: Path, options: str, drafter: str
) -> None:
    """Its text as it is, and a drafter that looks at it."""
    file = tmp_path / "expected.txt"
    file.write_bytes("Paris, of course: é\r\n\n".encode())
    result = cli("generate", "demo", "Where?", "--prediction", str(file), *shlex.split(options))
    assert (result.code, result.out) == (0, TEXT)
    assert fake.predictions == ["Paris, of course: é\r\n\n"]
    assert fake.asked[0][1].drafter == drafter


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        ("--drafter ngram", b"x", "'ngram' does not look at a prediction"),
        (
            "--drafter 'composite parts=ngram+suffix'",
            b"x",
            "'composite' does not look at a prediction",
        ),
        ("--drafter prediction --draft d", b"x", "uses no draft model"),
        ("", b"\xff", "not UTF-8 text (byte 0)"),
        ("", None, "expected.txt' cannot be read"),
    ],
)
def test_predictions_that_cannot_be_used_are_refused_before_a_model_is_read(
    cli: Callable[..., Any],
    fake: Any,
    tmp_path: Path,
    options: str,
    content: bytes | None,
    message: str,
) -> None:
    file = tmp_path / "expected.txt"
    if content is not None:
        file.write_bytes(content)
    result = cli("generate", "demo", "Where?", "--prediction", str(file), *shlex.split(options))
    assert result.code == 2
    assert message in result.err
    assert fake.asked == []


def test_without_a_prediction_nothing_is_predicted(cli: Callable[..., Any], fake: Any) -> None:
    cli("generate", "demo", "Where?")
    assert fake.predictions == [None]
    assert fake.asked[0][1].drafter == "auto"


def test_prompt_from_standard_input(cli: Callable[..., Any], fake: Any) -> None:
    """`echo` adds a newline; the model must not see it. A second one is the user's own."""
    cli("generate", "demo", "--no-chat-template", stdin="Where?\n")
    cli("generate", "demo", "-", "--no-chat-template", stdin="Where?\n\n")
    assert fake.prompts == ["Where?", "Where?\n"]


def test_a_prompt_in_another_encoding(cli: Callable[..., Any], fake: Any) -> None:
    """What a shell hands over of `outrider generate demo $'M\\xfcnchen'`."""
    result = cli("generate", "demo", "M\udcfcnchen")
    assert (result.code, fake.asked) == (2, [])
    assert (
        result.err == "error: the prompt is not UTF-8 text: letter 2 is half of a surrogate pair\n"
    )


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe"])
def test_unusable_standard_input(cli: Callable[..., Any], fake: Any, content: bytes) -> None:
    result = cli("generate", "demo", stdin=content)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert fake.asked == []


@pytest.mark.parametrize(
    ("has_one", "flags", "wrapped"),
    [
        (True, [], True),
        (True, ["--no-chat-template"], False),
        (True, ["--chat-template"], True),
        (False, [], False),
        (False, ["--no-chat-template"], False),
    ],
)
def test_the_chat_template_is_the_default_where_there_is_one(
    cli: Callable[..., Any], fake: Any, has_one: bool, flags: list[str], wrapped: bool
) -> None:
    """Token ids from the template go to the model instead of the text, and the JSON says so."""
    fake.has_chat_template = has_one
    assert (
        json.loads(cli("generate", "demo", "x", "--json", *flags).out)["config"]["chat_template"]
        is wrapped
    )
    assert isinstance(fake.prompts[0], list) is wrapped


def test_a_template_that_is_not_there(cli: Callable[..., Any], fake: Any) -> None:
    fake.has_chat_template = False
    result = cli("generate", "demo", "x", "--chat-template")
    assert result.code == 2
    assert "no chat template" in result.err


def test_ctrl_c_keeps_what_was_produced(cli: Callable[..., Any], fake: Any) -> None:
    """The text so far, a finished line, the stats, exit code 130; the stream closed between two
    steps."""
    fake.on_step = lambda number: os.kill(os.getpid(), signal.SIGINT) if number == 1 else None
    before = signal.getsignal(signal.SIGINT)
    result = cli("generate", "demo", "x")
    assert (result.code, result.out) == (130, "Paris is the capital\n")
    assert "stopped by you" in result.err
    assert fake.closed
    assert signal.getsignal(signal.SIGINT) is before, "the terminal's own Ctrl-C must work again"


def test_ctrl_c_with_json(cli: Callable[..., Any], fake: Any) -> None:
    fake.on_step = lambda number: os.kill(os.getpid(), signal.SIGINT) if number == 0 else None
    result = cli("generate", "demo", "x", "--json")
    assert result.code == 130
    assert json.loads(result.out)["finish_reason"] == "abort"


def test_a_second_ctrl_c_does_not_wait(cli: Callable[..., Any], fake: Any) -> None:
    """A step that hangs must not hold the user."""

    def twice(number: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    fake.on_step = twice
    result = cli("generate", "demo", "x")
    assert result.code == 130
    assert "Traceback" not in result.err


def test_failure_in_the_middle_ends_the_line_first(cli: Callable[..., Any], fake: Any) -> None:
    """NaN logits at step 2: what was printed stays readable, then one error line, exit code 1."""

    def fail(number: int) -> None:
        if number == 1:
            raise NumericalError("generation stopped after 1 steps: NaN")

    fake.on_step = fail
    result = cli("generate", "demo", "x")
    assert (result.code, result.out) == (1, "Paris is\n")
    assert result.err == "error: generation stopped after 1 steps: NaN\n"


def test_a_reader_that_leaves(cli: Callable[..., Any], fake: Any) -> None:
    """`outrider generate ... | head -1`: no traceback."""

    def leave(number: int) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    fake.on_step = leave
    result = cli("generate", "demo", "x")
    assert result.code == 1
    assert result.err == ""
