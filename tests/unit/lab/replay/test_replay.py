"""A replay of recorded texts does what the real run did, step by step: greedy or sampled, chains or
trees, learning or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.configuration import Configuration
from outrider.demo import DEMO_PROMPTS
from outrider.lab.replay.loop import text_target
from outrider.lab.replay.replay import replay
from outrider.lab.replay.texts import Text
from outrider.llm import LLM
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats
from tests.helpers import save_checkpoint, tiny_llama, word_tokenizer

NUM_TOKENS = 40
PROMPTS = [
    [1 + (7 * n + index * index) % (NUM_TOKENS - 1) for index in range(5 + n)] for n in range(5)
]
GREEDY = SamplingParams(max_tokens=60)
SAMPLED = SamplingParams(max_tokens=60, temperature=0.3, seed=3)

CONFIGURATIONS = [
    "none", "ngram", "ngram k=9 tree=3 min_share=0", "suffix", "suffix k=12 beta=2 min_probability=0 tree=true",
    "ngram-cache k=9", "ngram-cache branches=1 k=3", "retrieval corpus={corpus} min_match=1",
    "retrieval corpus={corpus} branches=1 k=4 min_match=1",
    "composite parts=ngram+suffix", "composite parts=suffix+ngram-cache mode=best k=9",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that repeats itself, so that look-ups are sometimes right."""
    folder = tmp_path_factory.mktemp("model")
    return save_checkpoint(
        folder, tiny_llama(NUM_TOKENS, sharpness=1.5), word_tokenizer(NUM_TOKENS)
    )


@pytest.fixture(scope="module")
def corpus(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of what the model says."""
    done = LLM(str(model), drafter="none").generate(PROMPTS[1:3], SamplingParams(max_tokens=40))
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(one.text for one in done), encoding="utf-8")
    return path


def counters(stats: DecodeStats) -> tuple[object, ...]:
    return (
        stats.steps,
        stats.emitted,
        stats.drafted,
        stats.tested,
        stats.accepted,
        stats.accepted_per_position,
    )


def assert_same(
    configuration: Configuration, target: str, params: list[SamplingParams], prompts: list[Any]
) -> int:
    """Decode for real, then replay. Returns the number of accepted tokens, for tests that want
    some."""
    llm = LLM(target, max_num_seqs=1, **configuration.as_dict())
    done = llm.generate(prompts, params)
    texts = [
        Text(one.prompt_token_ids, one.token_ids, max_tokens=each.max_tokens)
        for one, each in zip(done, params, strict=True)
    ]
    found = replay(texts, configuration, target=text_target(llm.tokenizer, 5000))
    assert [counters(text.stats) for text in found.texts] == [counters(one.stats) for one in done]
    assert [text.origins for text in found.texts] == [one.origins for one in done]
    assert [sum(text.widths.values()) for text in found.texts] == [one.stats.steps for one in done]
    assert [sum(n * count for n, count in text.widths.items()) for text in found.texts] == [
        one.stats.drafted for one in done
    ]
    return found.total.accepted


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("label", CONFIGURATIONS)
def test_replay_is_the_real_run(
    label: str, params: SamplingParams, model: Path, corpus: Path
) -> None:
    """Catches a choice off by one node, learning in another order, limits that do not shorten
    drafts, a text's end forgotten.

    Twice the same prompts: drafters that learn know the first round's texts. Sampled: the second
    round says something else.
    """
    configuration = Configuration.parse(label.format(corpus=corpus))
    rounds = [
        replace(
            params,
            max_tokens=25 + 6 * n,
            seed=None if params.seed is None else params.seed + n // len(PROMPTS),
        )
        for n in range(2 * len(PROMPTS))
    ]
    accepted = assert_same(configuration, str(model), rounds, PROMPTS * 2)
    assert configuration.is_plain or accepted > 20


@pytest.mark.parametrize("verifier", ["token", "gumbel", "multi-round", "traversal", "block"])
def test_every_lossless_verifier_keeps_what_the_text_goes_on_with(
    verifier: str, model: Path
) -> None:
    """Catches the claim that carries the replay of sampled logs being wrong for one of them."""
    drafter = (
        "suffix k=4" if verifier in ("token", "block") else "suffix k=7 tree=true min_probability=0"
    )
    params = [replace(SAMPLED, seed=n, temperature=0.5, top_p=0.9) for n in range(2 * len(PROMPTS))]
    assert (
        assert_same(
            Configuration.parse(f"{drafter} verifier={verifier}"), str(model), params, PROMPTS * 2
        )
        > 20
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "label", ["ngram", "suffix", "suffix tree=true", "ngram-cache", "composite parts=ngram+suffix"]
)
def test_replay_is_the_real_run_of_the_demo(label: str) -> None:
    """The same with a model that answers and ends its answers."""
    params = [SamplingParams(max_tokens=120)] * 12
    assert assert_same(Configuration.parse(label), "demo", params, list(DEMO_PROMPTS) * 2)
