"""Which tokens end a text: whatever generation_config, config and tokenizer name, wherever it is
asked."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.grammar import Grammars, regex
from outrider.lab.replay.texts import read_log
from outrider.lab.workload.types import Workload, WorkloadRequest
from outrider.models.loading.generation_config import eos_token_ids
from outrider.models.tokens.alignment import TokenizerPair
from outrider.models.tokens.token_text import end_of_turn
from tests.helpers import EOS, byte_tokenizer, save_checkpoint, tiny_llama
from tests.subword import byte_level_bpe

TURN = 200  # the end of a turn, which generation_config names


def named(**ids: Any) -> Any:
    """A module, or a tokenizer, that names these ids."""
    return SimpleNamespace(
        **{name: SimpleNamespace(eos_token_id=value) for name, value in ids.items()}
    )


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        (5, 7, 2, {5, 2}),
        ([5, 6], None, 2, {5, 6, 2}),
        (None, 7, 2, {7, 2}),
        (None, [7, 8], None, {7, 8}),
        (5, 7, 5, {5}),
        (None, None, 2, {2}),
        (None, None, None, set()),
        ([5, -1, 300], -1, 99, {5, 99}),
        (0, 7, None, {0}),
        (-1, 7, 2, {7, 2}),
    ],
)
def test_the_ends_are_vllms(
    generation: Any, config: Any, tokenizer: Any, expected: set[int]
) -> None:
    """generation_config's, config's where that has none, and always the tokenizer's; ids that are
    no tokens are nobody's."""
    module = named(generation_config=generation, config=config)
    assert eos_token_ids(module, SimpleNamespace(eos_token_id=tokenizer), 100) == expected
    assert eos_token_ids(module, None, 100) <= expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tune in which generation_config names the end of a turn, and the tokenizer the end of
    a document."""
    path = save_checkpoint(
        tmp_path_factory.mktemp("chatml"), tiny_llama(257, sharpness=3.0), byte_tokenizer()
    )
    file = path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": TURN}))
    return path


@pytest.mark.parametrize("drafter", ["none", "ngram", "universal"])
@pytest.mark.parametrize("end", [EOS, TURN])
def test_each_of_them_ends_an_answer(folder: Path, drafter: str, end: int) -> None:
    """And is held back by min_tokens, ignored where ends are ignored, and no stop reason."""
    llm = LLM(folder, drafter=drafter, draft=folder if drafter == "universal" else None, threads=1)
    eager: dict[str, Any] = {"logit_bias": {end: 60.0}, "max_tokens": 6}
    asked = [
        SamplingParams(**eager),
        SamplingParams(**eager, min_tokens=3),
        SamplingParams(**eager, ignore_eos=True),
    ]
    first, later, never = llm.generate([[5, 6, 7]] * 3, asked)
    assert (first.token_ids, first.text, first.finish_reason, first.stop_reason) == (
        [end],
        "",
        "stop",
        None,
    )
    assert [token in (EOS, TURN) for token in later.token_ids] == [False] * 3 + [True]
    assert never.token_ids == [end] * 6


def test_a_grammar_may_end_with_each_of_them(folder: Path) -> None:
    ends = LLM(folder, drafter="none", threads=1)._built.target.eos_token_ids
    mask = Grammars(byte_tokenizer(), 257, ends).constraint(regex("a?")).allowed([[]])[0]
    assert [bool(mask[token]) for token in (EOS, TURN)] == [True, True]


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def chatml(template: str | None = CHATML) -> Any:
    """A fine-tune's tokenizer: its eos_token ends documents, its template ends turns with another
    token."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (None, "<|end|>"),
        ("{% for m in messages %}{{ m.content }} <|end|>{% endfor %}", "<|end|>"),
        ("{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}", "<|end|>"),
        ("{{ raise_exception('no') }}", "<|end|>"),
        ("nothing", "<|end|>"),
    ],
)
def test_the_end_of_a_turn_is_the_templates(template: str | None, end: str) -> None:
    tokenizer = chatml(template)
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids(end)


def test_recorded_answers_end_as_the_model_ends_them() -> None:
    """Those of conversations with the template's token. Catches a draft trained on, or replayed
    with, an end that never comes."""
    tokenizer = chatml()
    asked = ({"role": "user", "content": "hi"},)
    requests = (
        WorkloadRequest("a", messages=asked, answer="ho"),
        WorkloadRequest("b", prompt="hi", answer="ho"),
    )
    log = read_log(Workload("log", requests), tokenizer)
    plain = read_log(Workload("log", requests), tokenizer, chat_template=False)
    ends = [tokenizer.convert_tokens_to_ids("<|im_end|>"), EOS]
    assert [text.answer[-1] for text in log.texts] == ends
    assert [text.answer[-1] for text in plain.texts] == [EOS, EOS]


def test_the_drafts_end_of_a_turn_is_the_targets() -> None:
    """Of two tokenizers that name it otherwise: <|im_end|> here, the eos_token there."""
    target = chatml()
    draft = byte_level_bpe(300, end="<eos>")
    pair = TokenizerPair(target, draft, len(target), len(draft))
    assert pair.to_target[draft.eos_token_id] == target.convert_tokens_to_ids("<|im_end|>")
