"""Arguments of other engines, where Python's own message would name none of ours."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.foreign import check_arguments

WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (LLM, {}, "LLM() takes one model, as 'target' or 'model'"),
    (LLM, {"model": "x", "target": "y"}, "LLM() takes one model, as 'target' or 'model'"),
    (LLM, {"model_path": "x"}, "LLM() has no argument 'model_path'. Did you mean 'target'?"),
    (LLM, {"target": "x", "speculative_model": "y"}, "'speculative_model'. Did you mean 'draft'?"),
    (LLM, {"target": "x", "num_speculative_tokens": 5}, "Did you mean 'num_draft_tokens'?"),
    (LLM, {"target": "x", "max_model_length": 5}, "Did you mean 'max_model_len'?"),
    (
        LLM,
        {"target": "x", "tensor_parallel_size": 2},
        "'tensor_parallel_size': this engine runs a model on one device",
    ),
    (
        LLM,
        {"target": "x", "gpu_memory_utilization": 0.5},
        "LLM() has no argument 'gpu_memory_utilization'",
    ),
    (
        SamplingParams,
        {"max_new_tokens": 5},
        "SamplingParams() has no argument 'max_new_tokens'. Did you mean 'max_tokens'?",
    ),
    (SamplingParams, {"temprature": 1.0}, "Did you mean 'temperature'?"),
]


@pytest.mark.parametrize(("made", "named", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_an_argument_that_is_called_otherwise_here(
    made: Any, named: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError) as caught:
        made(**named)
    assert message in str(caught.value)


def test_who_takes_anything_is_left_alone() -> None:
    """A class of a plug-in's on top of ours, and copies that are made without arguments."""

    class Wider(LLM):
        def __init__(self, **named: Any) -> None:
            self.named = named

    assert Wider(model="x").named == {"model": "x"}
    check_arguments(SamplingParams, ["seed", "max_tokens"])
    params = SamplingParams(seed=3, max_tokens=4)
    assert replace(params, seed=5).seed == 5
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
