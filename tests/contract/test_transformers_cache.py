"""One suite for every family that runs on transformers' own cache: its passes give the model's own
logits, and its text is the text that the model writes alone.

Compared are prefill, chunks, ragged rows in turns, rejections at every depth, steps without drafts
after them, rows that leave and come back, and whole greedy texts, speculated upon with drafts that
err, with plain decoding's and transformers' `generate`. One family of each kind runs always, all of
them at night. At the end: bugs of rolling back, which must be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.base import Drafter
from outrider.drafters.none import NoDrafter
from outrider.errors import CapabilityError
from outrider.kv.states import StateCache
from outrider.models.loading.load import build_lm, finish
from outrider.models.signals import decoder_layers
from outrider.models.stateful import lm as stateful_lm
from outrider.models.stateful.lm import StateLM
from outrider.models.stateful.state import OwnState
from outrider.sampling.params import SamplingParams
from outrider.verifiers import VERIFIERS
from tests.contract.family_reference import (
    GAMMA,
    TEXTS,
    Reference,
    begin,
    one_thread,
    random_text,
    reject_at_every_depth,
    score,
)
from tests.contract.own_cache_families import (
    NATIVE_ALONE,
    ON_TRANSFORMERS_CACHE,
    ONE_OF_EACH_KIND,
    VOCAB,
    make,
)
from tests.helpers import OracleThatErrs, make_row, run_to_end

EACH = [
    pytest.param(name, marks=() if name in ONE_OF_EACH_KIND else pytest.mark.nightly)
    for name in ON_TRANSFORMERS_CACHE
]
REFERENCE = Reference(make, tolerance=2e-4)
text_of = partial(random_text, VOCAB)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@cache
def subject(name: str) -> StateLM:
    """A family's model as it is loaded."""
    module = make(name)
    lm = build_lm(module, name, torch.float32, torch.device("cpu"))
    finish(lm, module)
    assert isinstance(lm, StateLM), f"{name} runs on our cache"
    return lm


@pytest.mark.parametrize("name", EACH)
def test_what_loading_says_of_it(name: str) -> None:
    """Catches a model reported as exact that is not, and states that weigh nothing."""
    lm = subject(name)
    assert not lm.limits.exact_rows
    assert not lm.limits.exact_trees
    assert lm.kv.bytes_per_token > 1
    assert lm.why_own_cache


@pytest.mark.parametrize("name", sorted(NATIVE_ALONE))
def test_what_passes_of_several_tokens_get_wrong_is_refused(name: str) -> None:
    """transformers' code forgets a state in these, or computes single tokens otherwise."""
    module = make(name)
    lm = build_lm(module, name, torch.float32, torch.device("cpu"))
    with pytest.raises(
        CapabilityError,
        match=r"needs transformers' own cache \(.*\), and there .*See docs/support.md",
    ) as caught:
        finish(lm, module)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", EACH)
def test_chunks(name: str) -> None:
    """Catches a chunk that begins with another state than the last one left, or at another
    position."""
    lm = subject(name)
    text = text_of(41, seed=1)
    begin(lm, text[:1])
    for start, end in ((0, 16), (16, 17), (17, 41)):
        logits = score(lm, text[start:end])[0]
        lm.kv.advance(0, end - start)
        REFERENCE.compare(name, logits, text[:end])


def rejections(name: str) -> None:
    reject_at_every_depth(subject(name), lambda logits, text: REFERENCE.compare(name, logits, text))


@pytest.mark.parametrize("name", EACH)
def test_rejections_at_every_depth(name: str) -> None:
    """Catches states that still hold what was rejected, that lack what was kept, or that rows
    share."""
    rejections(name)


