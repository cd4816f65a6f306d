"""Prompts in every form that callers give them: read where the meaning is clear, else refused by
the number of the prompt."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.errors import ConfigError, RequestError
from outrider.prompts import ReadPrompt, read_predictions, read_prompts
from tests.helpers import word_tokenizer

IDS = [3, 4, 5]
PADDING = SimpleNamespace(pad_token_id=0, bos_token_id=None)
ONE = [ReadPrompt(token_ids=IDS)]
TWO = [ReadPrompt(token_ids=IDS), ReadPrompt(token_ids=[6, 7, 8])]
PAIR = [IDS, [6, 7, 8]]


def encoded(texts: str | list[str], side: str = "right", **options: Any) -> Any:
    tokenizer = word_tokenizer(9)
    tokenizer.pad_token = "<|end|>"
    tokenizer.padding_side = side
    return tokenizer(texts, **options)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a text", [ReadPrompt("a text")]),
        (["a", "b"], [ReadPrompt("a"), ReadPrompt("b")]),
        (("a",), [ReadPrompt("a")]),
        (np.array(["a", "b"]), [ReadPrompt("a"), ReadPrompt("b")]),
        ((text for text in "ab"), [ReadPrompt("a"), ReadPrompt("b")]),
        (IDS, ONE),
        (tuple(IDS), ONE),
        (range(3, 6), ONE),
        (list(np.array(IDS)), ONE),
        (list(torch.tensor(IDS)), ONE),
        (torch.tensor(IDS), ONE),
        (torch.tensor(IDS, dtype=torch.int32), ONE),
        (np.array(IDS, dtype=np.uint16), ONE),
        (torch.tensor([IDS]), ONE),
        (torch.tensor(PAIR), TWO),
        (np.array(PAIR), TWO),
        (PAIR, TWO),
        ([torch.tensor(PAIR[0]), np.array(PAIR[1])], TWO),
        ([torch.tensor([PAIR[0]]), PAIR[1]], TWO),
        (["a", IDS], [ReadPrompt("a"), *ONE]),
        ([], []),
        (torch.empty(0, 3, dtype=torch.long), []),
        ({"prompt": "a"}, [ReadPrompt("a")]),
        ({"prompt_token_ids": IDS}, ONE),
        ({"prompt_token_ids": torch.tensor(IDS)}, ONE),
        (
            {"prompt": "a", "prompt_token_ids": IDS, "multi_modal_data": None},
            [ReadPrompt("a", IDS)],
        ),
        (
            [{"prompt": "a"}, {"prompt_token_ids": IDS}, "b"],
            [ReadPrompt("a"), *ONE, ReadPrompt("b")],
        ),
        (MappingProxyType({"prompt": "a"}), [ReadPrompt("a")]),
        ({"input_ids": IDS}, ONE),
        ({"input_ids": PAIR, "token_type_ids": [[0] * 3] * 2}, TWO),
        (encoded("w3 w4 w5"), ONE),
        (encoded("w3 w4 w5", return_tensors="pt"), ONE),
        (encoded(["w3 w4 w5", "w6 w7 w8"]), TWO),
        (encoded(["w3 w4 w5", "w6 w7 w8"], return_tensors="np"), TWO),
        ([encoded("w3 w4 w5"), encoded("w6 w7 w8", return_tensors="pt")], TWO),
        ({"input_ids": []}, [ReadPrompt(token_ids=[])]),
    ],
)
def test_what_is_clear_is_read(given: Any, expected: list[ReadPrompt]) -> None:
    """Catches keys of a dictionary taken for texts, one prompt taken for several, and numbers that
    are not plain ints."""
    found = read_prompts(given)
    assert found == expected
    assert all(type(token) is int for one in found for token in one.token_ids or [])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", [None, "pt", "np"])
def test_padding_is_no_text(side: str, form: str | None) -> None:
    """Catches padding tokens fed to the model as if the caller had written them."""
    batch = encoded(["w3 w4 w5", "w6"], side, padding=True, return_tensors=form)
    assert read_prompts(batch) == [ReadPrompt(token_ids=IDS), ReadPrompt(token_ids=[6])]
    with pytest.raises(
        RequestError,
        match="prompt 1 begins or ends with the padding token 0, and nothing says whether it is",
    ):
        read_prompts(batch["input_ids"], PADDING)


def test_equal_rows_without_padding_are_read() -> None:
    """The check for padding must not refuse batches that have none, single prompts, or rows whose
    mask is given."""
    assert read_prompts(torch.tensor(PAIR), PADDING) == TWO
    assert read_prompts([0, 3], PADDING) == [ReadPrompt(token_ids=[0, 3])]
    assert (
        len(read_prompts([{"prompt_token_ids": [0, 3]}, {"prompt_token_ids": [4, 0]}], PADDING))
        == 2
    )
    # as where a tokenizer pads with its begin token
    begin = SimpleNamespace(pad_token_id=0, bos_token_id=0)
    assert len(read_prompts([[0, 3], [0, 4]], begin)) == 2
    with pytest.raises(RequestError, match="prompt 1 begins or ends with the padding token"):
        read_prompts([[0, 3], [0, 0]], begin)
    masked = {"input_ids": [[0, 3], [4, 5]], "attention_mask": [[1, True], [1, 1]]}
    assert read_prompts(masked, PADDING) == [
        ReadPrompt(token_ids=[0, 3]),
        ReadPrompt(token_ids=[4, 5]),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "prompt 0 is None; give text, token ids"),
        (7, "prompt 0 is 7 (int)"),
        (True, "prompt 0 is True (bool)"),
        (1.5, "prompt 0 is 1.5 (float)"),
        (b"text", "Decode bytes first"),
        (Path("p.txt"), "Read the file first"),
        ({3, 4}, "prompt 0 is {3, 4} (set)"),
        ({}, "prompt 0 is a dictionary without a prompt"),
        ({"attention_mask": [1]}, "without a prompt"),
        ({"promt": "a"}, "prompt 0 has an unknown key 'promt'. Did you mean 'prompt'?"),
        ({1: "a"}, "unknown key '1'"),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}},
            "prompt 0 has 'multi_modal_data', which is not supported",
        ),
        ({"prompt": IDS}, "'prompt' of prompt 0 must be text"),
        ({"prompt_token_ids": PAIR}, "prompt_token_ids of prompt 0 holds 2 prompts"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids of prompt 0 is 'a' (str)"),
        ({"prompt": "a", "input_ids": IDS}, "has both 'input_ids' and 'prompt'"),
        ({"input_ids": IDS, "attention_mask": [1, 1]}, "another shape"),
        ({"input_ids": PAIR, "attention_mask": [1, 1, 1]}, "another shape"),
        (
            {"input_ids": IDS, "attention_mask": [0, -1e9, 0]},
            "attention_mask of prompt 0 has -1000000000.0",
        ),
        (["a", None], "prompt 1 is None"),
        (["a", 5], "prompt 1 is 5 (int)"),
        ([b"a"], "prompt 0 is b'a' (bytes)"),
        ([True, False], "prompt 0 is True (bool)"),
        ([3, True], "prompt 0 has True (bool) at position 1, where a token id"),
        ([3, "a"], "prompt 0 has 'a' (str) at position 1"),
        ([3, 4.0], "prompt 0 has 4.0 (float) at position 1"),
        ([IDS, ["a", "b"]], "prompt 1 has 'a' (str) at position 0"),
        ([[IDS]], "prompt 0 has [3, 4, 5] (list) at position 0"),
        ([1.0, 2.0], "prompt 0 is 1.0 (float)"),
        (
            torch.tensor([1.0]),
            "prompt 0 is a Tensor of float32 with shape (1,); token ids are whole numbers",
        ),
        (torch.tensor([True]), "a Tensor of bool"),
        (torch.tensor(5), "one dimension, a batch of them two"),
        (torch.ones(1, 1, 1, dtype=torch.long), "with shape (1, 1, 1)"),
        ([torch.tensor(PAIR)], "inside a list each tensor holds one prompt"),
        ({"input_ids": [torch.tensor(PAIR)]}, "inside a list each tensor holds one prompt"),
        (
            {"prompt_token_ids": [torch.zeros(0, 3, dtype=torch.int64)]},
            "inside a list each tensor holds one prompt",
        ),
        ([{"input_ids": PAIR}], "prompt 0 is a dictionary of 2 prompts"),
        (np.array([1.0]), "a ndarray of float64"),
    ],
)
def test_what_is_not_clear_is_refused(given: Any, message: str) -> None:
    with pytest.raises(RequestError) as error:
        read_prompts(given)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [None, None]),
        ("a", [ReadPrompt("a")] * 2),
        (IDS, ONE * 2),
        (torch.tensor(IDS), ONE * 2),
        ({"prompt": "a"}, [ReadPrompt("a")] * 2),
        (encoded("w3 w4 w5", return_tensors="pt"), ONE * 2),
        ([None, "a"], [None, ReadPrompt("a")]),
        ([None, None], [None, None]),
        (PAIR, TWO),
    ],
)
def test_predictions(given: Any, expected: list[ReadPrompt | None]) -> None:
    """One for all answers, or one each."""
    assert read_predictions(given, 2) == expected


def test_bad_predictions_are_refused_as_predictions() -> None:
    with pytest.raises(RequestError, match=r"prediction 0 is 1.5 \(float\)"):
        read_predictions(1.5, 1)
    with pytest.raises(ConfigError, match="1 predictions for 2 prompts"):
        read_predictions(["a"], 2)
