"""`--num-draft-tokens 1:5,4:3,16:0`: the length by load, from the text to what a decoder asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.configuration import Configuration
from outrider.draft_length import FixedLength
from outrider.draft_length.length import DraftLength
from outrider.errors import ConfigError
from outrider.parts import choose_parts
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama

TABLE = DraftLength(5, by_rows=((1, 5), (4, 3), (16, 0)))


def rows(count: int, **fields: Any) -> Any:
    """Only what a control looks at."""
    return [SimpleNamespace(clamp_draft=lambda size: size, **fields) for _ in range(count)]


def test_a_table_is_read_and_written() -> None:
    assert DraftLength.parse("1:5,4:3,16:0", 7) == TABLE
    assert TABLE.asked == str(TABLE) == "1:5,4:3,16:0"
    assert TABLE.varies
    assert not DraftLength.parse("1:5,16:0", 7).varies, (
        "a draft of five or none needs no program for other lengths"
    )
    assert (DraftLength(5).asked, DraftLength(8, is_auto=True).asked) == (5, "auto:8")


@pytest.mark.parametrize(
    "text",
    ["5:3", "2:5,4:3", "1:5,4:3,4:0", "1:5,8:2,4:3", "1:5,4", "1:5,4:x", "1:5,4:-1", "1:5,", "1:"],
)
def test_what_is_no_table(text: str) -> None:
    """A gap, a number of rows that is given twice, a half-written line: none of them may be guessed
    at."""
    with pytest.raises(ConfigError, match="must be a number, 'auto' or 'auto:N', got"):
        DraftLength.parse(text, 5)


@pytest.mark.parametrize(
    "text", ["--5", "²", "auto:--5", "auto:²", "9" * 5000, "1:" + "9" * 5000, "5.0", "", "-"]
)
def test_what_only_looks_like_a_number(text: str) -> None:
    """Python's int() takes none of these, and says so with a traceback."""
    with pytest.raises(
        ConfigError, match="num_draft_tokens must be a number, 'auto' or 'auto:N', got"
    ):
        DraftLength.parse(text, 5)


@pytest.mark.parametrize("text", ["1:0", "1:65,2:3", "1:0,4:0"])
def test_a_table_out_of_range(text: str) -> None:
    with pytest.raises(ConfigError, match="between 1 and 64 at some load"):
        DraftLength.parse(text, 5)


@pytest.mark.parametrize(("count", "size"), [(1, 5), (3, 5), (4, 3), (15, 3), (16, 0), (200, 0)])
def test_the_entry_for_fewer_rows_holds_between_two(count: int, size: int) -> None:
    assert FixedLength(TABLE.max_nodes, TABLE.by_rows).choose(rows(count)) == [size] * count


def test_only_what_can_be_reached_is_kept() -> None:
    """One row at a time is a fixed length, for which a draft model has a faster program."""
    assert TABLE.up_to(1) == DraftLength(5)
    assert TABLE.up_to(8) == DraftLength(5, by_rows=((1, 5), (4, 3)))
    assert TABLE.up_to(64) == TABLE
    assert DraftLength(7).up_to(1) == DraftLength(7)


def test_parts_take_it() -> None:
    parts = choose_parts("ngram", {}, "auto", {}, "1:5,4:3,16:0", lossy=False)
    assert parts.make_control().summary() == {"by_load": {1: 5, 4: 3, 16: 0}}


def test_programs_that_make_up_any_length_serve_a_table() -> None:
    """A draft model's loop of five would draft five where three are asked for."""
    parts = choose_parts("draft-model", {}, "auto", {}, "1:5,4:3", lossy=False)
    assert parts.loop_lengths == (5, 3, 2, 1)
    assert choose_parts("draft-model", {}, "auto", {}, "1:5,4:0", lossy=False).loop_lengths == (5,)
    fixed = choose_parts("draft-model", {}, "auto", {}, 5, lossy=False)
    assert (fixed.loop_lengths, replace(fixed, any_length=True).loop_lengths) == (
        (5,),
        (5, 3, 2, 1),
    )


def test_its_text_form_holds_no_comma() -> None:
    """Configurations stand in lists with commas between."""
    made = Configuration("ngram", "1:5,4:0")
    assert made.label == "ngram k=1:5+4:0"
    assert Configuration.parse(made.label) == made


@pytest.mark.slow
def test_two_rows_draft_nothing_where_the_table_says_so(tmp_path: Path) -> None:
    """Guards against a table that nobody follows: alone a row drafts, beside another it does not."""
    folder = save_checkpoint(tmp_path, tiny_llama(257, sharpness=8.0), byte_tokenizer())
    llm = LLM(str(folder), drafter="ngram", num_draft_tokens="1:3,2:0", dtype="float32", threads=1)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    alone = llm.generate(["abcabcabcabc"], params)[0]
    both = llm.generate(["abcabcabcabc", "abcabcabcabc"], params)
    assert llm.config["num_draft_tokens"] == "1:3,2:0"
    assert alone.stats.drafted > 0
    assert [one.stats.drafted for one in both] == [0, 0]
    assert [one.token_ids for one in both] == [alone.token_ids] * 2
