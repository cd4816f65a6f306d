"""The end of an answer from Python: its text leaves out what ended it, and `stop_reason` names it,
watched or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from tests.helpers import EOS, byte_tokenizer, disturbed, save_checkpoint, tiny_llama

TOKENIZER = byte_tokenizer()
DASH, X = TOKENIZER("-x")["input_ids"]
CASES: list[tuple[dict[str, Any], str, str, int | str | None]] = [
    ({"stop_token_ids": [DASH]}, "", "stop", DASH),
    ({"stop_token_ids": [DASH], "include_stop_str_in_output": True}, "-", "stop", DASH),
    ({"stop_token_ids": [DASH], "min_tokens": 2}, "xx", "stop", DASH),
    ({"stop": ["--"]}, "", "stop", "--"),
    ({"stop": ["x", "--"], "include_stop_str_in_output": True}, "--", "stop", "--"),
    ({"max_tokens": 3}, "---", "length", None),
    ({"logit_bias": {EOS: 90.0}}, "", "stop", None),
    ({"logit_bias": {EOS: 90.0}, "stop_token_ids": [EOS]}, "", "stop", None),
    (
        {
            "logit_bias": {EOS: 90.0},
            "stop_token_ids": [EOS],
            "ignore_eos": True,
            "skip_special_tokens": False,
        },
        "",
        "stop",
        EOS,
    ),
]


@pytest.fixture(scope="module", params=["none", "draft-model"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("stops")
    target = tiny_llama(257, sharpness=3.0)
    save_checkpoint(folder / "target", target, TOKENIZER)
    save_checkpoint(folder / "draft", disturbed(target, 0.1), TOKENIZER)
    draft = folder / "draft" if request.param == "draft-model" else None
    return LLM(folder / "target", drafter=request.param, draft=draft, threads=1)


@pytest.mark.parametrize(("fields", "text", "reason", "by"), CASES)
def test_what_ended_it(
    llm: LLM, fields: dict[str, Any], text: str, reason: str, by: int | str | None
) -> None:
    """Every answer wants to be dashes, and x where it may not."""
    params = SamplingParams(**{"logit_bias": {DASH: 90.0, X: 60.0}, "max_tokens": 9, **fields})
    [whole] = llm.generate([[5, 6, 7]], params)
    *_, last = chunks = list(llm.stream([5, 6, 7], params))
    for found in (whole, last.completion):
        assert found is not None
        assert (found.text, found.finish_reason, found.stop_reason) == (text, reason, by)
    assert "".join(chunk.text for chunk in chunks) == text
