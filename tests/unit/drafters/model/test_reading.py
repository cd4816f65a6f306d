"""Drafters with a model of their own among neighbours: long prompts in turns, rows that come back,
texts that begin alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.base import Drafter, DraftSetup
from outrider.drafters.lookup.ngram import NgramDrafter, NgramSettings
from outrider.drafters.lookup.prediction import PredictionDrafter
from outrider.drafters.model.draft_tree import DraftModelSettings, TreeModelDrafter
from outrider.drafters.model.reading import Turns, read_together
from outrider.drafters.model.universal import UniversalDrafter, UniversalSettings
from outrider.engine.draft_prefill import DraftPrefill
from outrider.engine.drafter_mux import DrafterMux
from outrider.models.card import unknown_card
from outrider.models.lm import LM
from outrider.models.loaded import LoadedModel
from outrider.models.loading.load import build_lm
from outrider.sampling.params import SamplingParams
from outrider.step import StepFacts
from outrider.verifiers.traversal import TraversalVerifier
from tests.helpers import byte_tokenizer, disturbed, make_row, run_to_end, tiny_llama

KINDS = ("chain", "tree", "universal")
LONG = 700
SHORT = 40
NODES = 3


def text(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + index * 7 + index * index // 3) % 250 + 1 for index in range(length)]


def loaded(name: str, module: Any) -> LoadedModel:
    return LoadedModel(
        name,
        build_lm(module, name, torch.float32, torch.device("cpu")),
        unknown_card(),
        byte_tokenizer(),
        frozenset(),
    )


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedModel, LoadedModel]:
    """A random target and a good draft for it."""
    target = tiny_llama(257, sharpness=4.0)
    return loaded("target", target), loaded("draft", disturbed(target, 0.02))


def drafter_of(kind: str, pair: tuple[LoadedModel, LoadedModel]) -> Drafter:
    if kind == "universal":
        return UniversalDrafter.build(DraftSetup(*pair, NODES, UniversalSettings("shared")))
    return TreeModelDrafter.build(
        DraftSetup(*pair, NODES, DraftModelSettings(tree="chain" if kind == "chain" else "2x1"))
    )


@pytest.fixture
def decoder(request: pytest.FixtureRequest, pair: tuple[LoadedModel, LoadedModel]) -> Decoder:
    for model in pair:
        model.lm.kv.lengths.clear()
    drafter = drafter_of(request.param, pair)
    return Decoder(
        pair[0].lm, drafter, TraversalVerifier(), DraftPrefill(drafter, FixedLength(NODES))
    )


def plain(lm: LM, tokens: list[int], count: int) -> list[int]:
    """Greedy, in one pass each: the oracle."""
    twin = lm.twin()
    text = list(tokens)
    twin.kv.add_row()
    with torch.inference_mode():
        for _ in range(count):
            twin.catch_up([text])
            text.append(int(twin.forward(torch.tensor([text[-1:]])).logits[0, 0].argmax()))
    return text[len(tokens) :]


@torch.inference_mode()
def test_texts_are_read_in_turns_and_with_the_bits_of_a_catch_up(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    """One chunk each, never much more than the budget, nobody twice before all; and only those that
    were named."""
    lm = pair[1].lm.twin()
    whole = pair[1].lm.twin()
    texts = [text(LONG, 1), text(LONG, 2), text(30, 3), text(LONG, 4)]
    for _ in texts:
        lm.kv.add_row()
        whole.kv.add_row()
    turns = Turns()
    lengths = []
    for _ in range(20):
        sizes = turns.read(
            lm, texts, [i for i in (0, 1, 2) if lm.kv.lengths[i] < len(texts[i]) - 1], 256
        )
        assert sum(sizes) < 2 * 256
        lengths.append(list(lm.kv.lengths))
    assert lengths[1][0] > 0 < lengths[1][1], "two steps, and both long texts were begun"
    assert lengths[-1] == [LONG - 1, LONG - 1, 29, 0]
    whole.catch_up([*texts[:3], [1]])
    for row in range(3):
        for mine, theirs in zip(lm.kv.read(row, 0, 29), whole.kv.read(row, 0, 29), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("decoder", KINDS, indirect=True)
def test_a_long_prompt_does_not_keep_neighbours_from_their_drafts(decoder: Decoder) -> None:
    """It decodes plainly until its draft has read it, three chunks later; all texts are plain
    decoding's."""
    prompts = [text(SHORT, 1), text(LONG, 2), text(SHORT, 3)]
    for number in (0, 2):
        decoder.add(make_row(prompts[number], SamplingParams(max_tokens=20), number=number))
    decoder.step()
    decoder.add(make_row(prompts[1], SamplingParams(max_tokens=20), number=1))
    seen: list[dict[int, int]] = []

    def observe(facts: StepFacts) -> None:
        seen.append(dict(zip((row.request for row in facts.rows), facts.drafted, strict=True)))

    decoder.observers.append(SimpleNamespace(observe=observe))
    for _ in range(4):
        decoder.step()
    assert [step[1] for step in seen[:2]] == [0, 0]
    assert seen[3][1] > 0, "700 tokens are three chunks"
    assert all(step[0] > 0 < step[2] for step in seen[:3])
    done = run_to_end(decoder)
    assert [row.output for row in done] == [plain(decoder.target, tokens, 20) for tokens in prompts]
    assert done[0].stats.accepted > 10, "a good draft, which knew its rows"
    assert decoder.drafter.lm.kv.num_rows == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("decoder", KINDS, indirect=True)
