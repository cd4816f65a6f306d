"""A draft model with another tokenizer: plain decoding's texts, honest distributions, and a cache
that follows its own tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.base import DraftSetup
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.model.universal import MIN_COVERAGE, UniversalDrafter, UniversalSettings
from outrider.errors import CapabilityError
from outrider.models.lm import LM
from outrider.models.loaded import LoadedModel
from outrider.models.loading.load import build_lm
from outrider.rows import Row
from outrider.sampling.params import SamplingParams
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.coupled import CoupledVerifier
from tests.helpers import byte_tokenizer, make_row, run_to_end, tiny_llama, word_tokenizer
from tests.subword import byte_level_bpe, sentencepiece_bpe

PROMPTS = ("she sells sea shells by the", "to be", "def fibonacci(number):\n    if — 😀")
METHODS = ("shared", "reencode")
MIXED = (
    SamplingParams(temperature=1.0, max_tokens=24),
    SamplingParams(max_tokens=30),
    SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.3, max_tokens=17),
)


def loaded(name: str, tokenizer: Any, seed: int) -> LoadedModel:
    lm = build_lm(
        tiny_llama(len(tokenizer), seed=seed, sharpness=2.0),
        name,
        torch.float32,
        torch.device("cpu"),
    )
    return LoadedModel(name, lm, None, tokenizer, frozenset())


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return loaded("target", byte_level_bpe(330), seed=0)


@pytest.fixture(scope="module", params=["bpe", "sentencepiece"])
def draft(request: pytest.FixtureRequest) -> LoadedModel:
    makers: dict[str, Callable[[], Any]] = {
        "bpe": lambda: byte_level_bpe(
            400, end="<eos>", text="the sea and the fox: numbers return 1, 2, 3, shells\n" * 9
        ),
        "sentencepiece": lambda: sentencepiece_bpe(360),
    }
    return loaded("draft", makers[request.param](), seed=1)


def drafter_of(target: LoadedModel, draft: LoadedModel, method: str = "auto") -> UniversalDrafter:
    return UniversalDrafter.build(DraftSetup(target, draft, 4, UniversalSettings(method)))


def row_of(target: LoadedModel, number: int, params: SamplingParams) -> Row:
    return make_row(
        target.tokenizer(PROMPTS[number])["input_ids"], params, seed=50 + number, number=number
    )


def decoded(decoder: Decoder, target: LoadedModel, *numbers: int) -> list[Row]:
    for number in numbers:
        decoder.add(row_of(target, number, MIXED[number]))
    return run_to_end(decoder)


def outputs(decoder: Decoder, target: LoadedModel, *numbers: int) -> list[list[int]]:
    return [row.output for row in decoded(decoder, target, *numbers)]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_texts_are_plain_decodings(target: LoadedModel, draft: LoadedModel, method: str) -> None:
    """Catches a draft reported with a distribution it was not drawn from, or that changes the text
    in any other way.

    Greedy text is compared; sampled text under shared noise, where a seed has one text whoever
    drafts.
    """
    plain = Decoder(target.lm, ModelDrafter(draft.lm), CoupledVerifier(), FixedLength(0))
    expected = outputs(plain, target, 0, 1, 2)
    for gamma in (1, 3, 6):
        decoder = Decoder(
            target.lm, drafter_of(target, draft, method), CoupledVerifier(), FixedLength(gamma)
        )
        assert outputs(decoder, target, 0, 1, 2) == expected


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_rows_of_a_batch_draft_as_they_do_alone(
    target: LoadedModel, draft: LoadedModel, method: str
) -> None:
    """Catches draft lengths, caches or translations that follow the batch instead of the row."""
    decoder = Decoder(target.lm, drafter_of(target, draft, method), BlockVerifier(), FixedLength(4))
    alone = [decoded(decoder, target, number)[0] for number in range(3)]
    beside = decoded(decoder, target, 0, 1, 2)
    for attribute in ("output", "origins"):
        assert [getattr(row, attribute) for row in beside] == [
            getattr(row, attribute) for row in alone
        ]
    assert [row.stats.drafted for row in beside] == [row.stats.drafted for row in alone]


@torch.inference_mode()
@pytest.mark.parametrize("method", METHODS)
def test_the_cache_is_that_of_the_drafts_own_tokens(
    target: LoadedModel, draft: LoadedModel, method: str
) -> None:
    """Catches a cache that keeps a word as it was split before more of it was known, or a rejected
    token."""
    drafter = drafter_of(target, draft, method)
    decoder = Decoder(target.lm, drafter, BlockVerifier(), FixedLength(4))
    fresh = LM(draft.lm.run, draft.lm.shape, torch.float32, torch.device("cpu"))
    for number in range(3):
        decoder.add(row_of(target, number, SamplingParams(temperature=1.0, max_tokens=60)))
    for _ in range(14):
        decoder.step()
        lengths = drafter.lm.kv.lengths
        texts = [state.context.tokens for state in drafter._rows]
        assert all(length < len(tokens) for length, tokens in zip(lengths, texts, strict=True))
        for _ in texts:
            fresh.kv.add_row()
        fresh.catch_up(
            [tokens[: length + 1] for tokens, length in zip(texts, lengths, strict=True)]
        )
        for ours, theirs in zip(drafter.lm.kv.keys, fresh.kv.keys, strict=True):
            for row, length in enumerate(lengths):
                torch.testing.assert_close(
                    ours[row, :length], theirs[row, :length], rtol=1e-4, atol=1e-4
                )
        for _ in texts:
            fresh.kv.swap_remove(0)
    while len(decoder.rows):
        decoder.remove(0)


@torch.inference_mode()
def test_shared_distributions_are_the_drafts_own_restricted(
    target: LoadedModel, draft: LoadedModel
) -> None:
    """Catches mass on a token the draft does not have, on a wrong one, or distributions that are
    not what was drawn from."""
    drafter = drafter_of(target, draft, "shared")
    decoder = Decoder(target.lm, drafter, BlockVerifier(), FixedLength(3))
    decoder.add(row_of(target, 0, SamplingParams(temperature=1.0)))
    proposal = drafter.propose(decoder.rows, [3])
    assert proposal.lists[1] == [3]
    shared = drafter.pair.to_draft
    foreign = [token for token in range(target.lm.shape.vocab_size) if token not in shared]
    assert foreign
    ids = draft.tokenizer(PROMPTS[0])["input_ids"]
    ids += [shared[token] for token in proposal.lists[0][0]]
    fresh = LM(draft.lm.run, draft.lm.shape, torch.float32, torch.device("cpu"))
    fresh.kv.add_row()
    logits = fresh.forward(torch.tensor([ids])).logits[0]
    ours, theirs = map(list, zip(*shared.items(), strict=True))
    for node in range(3):
        probs = proposal.probs[0, node]
        expected = torch.softmax(logits[len(ids) - 4 + node, theirs], dim=-1)
        torch.testing.assert_close(probs[ours], expected, rtol=1e-4, atol=1e-6)
        assert not probs[foreign].any()
    decoder.remove(0)


def test_no_shared_token_allowed_means_no_draft(target: LoadedModel, draft: LoadedModel) -> None:
    """Catches an error about masked-out distributions, in the whole batch, because of what one row
    may emit."""
    drafter = drafter_of(target, draft, "shared")
    foreign = [t for t in range(target.lm.shape.vocab_size) if t not in drafter.pair.to_draft][:2]
    params = [SamplingParams(temperature=1.0, max_tokens=6, allowed_token_ids=foreign), MIXED[0]]
    decoder = Decoder(target.lm, drafter, BlockVerifier(), FixedLength(3))
    for number, wanted in enumerate(params):
        decoder.add(row_of(target, number, wanted))
    narrow, free = run_to_end(decoder)
    assert set(narrow.output) <= set(foreign)
    assert (narrow.stats.drafted, free.stats.drafted > 0) == (0, True)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_model_under_other_ids_is_accepted(method: str) -> None:
    """Catches drafts shifted by a token or read from a wrong context: still lossless, hardly ever
    accepted.

    Its random text is full of broken characters, which must come through token by token.
    """
    target = byte_tokenizer()
    vocabulary = byte_tokenizer().get_vocab()
    turned = {token: 0 if index == 0 else 257 - index for token, index in vocabulary.items()}
    other = Tokenizer(models.BPE(vocab=turned, merges=[]))
    other.pre_tokenizer = target.backend_tokenizer.pre_tokenizer
    other.decoder = decoders.ByteLevel()
    module, moved = (tiny_llama(257, sharpness=2.0) for _ in range(2))
    for weights in (moved.model.embed_tokens.weight, moved.lm_head.weight):
        weights.data = weights.data[[0, *range(256, 0, -1)]]
    device = torch.device("cpu")
    speaker = LoadedModel(
        "target", build_lm(module, "target", torch.float32, device), None, target, frozenset()
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=other, eos_token="<|end|>")
    twin = LoadedModel(
        "twin", build_lm(moved, "twin", torch.float32, device), None, tokenizer, frozenset()
    )
    decoder = Decoder(
        speaker.lm, drafter_of(speaker, twin, method), BlockVerifier(), FixedLength(4)
    )
    decoder.add(make_row(target("to be")["input_ids"], SamplingParams(max_tokens=50)))
    row = run_to_end(decoder)[0]
    assert row.stats.tau == pytest.approx(5)
    assert "\ufffd" in target.decode(row.output)


def test_auto_follows_the_overlap(target: LoadedModel) -> None:
    """Catches the threshold read the wrong way round, and a nonsense request that is not refused."""
    near = drafter_of(target, loaded("near", byte_level_bpe(340, end="<eos>"), seed=1))
    assert (near.method, near.pair.coverage >= MIN_COVERAGE) == ("shared", True)
    words = loaded("words", word_tokenizer(40), seed=1)
    far = drafter_of(target, words)
    assert (far.method, far.pair.coverage < MIN_COVERAGE) == ("reencode", True)
    far.pair.to_draft = {}
    with pytest.raises(CapabilityError, match="no token in common"):
        UniversalDrafter(words.lm, far.pair, 330, "shared")


def test_the_plain_draft_model_points_here(target: LoadedModel) -> None:
    """Catches a refusal that does not name the way out."""
    words = loaded("words", word_tokenizer(40), seed=1)
    with pytest.raises(CapabilityError, match="--drafter universal"):
        ModelDrafter.build(DraftSetup(target, words, 4))