@pytest.mark.parametrize("name", EACH)
def test_rows_move(name: str) -> None:
    """Catches a state that stays behind when its row takes another's slot, leaves, comes back, or
    serves as a prefix twice."""
    lm = subject(name)
    texts = [text_of(length, seed=50 + length) for length in TEXTS]
    begin(lm, *texts)
    score(lm, *[[text[-1], *text_of(GAMMA, seed=9)] for text in texts])
    for row, text in enumerate(texts):  # one draft token of each is kept
        lm.kv.keep(row, [0, 1])
        text += [text_of(GAMMA, seed=9)[0], 40 + row]
    away = lm.kv.pack(0)
    lm.kv.swap_remove(0)  # rows are now texts 2 and 1
    REFERENCE.compare(name, score(lm, [texts[2][-1], 5])[0], [*texts[2], 5])
    for _ in range(2):
        lm.kv.unpack(lm.kv.add_row(), away)
    logits = score(lm, [texts[0][-1], 8], [texts[0][-1], 9], first_row=2)
    for row, token in enumerate((8, 9)):
        REFERENCE.compare(name, logits[row], [*texts[0], token])
    lm.kv.check_integrity()


def test_a_long_backlog_gets_a_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches tokens that are fed again in pass after pass, more each time, and tokens lost where
    they are fed by themselves."""
    name = "qwen3_5_text"
    lm = subject(name)
    text = text_of(9)
    begin(lm, text)
    widths: list[int] = []
    feed = lm.own_run.feed

    def counted(state: OwnState | None, start: int, tokens: list[int], *rest: Any) -> Any:
        widths.append(len(tokens))
        return feed(state, start, tokens, *rest)

    monkeypatch.setattr(lm.own_run, "feed", counted)
    for step in range(30):
        draft = text_of(GAMMA, seed=step)
        REFERENCE.compare(name, score(lm, [text[-1], *draft])[0], text + draft)
        lm.kv.keep(0, [0, 1])
        text += [draft[0], 3 + step]
    assert len(widths) == 31, "one step of thirty needs a second pass"
    assert max(widths) <= stateful_lm.MAX_BACKLOG + GAMMA + 2


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text"])
def test_hidden_states_are_those_of_the_pass(name: str) -> None:
    """Catches states of tokens that were only fed again, which a trained head would take for the
    pass's own."""
    lm = subject(name)
    text = text_of(9)
    draft = text_of(GAMMA, seed=8)
    begin(lm, text)
    score(lm, [text[-1], *draft])
    lm.kv.keep(0, [0, 1])  # one draft token stays, to be fed again
    text += [draft[0], 5]
    with torch.inference_mode():
        hidden = lm.forward(torch.tensor([[text[-1], 6, 7]]), capture=(-1, 0, 1)).hidden
        theirs = REFERENCE.module(name).get_decoder()
        heard: list[Tensor] = []
        layers = decoder_layers(REFERENCE.module(name))
        hooks = [
            layers[layer].register_forward_pre_hook(lambda part, args: heard.append(args[0]))
            for layer in (0, 1)
        ]
        theirs(input_ids=torch.tensor([[*text, 6, 7]]), use_cache=False)
        for hook in hooks:
            hook.remove()
    assert {key: tuple(states.shape) for key, states in hidden.items()} == dict.fromkeys(
        (-1, 0, 1), (1, 3, 64)
    )
    for layer in (0, 1):
        assert (hidden[layer] - heard[layer][:, -3:]).abs().max() <= REFERENCE.tolerance * heard[
            layer
        ].abs().max()


def test_trees_are_refused() -> None:
    lm = subject("lfm2")
    text = text_of(5)
    begin(lm, text)
    with pytest.raises(CapabilityError, match="its states cannot branch"):
        lm.forward(torch.tensor([[text[-1], 4, 5]]), torch.tensor([[-1, -1]]))
    with pytest.raises(ValueError, match="keeps the beginning of a chain"):
        lm.kv.keep(0, [0, 2])


# ---------------------------------------------------------------- whole texts

# of one token nothing is read before the first pass
PROMPTS = [text_of(9, seed=70), text_of(24, seed=71), text_of(1, seed=72)]

# and the tokens to write
TEXTS_OF_EACH = [
    *((name, 100) for name in ONE_OF_EACH_KIND),
    *(pytest.param(name, 200, marks=pytest.mark.nightly) for name in ON_TRANSFORMERS_CACHE),
]


