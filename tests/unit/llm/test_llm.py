"""`LLM` as a caller meets it: one call at a time, from any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.errors import ConfigError, RequestError
from outrider.sampling.params import SamplingParams
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama


def test_halves_of_letters_are_no_text(tmp_path: Path) -> None:
    """Bytes of another encoding, as Python keeps them: the tokenizer's TypeError says nothing of
    the prompt."""
    folder = save_checkpoint(tmp_path / "model", tiny_llama(257), byte_tokenizer())
    llm = LLM(folder, drafter="prediction")
    with pytest.raises(
        RequestError, match="prompt 1 is not UTF-8 text: letter 2 is half of a surrogate pair"
    ):
        llm.generate(["ok", "M\udcfcnchen"])
    with pytest.raises(RequestError, match="the prediction is not UTF-8 text"):
        llm.generate("ok", prediction="\ud800")


@pytest.mark.slow
def test_a_second_call_beside_a_stream_is_refused(tmp_path: Path) -> None:
    """Catches rows of two calls in one batch: the second would be given the first one's text, the
    first would never end."""
    llm = LLM(
        save_checkpoint(tmp_path / "model", tiny_llama(257), byte_tokenizer()), drafter="ngram"
    )
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = llm.generate([[5, 6, 7]], params)[0].token_ids
    stream = llm.stream([5, 6, 7], params)
    emitted = next(stream).token_ids
    with pytest.raises(RequestError, match="still runs"):
        llm.generate([[8, 9]], params)
    assert emitted + [token for chunk in stream for token in chunk.token_ids] == expected
    left = llm.stream([5, 6, 7], params)
    next(left)
    left.close()
    assert llm.generate([[5, 6, 7]], params)[0].token_ids == expected


@pytest.mark.slow
def test_calls_of_several_threads_wait_for_each_other(tmp_path: Path) -> None:
    """Catches two threads that step one decoder: texts of each other's prompts, or a process that
    dies."""
    llm = LLM(
        save_checkpoint(tmp_path / "model", tiny_llama(257), byte_tokenizer()), drafter="ngram"
    )
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [[5 + number, 6, 7] for number in range(12)]
    expected = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]

    def streamed(prompt: list[int]) -> list[int]:
        return [token for chunk in llm.stream(prompt, params) for token in chunk.token_ids]

    with ThreadPoolExecutor(6) as pool:
        assert (
            list(pool.map(lambda prompt: llm.generate([prompt], params)[0].token_ids, prompts))
            == expected
        )
        stream = llm.stream(prompts[0], params)
        next(stream)
        with pytest.raises(RequestError, match="still runs"):
            pool.submit(streamed, prompts[1]).result(timeout=30)
        stream.close()
        assert pool.submit(streamed, prompts[1]).result(timeout=30) == expected[1]


def test_an_interrupted_answer_has_the_text_of_all_its_tokens(byte_model: Path) -> None:
    """Catches letters that waited for the rest of a stop string and are then in no text."""
    llm = LLM(byte_model, drafter="none")
    letters = {"logit_bias": {70: 90.0}, "max_tokens": 9}
    letter = llm.generate([[5, 6]], SamplingParams(**letters))[0].text[0]
    stream = llm.stream([5, 6], SamplingParams(**letters, stop=[letter * 3 + "."]))
    assert "".join(next(stream).text for _ in range(3)) == ""
    stream.close()
    assert llm.last_completion is not None
    assert (llm.last_completion.text, llm.last_completion.finish_reason) == (letter * 3, "abort")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": "4k"}, "max_model_len must be a whole number, got '4k'"),
        ({"max_num_seqs": 2.5}, "max_num_seqs must be a whole number, got 2.5"),
        ({"threads": True}, "threads must be a whole number, got True"),
        ({"trust_remote_code": "false"}, "trust_remote_code must be true or false, got 'false'"),
        ({"drafter_options": ["tree"]}, r"drafter_options must be a dictionary, got \['tree'\]"),
        ({"device": 0}, "device must be a text, got 0"),
        ({"drafter": None}, "drafter must be a text, got None"),
        ({"max_num_seqs": None}, "max_num_seqs must be a whole number, got None"),
        ({"lossy": None}, "lossy must be true or false, got None"),
        ({"generation_config": None}, "generation_config must be auto, none or a folder"),
    ],
)
def test_options_of_another_kind_are_refused(options: dict[str, Any], message: str) -> None:
    """Catches an error from deep inside, and a text that stands for no but counts as yes."""
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **options)
