"""Speculative prefill: what the target reads, at which positions, and who is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from outrider import LLM, SamplingParams
from outrider.build import Options
from outrider.errors import CapabilityError, ConfigError, OutriderError
from outrider.lab.certify.subject import Subject
from outrider.prefill import ASKING, CHUNK, LEAST, chosen
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama, word_tokenizer

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
KEEP = "keep=0.3 draft=early:1"
LONG = 700  # tokens; LEAST / 0.3 and more


def prompt(count: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (count,), generator=draw).tolist()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(257, sharpness=4.0, num_hidden_layers=3)


@pytest.fixture(scope="module")
def target(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("prefill"), model, byte_tokenizer()))


@pytest.fixture(scope="module")
def llms(target: str) -> Iterator[dict[str, LLM]]:
    made = {
        runtime: LLM(target, drafter="none", prefill=KEEP, runtime=runtime)  # type: ignore[arg-type]
        for runtime in ("eager", "auto")
    }
    yield made
    for llm in made.values():
        llm.close()


def answer(llm: LLM, tokens: list[int], params: SamplingParams = GREEDY) -> Any:
    return llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)[0]


def kept(llm: LLM, tokens: list[int]) -> list[int]:
    """Positions that the target reads."""
    prefill = llm._built.prefill
    assert prefill is not None
    choosing = prefill._positions(tokens)
    with torch.inference_mode():
        while True:
            try:
                next(choosing)
            except StopIteration as stop:
                return list(stop.value)


@pytest.mark.parametrize("runtime", ["eager", "auto"])
def test_the_answer_is_that_of_the_plain_model_to_the_tokens_at_their_positions(
    llms: dict[str, LLM], model: Any, runtime: str
) -> None:
    """transformers' own forward, told the position of each token, is what decoding must repeat."""
    tokens = prompt(LONG)
    llm = llms[runtime]
    done = answer(llm, tokens)
    places = [*kept(llm, tokens), LONG - 1]
    text = [tokens[place] for place in places]
    expected: list[int] = []
    with torch.inference_mode():
        for step in range(24):
            positions = torch.tensor([[*places, *range(LONG, LONG + step)]])
            logits = model(input_ids=torch.tensor([[*text, *expected]]), position_ids=positions)
            expected.append(int(logits.logits[0, -1].argmax()))
    assert done.token_ids == expected
    assert done.prompt_share == pytest.approx(len(places) / LONG)
    assert 0.25 < done.prompt_share < 0.4
    assert done.lossless is False


def test_scores_are_of_the_attention_that_transformers_computes(
    llms: dict[str, LLM], model: Any
) -> None:
    tokens = prompt(500, 3)
    llm = llms["eager"]
    prefill = llm._built.prefill
    assert prefill is not None
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = model(
            input_ids=torch.tensor([tokens]), output_attentions=True, use_cache=False
        ).attentions[0][0, :, -ASKING:]
        pooled = torch.nn.functional.avg_pool1d(weights, 13, 1, 6, count_include_pad=False)
        logs = (pooled + 1e-9).log()
        expected = (logs - logs.mean(1, keepdim=True)).amax(0).mean(0)
        lm = prefill._scorer.twin()
        lm.kv.add_row()
        lm.forward(torch.tensor([tokens[:-ASKING]]))
        lm.kv.advance(0, 500 - ASKING)
        scores = prefill._scores(lm, torch.tensor([tokens[-ASKING:]]))
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("count", [640, 641, 671, 1000])
@pytest.mark.parametrize("keep", [0.05, 0.2, 0.99])
def test_chosen_chunks(count: int, keep: float) -> None:
    """The first and the last one, the best of the others, as many as were asked for."""
    scores = torch.rand(count, generator=torch.Generator().manual_seed(count))
    scores[300:340] += 5
    positions = chosen(scores, keep)
    assert positions == sorted(set(positions))
    assert (positions[0], positions[-1]) == (0, count - 2)
    assert set(range(count - CHUNK, count - 1)) <= set(positions)
    assert keep * count - CHUNK <= len(positions) <= max(2 * CHUNK, keep * count + 2 * CHUNK)
    assert keep == 0.05 or set(range(320, 340)) <= set(positions)