def written(name: str, drafter: Drafter, gamma: int, length: int) -> list[list[int]]:
    """What greedy rows of one batch write."""
    lm = subject(name)
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    decoder = Decoder(lm, drafter, VERIFIERS.load("block")(), FixedLength(gamma))
    while lm.kv.num_rows:
        lm.kv.swap_remove(0)
    for number, prompt in enumerate(PROMPTS):
        decoder.add(make_row(prompt, params, number=number))
    return [row.output for row in run_to_end(decoder)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), TEXTS_OF_EACH)
def test_greedy_texts(name: str, length: int) -> None:
    """Catches any of the above that a few passes do not show: a window that is full, a state that
    drifts."""
    alone = written(name, NoDrafter(), 0, length)
    drafted = written(name, OracleThatErrs(alone), GAMMA, length)
    for prompt, text, plain in zip(PROMPTS, drafted, alone, strict=True):
        REFERENCE.same_text(name, prompt, text, plain)
    for prompt, text in zip(PROMPTS[:2], alone, strict=False):
        theirs = make(name).generate(
            torch.tensor([prompt]),
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        REFERENCE.same_text(name, prompt, text, theirs[0, len(prompt) :].tolist())


# ---------------------------------------------------------------- bugs that must be found


def stale(patch: pytest.MonkeyPatch) -> None:
    """BUG: a step after a rejection goes on from the state that the rejected tokens left."""

    def reaches_less(self: StateCache[OwnState], row: int, length: int) -> None:
        self._rows[row].reached = min(self._rows[row].reached, length)

    patch.setattr(StateCache, "_go_back", reaches_less)


def not_replayed(patch: pytest.MonkeyPatch) -> None:
    """BUG: the state goes back, and what was kept of the draft is not fed again."""
    backlog = StateCache.backlog

    def forgets(self: StateCache[OwnState], row: int) -> list[int]:
        backlog(self, row)
        del self._rows[row].tokens[self._rows[row].reached :]
        return []

    patch.setattr(StateCache, "backlog", forgets)


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    """BUG: the last token that was kept is missing from what is fed again."""
    backlog = StateCache.backlog
    patch.setattr(StateCache, "backlog", lambda self, row: backlog(self, row)[:-1])


def changed_snapshot(patch: pytest.MonkeyPatch) -> None:
    """BUG: a pass writes into the snapshot that it is to be undone by."""
    patch.setattr(OwnState, "copy", lambda self: self)
    patch.setattr(OwnState, "mark", lambda self: self)
    patch.setattr(OwnState, "back_to", lambda self, mark: mark)


def shared_by_rows(patch: pytest.MonkeyPatch) -> None:
    """BUG: all rows go on from the state of the row that was fed last."""
    last: list[OwnState | None] = [None]
    opened = StateCache.open
    closed = StateCache.close

    def open_last(self: StateCache[OwnState], row: int) -> OwnState | None:
        own = opened(self, row)
        return own if own is None else last[0]

    def close_last(
        self: StateCache[OwnState], row: int, state: OwnState | None, fed: list[int]
    ) -> None:
        last[0] = state
        closed(self, row, state, fed)

    patch.setattr(StateCache, "open", open_last)
    patch.setattr(StateCache, "close", close_last)


def keeps_keys_of_the_rejected(patch: pytest.MonkeyPatch) -> None:
    """BUG: recurrent states go back, keys and values keep what was rejected."""

    def back_to(self: OwnState, mark: OwnState) -> OwnState:
        made = mark.copy()
        for layer, later in zip(made.cache.layers, self.cache.layers, strict=True):
            if isinstance(getattr(layer, "keys", None), int):
                layer.keys = later.keys
                layer.values = later.values
        return made

    patch.setattr(OwnState, "back_to", back_to)


@pytest.mark.parametrize(
    "bug",
    [stale, not_replayed, off_by_one, changed_snapshot, shared_by_rows, keeps_keys_of_the_rejected],
)
@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1"])
def test_bugs_of_rolling_back_are_found(
    name: str, bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject(name), REFERENCE.module(name)
    bug(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        rejections(name)
