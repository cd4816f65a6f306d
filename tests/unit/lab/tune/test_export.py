"""The advice in the words of others: keys that their parsers know, numbers that are ours, honesty where they lack something."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest

from outrider.lab.result import Interval
from outrider.lab.tune.export import in_other_words
from outrider.lab.tune.forecast import Forecast
from outrider.lab.tune.load import LoadStep
from outrider.lab.tune.result import Recommendation, Tried, TuneResult, Words

VLLM_KEYS = {  # of SpeculativeConfig, as far as we write them
    "method", "model", "num_speculative_tokens", "draft_sample_method", "prompt_lookup_max", "prompt_lookup_min",
    "num_speculative_tokens_per_batch_size", "suffix_decoding_max_tree_depth", "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
}  # fmt: skip
ENGINES = ("vLLM", "SGLang", "TensorRT-LLM", "transformers", "llama.cpp")
SPEEDUPS = {"draft-model k=5": 2.0, "draft-model k=3": 1.8, "ngram k=4 max_ngram=3": 1.3, "suffix k=6": 1.4, "quantised k=2": 1.1}


def result(
    recommended: str = "draft-model k=5", speedups: dict[str, float] | None = None, temperature: float = 0.0,
    schedule: list[tuple[int, str, int]] = (), *, speculate: bool = True,
) -> TuneResult:  # fmt: skip
    speedups = SPEEDUPS if speedups is None else speedups
    return TuneResult(
        tried=Tried(
            temperature=temperature, max_new_tokens=8, batch_size=1, probe_prompts=1, confirm_prompts=1, tasks={"code": 2},
            workload="w", target="org/target", draft="org/draft", model_options={},
        ),
        families=[], plain_step_s=0.01, overall_speedup=speedups, laps=[], confirmed=[], stages=[], exhaustive_s=1.0,
        num_members=3, search=None,
        forecasts=[
            Forecast(
                family=re.sub(r" k=\d+", "", label), configuration=label, size=int(re.search(r"k=(\d+)", label)[1]), task="code",
                tau=2, step_s=1, tokens_per_s=1, speedup=value, break_even_alpha=None,
            )
            for label, value in speedups.items()
        ],
        recommendations=[
            Recommendation(
                task="all", speculate=speculate, configuration=recommended, options={}, forecast_speedup=2.0,
                speedup=Interval(value=2.0, low=1.9, high=2.1), reason="it was measured",
            )
        ],
        schedule=[
            LoadStep(batch_size=rows, configuration=label, size=size, tokens_per_s=2, plain_tokens_per_s=1, speedup=2)
            for rows, label, size in schedule
        ],
    )  # fmt: skip


def words(made_from: TuneResult) -> dict[str, Words]:
    return {one.engine: one for one in in_other_words(made_from)}


def vllm_config(made_from: TuneResult) -> dict[str, Any]:
    found = words(made_from)["vLLM"].text
    return json.loads(re.search(r"--speculative-config '(.*)'$", found)[1])


def test_every_engine_is_addressed() -> None:
    assert tuple(words(result())) == ENGINES


def test_vllm_draft_model() -> None:
    assert vllm_config(result()) == {"method": "draft_model", "model": "org/draft", "num_speculative_tokens": 5}


def test_vllm_samples_from_the_draft_s_law() -> None:
    """Its default draws nothing: a sampled target would accept with p alone. So does its model runner V1 when told `block`."""
    sampled = result(temperature=0.7)
    found = vllm_config(sampled)
    assert found["draft_sample_method"] == "probabilistic"
    assert "rejection_sample_method" not in found
    assert any("block" in note and "V1 ignores it" in note for note in words(sampled)["vLLM"].notes)
    assert not any("block" in note for note in words(result())["vLLM"].notes)


def test_vllm_table_covers_every_batch_size_once() -> None:
    found = vllm_config(result(schedule=[(4, "draft-model k=3", 3), (16, "none", 0)]))
    table = found["num_speculative_tokens_per_batch_size"]
    assert [line[2] for line in table] == [5, 3, 0]
    covered = [rows for low, high, _ in table for rows in range(low, high + 1)]
    assert covered == list(range(1, 4097))
    assert set(found) <= VLLM_KEYS


def test_a_table_never_asks_for_more_than_the_bound() -> None:
    """vLLM cuts a line above num_speculative_tokens down without a word; TensorRT-LLM refuses one above max_draft_len."""
    made = result("draft-model k=3", {"draft-model k=3": 1.9, "draft-model k=5": 1.2}, schedule=[(4, "draft-model k=5", 5)])
    assert [line[2] for line in vllm_config(made)["num_speculative_tokens_per_batch_size"]] == [3, 3]


@pytest.mark.parametrize("best", ["ngram k=4 max_ngram=3", "suffix k=6"])
def test_vllm_model_free(best: str) -> None:
    found = vllm_config(result(best, {best: 1.5}))
    assert set(found) <= VLLM_KEYS
    assert found["method"] == best.split()[0]
    if best.startswith("ngram"):
        assert (found["prompt_lookup_max"], found["prompt_lookup_min"]) == (3, 1)


def test_tensorrt_is_python_with_the_schedule() -> None:
    text = words(result(schedule=[(4, "draft-model k=3", 3), (16, "none", 0)]))["TensorRT-LLM"].text
    ast.parse(text)
    assert "max_draft_len=5" in text
    assert "draft_len_schedule={1: 5, 4: 3, 16: 0}" in text


def test_sglang_verifies_one_token_more_than_it_drafts() -> None:
    """The pending token counts there."""
    text = words(result())["SGLang"].text
    assert "--speculative-num-steps 5" in text
    assert "--speculative-num-draft-tokens 6" in text


def test_transformers_is_python() -> None:
    ast.parse(words(result())["transformers"].text)
    ast.parse(words(result("ngram k=4", {"ngram k=4": 1.5}))["transformers"].text)


def test_an_engine_without_the_drafter_says_so() -> None:
    """Guards against silently recommending something else."""
    made = result("quantised k=2", {"quantised k=2": 2.0, "ngram k=4 max_ngram=3": 1.3})
    for one in words(made).values():
        assert one.text
        assert any("Recommended is quantised k=2; this is ngram k=4" in note for note in one.notes)


def test_an_engine_with_nothing_that_pays() -> None:
    for one in words(result("quantised k=2", {"quantised k=2": 2.0, "ngram k=4": 0.8})).values():
        assert not one.text
        assert "no drafter that paid" in one.notes[0]


def test_do_not_speculate_reaches_everybody() -> None:
    for one in words(result("none", speculate=False)).values():
        assert not one.text
        assert "Do not speculate" in one.notes[0]


def test_trees_are_not_told_as_chains() -> None:
    found = vllm_config(result("draft-model k=15 tree=sequoia", {"draft-model k=15 tree=sequoia": 3.0, "draft-model k=2": 1.2}))
    assert found["num_speculative_tokens"] == 2