def test_short_prompts_are_read_whole(llms: dict[str, LLM], target: str) -> None:
    """They are as good as ever; still nobody promised so."""
    short = prompt(int(LEAST / 0.3))
    with LLM(target, drafter="none") as plain:
        done = answer(llms["auto"], short)
        assert (done.prompt_share, done.lossless) == (1.0, False)
        assert done.token_ids == answer(plain, short).token_ids
        whole = answer(plain, prompt(LONG))
        assert (whole.prompt_share, whole.lossless) == (1.0, True)
        assert whole.token_ids != answer(llms["auto"], prompt(LONG)).token_ids
        with LLM(target, drafter="none", prefill="keep=1") as all_of_it:
            done = answer(all_of_it, prompt(LONG))
            assert (done.prompt_share, done.token_ids) == (1.0, whole.token_ids)


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "draft-model", "ngram tree=true"])
@pytest.mark.parametrize("runtime", ["eager", "auto"])
def test_drafts_do_not_change_what_was_lost(
    llms: dict[str, LLM], target: str, drafter: str, runtime: str
) -> None:
    """Whoever drafts reads the whole prompt, and the text is that of the target without drafts;
    also of several rows at once, one of them short."""
    draft = target if drafter == "draft-model" else None
    prompts = [prompt(LONG, 1), prompt(50, 2), prompt(LONG + 37, 3), prompt(8, 4) * 120]
    asked = [{"prompt_token_ids": tokens} for tokens in prompts]
    with LLM(target, drafter=drafter, draft=draft, prefill=KEEP, runtime=runtime) as llm:  # type: ignore[arg-type]
        together = llm.generate(asked, GREEDY, use_tqdm=False)
    alone = [answer(llms[runtime], tokens) for tokens in prompts]
    assert [done.token_ids for done in together] == [done.token_ids for done in alone]
    assert [done.prompt_share for done in together] == [done.prompt_share for done in alone]
    assert sum(done.stats.accepted for done in together) > 0


def test_a_model_scores(target: str) -> None:
    """Here the target itself, all of its layers."""
    with LLM(target, drafter="none", prefill=f"keep=0.3 draft='{target}'") as llm:
        done = answer(llm, prompt(LONG))
        assert done.prompt_share < 0.4
        assert any("prefill is lossy" in note and target in note for note in llm.notes)
        assert llm.config["lossless"] is False


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("keep=0", "keep must be above 0 and at most 1 (share of a prompt that is read), got 0"),
        ("keep=1.5", "keep must be above 0 and at most 1"),
        ("keep=half", "prefill: keep must be a number, got 'half'"),
        ("kep=0.2", "Did you mean 'keep'?"),
        ("0.2", "'0.2' in 'prefill 0.2' is not NAME=VALUE"),
        ("draft=early:0", "takes a number of layers from 1 on, got 'early:0'"),
        ("draft=early:3", "takes 1 to 2 of the 3 layers"),
    ],
)
def test_wrong_words(target: str, given: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(target, drafter="none", prefill=given)
    assert message in str(error.value)


def test_another_tokenizer(target: str, tmp_path: Path) -> None:
    draft = save_checkpoint(tmp_path / "draft", tiny_llama(257), word_tokenizer(257))
    with pytest.raises(CapabilityError, match="another tokenizer than"):
        LLM(target, drafter="none", prefill=f"draft={draft}")


@pytest.mark.parametrize("drafter", ["early-exit exit_layer=1", "quantised"])
def test_drafters_on_the_target_keys_are_refused(target: str, drafter: str) -> None:
    with pytest.raises(CapabilityError, match="of which --prefill skips most"):
        LLM(target, drafter=drafter, prefill=KEEP)


def test_what_looks_at_whole_prompts_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="losslessness cannot be certified"):
        Subject.open(Options(target, prefill=KEEP, drafter="ngram"))


SMALL = {"hidden_size": 64, "vocab_size": 257}
LLAMA = {
    **SMALL,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def sliding() -> Any:
    return MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=64))


def recurrent() -> Any:
    kinds = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**LLAMA, **kinds, linear_value_head_dim=16))


def alibi() -> Any:
    return BloomForCausalLM(BloomConfig(**SMALL, n_layer=3, n_head=4))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (sliding, "it has sliding layers, which see the last 64 tokens alone"),
        (recurrent, "it has recurrent layers"),
        (alibi, "do not look at position ids"),
    ],
)
def test_targets_that_need_every_token_are_refused(make: Any, why: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", make().eval(), byte_tokenizer())
    with pytest.raises(OutriderError) as error:
        LLM(str(folder), drafter="none", prefill=KEEP)
    assert why in str(error.value)
