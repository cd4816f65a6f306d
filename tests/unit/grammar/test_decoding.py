"""Whole answers under a grammar: they keep it, they end, and neither drafts nor neighbours show in
them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.build import Built, Options, build
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.programs import programs_serve
from outrider.grammar import Grammars, Spec, choice, json_schema, regex
from outrider.parts import choose_parts
from outrider.rows import Row, Rows
from outrider.sampling.params import SamplingParams
from outrider.verifiers import VERIFIERS
from tests.helpers import (
    EOS,
    byte_tokenizer,
    disturbed,
    make_row,
    run_to_end,
    save_checkpoint,
    tiny_llama,
)

TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, 257, [EOS])
SCHEMA = json_schema(
    {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 10, "maximum": 999},
            "b": {"enum": ["x", "xyz"]},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    whitespace="",
)
WORDS = choice(["yes", "no", "yesterday"])
LETTERS = regex("([ab]c)+d?")
GREEDY = SamplingParams(max_tokens=30)
SOFT = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=30)
# grammar, sampling, verifier: the rows of one batch
FORMS: list[tuple[Spec, SamplingParams, str | None]] = [
    (SCHEMA, GREEDY, None),
    (SCHEMA, SOFT, "gumbel"),
    (WORDS, SOFT, None),
    (LETTERS, GREEDY, None),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder: Path = tmp_path_factory.mktemp("models")
    target = tiny_llama(257, sharpness=3.0)
    save_checkpoint(folder / "target", target, TOKENIZER)
    save_checkpoint(folder / "draft", disturbed(target, 0.2), TOKENIZER)
    threads = torch.get_num_threads()
    yield build(
        Options(
            target=str(folder / "target"),
            drafter="draft-model",
            draft=str(folder / "draft"),
            dtype="float32",
            threads=1,
        )
    )
    torch.set_num_threads(threads)


def rows() -> list[Row]:
    """One row per form, and one that is free."""
    made = []
    for number, (spec, params, verifier) in enumerate(FORMS):
        row = make_row(
            [40 + number, 41, 42], params, seed=number, number=number, stop_tokens=frozenset([EOS])
        )
        row.constraint = GRAMMARS.constraint(spec)
        row.verifier = None if verifier is None else VERIFIERS.load(verifier)()
        made.append(row)
    return [
        *made,
        make_row(
            [50, 51], SamplingParams(temperature=0.7, max_tokens=30), seed=9, number=len(FORMS)
        ),
    ]


def answers(built: Built, drafter: str, settings: dict[str, Any], chosen: list[Row]) -> list[Row]:
    parts = choose_parts(drafter, settings, "auto", {}, 4, lossy=False)
    made = parts.make_drafter(built.target, built.draft)
    decoder = Decoder(built.target.lm, made, parts.make_verifier(), FixedLength(4))
    for row in chosen:
        decoder.add(row)
    return run_to_end(decoder)


DRAFTERS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}), ("ngram", {}), ("draft-model", {}), ("draft-model", {"tree": "2x2x1", "sample_from": 0.5}),
    ("draft-model", {"tree": "best-first"}), ("universal", {"method": "shared"}), ("universal", {"method": "reencode"}),
]  # fmt: skip


@pytest.mark.parametrize(("drafter", "settings"), DRAFTERS)
def test_answers_keep_their_grammar(built: Built, drafter: str, settings: dict[str, Any]) -> None:
    """Catches a mask that drafts get around, an end that is missed, and text that a neighbour's
    grammar changed."""
    done = answers(built, drafter, settings, rows())
    texts = [TOKENIZER.decode(row.output, skip_special_tokens=True) for row in done]
    for text in texts[:2]:
        value = json.loads(text)
        assert set(value) == {"a", "b"}
        assert 10 <= value["a"] <= 999
    assert texts[2] in ("yes", "no", "yesterday")
    assert re.fullmatch(r"([ab]c)*[ab]?d?", texts[3])
    assert [row.finish_reason for row in done[:3]] == ["stop"] * 3
    for number, row in enumerate(done):
        (alone,) = answers(built, drafter, settings, [rows()[number]])
        assert alone.output == row.output, f"row {number}"
    plain = answers(built, "none", {}, rows())
    for number in (0, 1, 3):  # greedy, and drafter-invariant
        assert done[number].output == plain[number].output


def test_a_draft_model_under_the_same_grammar_is_kept_often(built: Built) -> None:
    """Catches a drafter that draws without the mask: most of what it proposed would be turned down."""
    row = rows()[1]
    answers(built, "draft-model", {}, [row])
    assert row.stats.accepted >= 0.6 * row.stats.tested


def test_a_draft_without_the_token_that_is_asked_for_stops(built: Built) -> None:
    """Catches a universal draft with nothing left to emit: its distribution would be none, and the
    whole batch would fail."""
    parts = choose_parts("universal", {"method": "shared"}, "auto", {}, 4, lossy=False)
    drafter = parts.make_drafter(built.target, built.draft)
    drafter._is_foreign[TOKENIZER("3")["input_ids"]] = True
    decoder = Decoder(built.target.lm, drafter, parts.make_verifier(), FixedLength(4))
    for number, params in enumerate((GREEDY, SOFT)):
        decoder.add(make_row([40], params, number=number))
        decoder.rows[number].constraint = GRAMMARS.constraint(regex("[ab]{2}3[ab]{2}"))
    decoder.rows._rebuild()
    assert all(
        re.fullmatch("[ab]{2}3[ab]{2}", TOKENIZER.decode(row.output)) for row in run_to_end(decoder)
    )


def test_a_finished_answer_ends_without_an_end_token(built: Built) -> None:
    """Catches a step spent on a token that cannot be another, and an answer that goes on when the
    end is no stop token."""
    row = make_row([40], SamplingParams(max_tokens=30, ignore_eos=True))
    row.constraint = GRAMMARS.constraint(choice(["ab"]))
    (done,) = answers(built, "none", {}, [row])
    assert TOKENIZER.decode(done.output) == "ab"
    assert done.finish_reason == "stop"


def test_the_compiled_loop_leaves_grammars_to_the_general_path() -> None:
    """Shared noise it draws itself (`tests/unit/drafters/test_programs.py`); no program knows a
    grammar."""
    free = make_row([5], GREEDY)
    bound = make_row([5], GREEDY)
    coupled = make_row([5], SOFT)
    bound.constraint = GRAMMARS.constraint(WORDS)
    coupled.verifier = VERIFIERS.load("gumbel")()
    for extra, expected in ((None, True), (bound, False), (coupled, True)):
        batch = Rows(257, torch.device("cpu"))
        for row in (free, *([] if extra is None else [extra])):
            batch.add(row)
        assert programs_serve(batch) is expected
