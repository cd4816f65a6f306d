"""Training text, tokenizer and chat template: one format everywhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast

from tools.demo_models import corpus, tokenizer

QUESTION = "Tom has 12 pens. He buys 7 more. How many pens does Tom have?"
SOLUTION = "Tom has 12+7=19 pens.\n#### 19"


@pytest.fixture(scope="module")
def small_tokenizer() -> PreTrainedTokenizerFast:
    texts = list(corpus.generated_documents(1, 300))
    return tokenizer.as_transformers(tokenizer.train_tokenizer(texts, vocabulary_size=600))


@pytest.fixture(scope="module")
def sources(small_tokenizer: PreTrainedTokenizerFast) -> dict[str, corpus.TokenSource]:
    texts = {name: list(corpus.generated_documents(1, 40)) for name in corpus.SOURCES}
    return {
        name: corpus.tokenize(some, small_tokenizer.backend_tokenizer)
        for name, some in texts.items()
    }


def test_special_tokens_and_single_digits(small_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = small_tokenizer("47 + 1234")["input_ids"]
    assert ids[0] == corpus.BOS_ID == small_tokenizer.bos_token_id
    assert small_tokenizer.eos_token_id == corpus.EOS_ID
    assert [t for t in small_tokenizer.convert_ids_to_tokens(ids) if t.isdigit()] == list("471234")


@pytest.mark.parametrize(
    "text", ["a\tb\n  c", "naïve €3 — 漢字", "def f(x):\n    return x ** 2\n", " 12  34 "]
)
def test_round_trip(small_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = small_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert small_tokenizer.decode(ids) == text


def test_prompt_tokens_are_a_prefix_of_the_document(
    small_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Catches a tokenizer that merges across `Answer:`; the model would never have seen its own
    prompts."""
    prompt = small_tokenizer(f"Question: {QUESTION}\nAnswer:")["input_ids"]
    whole = small_tokenizer(corpus.document(QUESTION, SOLUTION), add_special_tokens=False)[
        "input_ids"
    ]
    assert whole[: len(prompt)] == prompt
    assert whole[-1] == corpus.EOS_ID


def test_chat_template_is_the_training_format(small_tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [
        {"role": "user", "content": f" {QUESTION} "},
        {"role": "assistant", "content": SOLUTION},
    ]
    assert small_tokenizer.apply_chat_template(turns, tokenize=False) == corpus.document(
        QUESTION, SOLUTION
    )
    prompt = small_tokenizer.apply_chat_template(
        turns[:1], tokenize=False, add_generation_prompt=True
    )
    assert prompt == f"<s>Question: {QUESTION}\nAnswer:"
    again = small_tokenizer.apply_chat_template(
        [*turns, turns[0]], tokenize=False, add_generation_prompt=True
    )
    assert again == corpus.document(QUESTION, SOLUTION) + prompt


def test_chat_template_puts_a_system_message_into_the_first_question_only(
    small_tokenizer: PreTrainedTokenizerFast,
) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "#### 2"},
        {"role": "user", "content": "2+2?"},
    ]
    text = small_tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<s>Question: Be brief.\n1+1?\nAnswer: #### 2</s><s>Question: 2+2?\nAnswer:"


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (["user", "user"], "alternate"),
        (["assistant"], "must follow a user"),
        (["user", "system"], "must come first"),
        (["tool"], "unknown role"),
        (["user", "assistant"], "last turn must be the user"),
    ],
)
def test_chat_template_refuses_by_name(
    small_tokenizer: PreTrainedTokenizerFast, roles: list[str], message: str
) -> None:
    turns = [{"role": role, "content": "x"} for role in roles]
    with pytest.raises(TemplateError, match=message):
        small_tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def test_gsm8k_is_rewritten_into_our_form() -> None:
    text = "Natalia sold 1,248/2 = <<1248/2=624>>624 clips in May - really.\n#### 624"
    assert corpus.compact_gsm8k(text) == "Natalia sold 1248/2=624 clips in May - really.\n#### 624"


def test_drills_are_right_and_have_no_negative_results() -> None:
    for text in corpus.drill_documents(100):
        for line in text.removeprefix(corpus.BOS).removesuffix(corpus.EOS).split("\n"):
            left, right = line.split("=")
            a, operator, b = re.fullmatch(r"(\d+)([-+*/])(\d+)", left).groups()
            a = int(a)
            b = int(b)
            assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[operator] == int(right) >= 0


@pytest.fixture(scope="module")
def marker(small_tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    ids = small_tokenizer.backend_tokenizer.encode(
        corpus.ANSWER_MARKER, add_special_tokens=False
    ).ids
    return np.asarray(ids, dtype=np.uint16)


def test_batches_depend_on_seed_and_step_only(
    sources: dict[str, corpus.TokenSource], marker: np.ndarray
) -> None:
    """Catches reader state: a resumed run must see the batches it would have seen."""
    first, again, next_step = (
        corpus.batch(sources, marker, seed=1, step=step, progress=0.3, rows=3, length=64)
        for step in (5, 5, 6)
    )
    assert first.tokens.shape == (3, 65)
    assert first.weights.shape == (3, 64)
    assert np.array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, next_step.tokens)
    assert (first.tokens[:, 0] == corpus.BOS_ID).all()


def test_questions_weigh_little_in_the_loss(
    sources: dict[str, corpus.TokenSource],
    marker: np.ndarray,
    small_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Catches a shifted mask: the first token of an answer is a label that counts, the colon before
    it is not."""
    drawn = corpus.batch(sources, marker, seed=1, step=0, progress=0.3, rows=1, length=96)
    labels = drawn.tokens[0, 1:]
    light = drawn.weights[0] == np.float32(corpus.PROMPT_WEIGHT)
    end = int(np.flatnonzero(~light)[0])
    assert small_tokenizer.decode(labels[:end]).endswith(corpus.ANSWER_MARKER)
    assert (
        drawn.weights[0, end : end + int(np.flatnonzero(labels[end:] == corpus.EOS_ID)[0])] == 1
    ).all()


def test_a_document_without_a_question_counts_whole(marker: np.ndarray) -> None:
    assert corpus.answer_start(np.arange(5, dtype=np.uint16) + 1000, marker) == 0
    assert corpus.answer_start(np.zeros(1, dtype=np.uint16), marker) == 0


def test_mix_is_a_distribution_at_every_time() -> None:
    for progress in (0.0, 0.2, corpus.MIX_RAMP, 1.0):
        assert sum(corpus.mix(progress).values()) == pytest.approx(1.0)


def test_held_out_documents_are_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "math").mkdir()
    rows = [json.dumps({"problem": f"What is {n}+1?", "solution": f"{n + 1}"}) for n in range(400)]
    (tmp_path / "math" / "problems.jsonl").write_text("\n".join(rows))
    train, kept = (
        set(corpus.source_documents("math", tmp_path, held_out=flag, num_generated=0))
        for flag in (False, True)
    )
    assert kept
    assert not train & kept
    assert len(train) + len(kept) == 400


def test_importing_the_package_is_light() -> None:
    """Catches torch creeping into `import outrider.demo`, which `outrider --help` may reach."""
    code = "import sys, outrider.demo; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