def test_a_row_that_nobody_drafts_for_is_not_read(decoder: Decoder) -> None:
    """Drafting switched off costs nothing, whoever drafts beside it; switched on later, it is read
    then."""
    prompts = [text(SHORT, 1), text(SHORT, 2)]
    for number, tokens in enumerate(prompts):
        decoder.add(make_row(tokens, SamplingParams(max_tokens=24), number=number))
    decoder.rows[1].draft_bound = 0
    decoder.rows[1].draft_fixed = True
    for _ in range(3):
        decoder.step()
    assert decoder.drafter.lm.kv.lengths[1] == 0  # type: ignore[attr-defined]
    assert decoder.rows[1].stats.drafted == 0
    decoder.rows[1].draft_bound = None
    decoder.rows[1].draft_fixed = False
    done = run_to_end(decoder)
    assert done[1].stats.accepted > 5
    assert [row.output for row in done] == [plain(decoder.target, tokens, 24) for tokens in prompts]


@pytest.mark.parametrize("decoder", KINDS, indirect=True)
def test_a_row_comes_back_with_what_its_drafter_knew(decoder: Decoder) -> None:
    """Nothing is read again, and it drafts in its first step."""
    prompts = [text(SHORT, 1), text(LONG, 2), text(SHORT, 3)]
    for number, tokens in enumerate(prompts):
        decoder.add(make_row(tokens, SamplingParams(max_tokens=30), number=number))
    for _ in range(5):
        decoder.step()
    kept = decoder.target.kv.read(1, 0, decoder.target.kv.lengths[1])
    state = decoder.drafter.pack(1)
    row = decoder.remove(1)
    decoder.step()
    decoder.add(row)
    decoder.target.kv.put(2, 0, kept)
    decoder.drafter.unpack(state)
    drafted = row.stats.drafted
    decoder.step()
    assert row.stats.drafted > drafted
    assert [done.output for done in run_to_end(decoder)] == [
        plain(decoder.target, tokens, 30) for tokens in prompts
    ]


@pytest.mark.parametrize("decoder", KINDS, indirect=True)
def test_what_is_unread_is_what_preparing_reads(decoder: Decoder) -> None:
    """A new text but for its last token; after its reading and a draft, what the next draft begins
    with."""
    for number, length in enumerate((SHORT, LONG)):
        decoder.add(make_row(text(length, number), SamplingParams(max_tokens=30), number=number))
    assert decoder.drafter.unread(decoder.rows) == [SHORT - 1, LONG - 1]
    for _ in range(5):
        decoder.step()
    assert max(decoder.drafter.unread(decoder.rows)) <= 2


@pytest.mark.parametrize("decoder", ["chain", "tree"], indirect=True)
def test_a_draft_after_a_pause_finds_its_text_read(decoder: Decoder) -> None:
    """Of the rows that are asked, but for what a draft begins with anyway."""
    for number in range(2):
        decoder.add(make_row(text(SHORT, number), SamplingParams(max_tokens=30), number=number))
    decoder.drafter.catch_up(decoder.rows, [0, 0])
    assert decoder.drafter.unread(decoder.rows) == [SHORT - 1, SHORT - 1]
    decoder.drafter.catch_up(decoder.rows, [3, 0])
    assert decoder.drafter.unread(decoder.rows) == [0, SHORT - 1]


def test_a_row_is_unread_by_its_own_drafter_only(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """Beside a look-up, and in a batch where one row follows a prediction."""
    for model in pair:
        model.lm.kv.lengths.clear()
    copies = NgramDrafter.build(DraftSetup(*pair, NODES, NgramSettings()))
    model = drafter_of("chain", pair)
    drafter = DrafterMux(
        {"model": model, "copy": copies, "prediction": PredictionDrafter()},
        "model",
    )
    decoder = Decoder(
        pair[0].lm, drafter, TraversalVerifier(), DraftPrefill(drafter, FixedLength(NODES))
    )
    rows = [
        make_row(text(SHORT, number), SamplingParams(max_tokens=5), number=number)
        for number in range(3)
    ]
    rows[2].prediction = [1, 2, 3]
    for owner, row in zip(("model", "copy", "model"), rows, strict=True):
        drafter.next_owner = owner
        decoder.add(row)
    assert drafter.unread(decoder.rows) == [SHORT - 1, 0, 0]
    drafter.catch_up(decoder.rows, [NODES] * 3)
    assert model.lm.kv.lengths == [SHORT - 1, 0, 0]
    run_to_end(decoder)


@torch.inference_mode()
def test_rows_that_lag_a_little_are_read_together(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """In one pass, with the keys of reading one by one; who lags far, or alone, is left to the
    chunks."""
    lm = pair[1].lm.twin()
    alone = pair[1].lm.twin()
    texts = [text(60, number) for number in range(4)]
    for twin in (lm, alone):
        for _ in texts:
            twin.kv.add_row()
        twin.catch_up([texts[0][:51], texts[1], texts[2][:58], texts[3][:20]])
    assert read_together(lm, texts, [0, 1, 2, 3]) == [9, 2]
    assert lm.kv.lengths == [59, 59, 59, 19]
    assert read_together(lm, [[*line, 1] for line in texts[:1]] + texts[1:], [0, 1, 2, 3]) == []
    alone.catch_up(texts)
    for row in (0, 2):
        for mine, theirs in zip(lm.kv.read(row, 0, 59), alone.kv.read(row, 0, 59), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-5)
