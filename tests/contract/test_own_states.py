"""One suite for every family whose running states are in our cache, on the native runtime.

Its logits are transformers' up to rounding, and each token's bits are those of plain decoding: in
batches of ragged rows, in prompts cut anywhere, after rejections at every depth, steps without
drafts, rows that leave and come back. One family of each kind runs always, all of them at night. At
the end: bugs of rolling back, which must be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from outrider.cache import cache_folder
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.base import Drafter
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.none import NoDrafter
from outrider.kv import state_slots
from outrider.kv.state_slots import HELD_BACK, LAG, StatePass, StateSlots
from outrider.models.lm import LM
from outrider.models.loading.load import build_lm
from outrider.models.stateful.lm import StateLM
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.drafting import ChainLoop
from outrider.runtime.limits import find_native_limits
from outrider.runtime.own_states import native_states
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
from tests.contract.own_cache_families import NATIVE, VOCAB, make
from tests.helpers import OracleThatErrs, make_row, run_to_end
from tests.older_transformers import skip_older
from tests.unit.runtime.test_drafting import KINDS as KINDS_OF_ROWS
from tests.unit.runtime.test_drafting import Watched, batch, step_by_step

# Delta rules with a decay for a head and for each number, Mamba 2, a convolution alone, Mamba 1,
# lightning attention
KINDS = ("qwen3_5_text", "kimi_linear", "falcon_h1", "lfm2", "mamba", "minimax")
EACH = [pytest.param(name, marks=() if name in KINDS else pytest.mark.nightly) for name in NATIVE]
DTYPES = [torch.float32, torch.bfloat16]
REFERENCE = Reference(make, tolerance=2e-4)
text_of = partial(random_text, VOCAB)
# transformers' steps of one token leave out the smallest time step, its passes and ours do not
STEPS_DIFFER = {"zamba2"}
Bug = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread(), torch.inference_mode():
        yield


def subject(name: str, dtype: torch.dtype = torch.float32) -> LM:
    """A family's model as it is loaded."""
    return _loaded(name, dtype)


@cache
def _loaded(name: str, dtype: torch.dtype) -> LM:
    module = make(name, dtype)
    lm = build_lm(module, name, dtype, torch.device("cpu"))
    assert isinstance(lm, StateLM)
    try:
        made = native_states(lm, module, cache_folder())
    except NotLoweredError as error:
        if Version(transformers.__version__) < Version("5.23"):
            pytest.skip(f"transformers {transformers.__version__}: {error}")
        raise
    made.limits = find_native_limits(made)
    return made


def plain(lm: LM, text: list[int], count: int) -> Tensor:
    """Logits (count, V) of a text's last tokens, one pass each, in a cache of their own."""
    own = lm.twin()
    begin(own, text[: len(text) - count + 1])
    found = []
    for token in text[len(text) - count :]:
        found.append(score(own, [token])[0, 0])
        own.kv.advance(0, 1)
    return torch.stack(found)


@pytest.mark.parametrize("name", EACH)
def test_masks_leave_nothing_in_a_state(name: str) -> None:
    """A draft model of this kind with a mask token: its guesses are those of a fresh start, however
    much of the draft before was kept."""
    drafter = ModelDrafter(subject(name).twin(), None, None, 4)
    rows = batch([SamplingParams(max_tokens=90)])
    drafter.start(rows[0])
    for length, kept in ((5, 5), (6, 0), (1, 1), (9, 3), (4, 2)):
        draft = drafter.propose(rows, [length])
        fresh = subject(name).twin()
        begin(fresh, rows[0].tokens)
        masked = [rows[0].tokens[-1], *[4] * (length - 1)]
        assert draft.tokens[0].tolist() == score(fresh, masked)[0].argmax(-1).tolist()
        rows[0].tokens += [*draft.tokens[0, :kept].tolist(), 9]
        drafter.lm.kv.truncate(0, len(rows[0].tokens) - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EACH)
def test_it_is_found_exact_when_it_is_loaded(name: str, dtype: torch.dtype) -> None:
    lm = subject(name, dtype)
    assert lm.limits.exact_rows
    assert lm.limits.exact_trees
    assert lm.why_own_cache is None
    assert isinstance(lm.kv, StateSlots)
    assert lm.kv.bytes_per_token > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EACH)
def test_chunks(name: str, dtype: torch.dtype) -> None:
    """Catches a chunk that begins with another state than the last one left, or at another
    position."""
    lm = subject(name, dtype)
    text = text_of(90, seed=1)
    parts = []
    begin(lm, text[:1])
    for start, end in ((0, 16), (16, 17), (17, 18), (18, 80), (80, 90)):
        parts.append(score(lm, text[start:end])[0])
        lm.kv.advance(0, end - start)
    if dtype == torch.float32:
        REFERENCE.compare(name, torch.cat(parts), text)
    assert torch.equal(torch.cat(parts), plain(lm, text, len(text)))


def rejections(name: str, dtype: torch.dtype) -> None:
    """Rejects drafts at every depth; compares all logits with transformers' and, to the bit, with
    those of single tokens."""
    lm = subject(name, dtype)

    def check(logits: Tensor, text: list[int]) -> None:
        if dtype == torch.float32:
            REFERENCE.compare(name, logits, text)
        assert torch.equal(logits, plain(lm, text, len(logits)))

    reject_at_every_depth(lm, check)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EACH)
def test_rejections_at_every_depth(name: str, dtype: torch.dtype) -> None:
    """Catches states that still hold what was rejected, that lack what was kept, or that rows
    share."""
    rejections(name, dtype)


# The parents of a tree's nodes behind the pending token, row by row, and paths that are kept in
# turn, pending token first. The last tree has one branch: all of it may be kept
TREES = [[-1, -1, 0, 2, 1, 3, 4, 0], [-1, 0, -1, 2, 2, 4, 5, -1], [-1, 0, 1, 2, 3, 4, 5, 6]]
PATHS = [
    [[0, 1, 3, 4, 6], [0, 2, 5, 7], [0, 2], [0], [0, 1, 8]],
    [[0, 8], [0, 3, 5, 6, 7], [0, 1, 2], [0, 3, 4], [0]],
    [[0, 1, 2], [*range(9)], [0], [*range(9)], [0, 1, 2, 3, 4]],
]


def branches(name: str, dtype: torch.dtype) -> None:
    """Keeps paths of trees, in ragged rows and with other passes in between; all nodes have the
    bits that they have as chains."""
    lm = subject(name, dtype)
    parents = torch.tensor(TREES)
    texts = [text_of(length, seed=length) for length in TEXTS]
    begin(lm, *texts)
    for step in range(len(PATHS[0])):
        drafts = [
            [text[-1], *text_of(parents.shape[1], seed=100 * step + row)]
            for row, text in enumerate(texts)
        ]
        logits = lm.forward(torch.tensor(drafts), parents).logits
        for row, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            for path in (paths[row] for paths in zip(*PATHS, strict=True)):
                branch = [*text, *(draft[column] for column in path[1:])]
                if dtype == torch.float32:
                    REFERENCE.compare(name, logits[row, path], branch)
                assert torch.equal(logits[row, path], plain(lm, branch, len(path)))
            lm.kv.keep(row, PATHS[row][step])
            text += [*(draft[column] for column in PATHS[row][step][1:]), 7 + row]
        lm.kv.check_integrity()
        for row, passed in (
            enumerate(score(lm, *[[text[-1], 5] for text in texts])) if step % 2 else ()
        ):
            assert torch.equal(passed, plain(lm, [*texts[row], 5], 2))
            lm.kv.keep(row, [0])
            texts[row].append(30 + step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EACH)
def test_trees(name: str, dtype: torch.dtype) -> None:
    """Catches a token that goes on from another branch's state, and a kept path whose states are
    those of what it was among."""
    branches(name, dtype)


@pytest.mark.parametrize("name", EACH)
def test_rows_move(name: str) -> None:
    """Catches a state that stays behind when its row takes another's slot, leaves, comes back, or
    serves as a prefix twice."""
    lm = subject(name)
    texts = [text_of(length, seed=50 + length) for length in TEXTS]
    draft = text_of(GAMMA, seed=9)
    begin(lm, *texts)
    score(lm, *[[text[-1], *draft] for text in texts])
    for row, text in enumerate(texts):
        lm.kv.keep(row, [0, 1])  # one draft token is kept
        text += [draft[0], 40 + row]
    away = lm.kv.pack(0)
    whole = lm.twin()
    lm.kv.swap_remove(0)  # rows are now texts 2 and 1
    assert torch.equal(score(lm, [texts[2][-1], 5])[0], plain(lm, [*texts[2], 5], 2))
    begin(whole, texts[0])
    for packed in (away, whole.kv.pack(0)):  # in front of its records, and at its tip
        lm.kv.unpack(lm.kv.add_row(), packed)
    logits = score(lm, [texts[0][-1], 8], [texts[0][-1], 9], first_row=2)
    for row, token in enumerate((8, 9)):
        assert torch.equal(logits[row], plain(lm, [*texts[0], token], 2))
    lm.kv.check_integrity()


@pytest.mark.parametrize("length", [HELD_BACK - 2, LAG + 3])
@pytest.mark.parametrize("name", KINDS)
def test_a_draft_of_many_passes_is_taken_back(name: str, length: int) -> None:
    """Catches a draft model that goes on from its rejected tokens, or that does not read again what
    its states have lost."""
    lm = subject(name)
    text = text_of(9)
    begin(lm, text)
    for token in [text[-1], *text_of(length, seed=3)]:
        score(lm, [token])
        lm.kv.advance(0, 1)
    lm.kv.truncate(0, len(text) + 1)  # a draft token is kept
    held = lm.kv.lengths[0]
    assert held == (len(text) + 1 if length < HELD_BACK else 0)
    text += [text_of(length, seed=3)[0], 20]
    lm.catch_up([text])
    assert torch.equal(score(lm, [text[-1], 6])[0], plain(lm, [*text, 6], 2))


def test_some_of_a_long_prompt_cannot_be_committed() -> None:
    """Catches a state that is reported but absent: passes that read a text keep it before and after
    them only."""
    lm = subject("lfm2").twin()
    text = text_of(80)
    begin(lm, text[:2])
    lm.forward(torch.tensor([text[1:]]), columns=torch.tensor([0]))
    with pytest.raises(ValueError, match="not at 41"):
        lm.kv.advance(0, 40)
    lm.kv.truncate(0, 1)
    assert torch.equal(score(lm, text[1:5])[0], plain(lm, text[:5], 4))


# ---------------------------------------------------------------- whole texts

PROMPTS = [text_of(length, seed=70 + length) for length in (1, 7, 19)]
# and the tokens to write
TEXTS_OF_EACH = [
    *((name, 100) for name in KINDS),
    *(pytest.param(name, 200, marks=pytest.mark.nightly) for name in NATIVE),
]


def written(name: str, drafter: Drafter, gamma: int, length: int) -> list[list[int]]:
    """What greedy rows of one batch write."""
    lm = subject(name)
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    decoder = Decoder(lm, drafter, VERIFIERS.load("block")(), FixedLength(gamma))
    lm.kv.clear()
    for number, prompt in enumerate(PROMPTS):
        decoder.add(make_row(prompt, params, number=number))
    return [row.output for row in run_to_end(decoder)]


@pytest.mark.parametrize(("name", "length"), TEXTS_OF_EACH)
def test_greedy_texts(name: str, length: int) -> None:
    """Catches any of the above that a few passes do not show: a state that drifts."""
    expected = written(name, NoDrafter(), 0, length)
    assert written(name, OracleThatErrs(expected), GAMMA, length) == expected
    theirs = make(name).generate(
        torch.tensor([PROMPTS[1]]),
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=name not in STEPS_DIFFER,
    )
    assert expected[1] == theirs[0, len(PROMPTS[1]) :].tolist()


@pytest.mark.parametrize("name", KINDS)
def test_chains_of_a_draft_model(name: str) -> None:
    """Catches states of passes in one call that are not those of passes one by one: a padded token
    that stays in a state, a rejection that is not taken back, a row that moves as its neighbour."""
    lm = subject(name).twin()
    loop = Watched(lm, lm.run, VOCAB)  # type: ignore[arg-type]
    params = [KINDS_OF_ROWS[kind] for kind in ("greedy", "hot", "all filters")]
    step_by_step(
        (ModelDrafter(lm, loop), ModelDrafter(lm.twin())),
        batch(params, (1,)),
        [4, 1, 5, 3, 8, 2, 1, 1, 6],
    )
    assert loop.calls == 9


def test_a_long_chain_is_drafted_token_by_token() -> None:
    """Catches a draft that leaves no state to go back to."""
    lm = subject("lfm2").twin()
    begin(lm, text_of(9))
    loop, rows = ChainLoop(lm, lm.run, VOCAB), batch([SamplingParams()])  # type: ignore[arg-type]
    assert loop.draft(rows, [[5]], HELD_BACK) is None
    assert loop.draft(rows, [[5]], HELD_BACK - 1) is not None


# ---------------------------------------------------------------- bugs that must be found


def changed(patch: pytest.MonkeyPatch, change: Callable[[np.ndarray], None]) -> None:
    """All passes move their states otherwise."""
    begun = StateSlots.begin

    def begin_otherwise(self: StateSlots, *args: Any, **kwargs: Any) -> StatePass:
        found = begun(self, *args, **kwargs)
        change(found.moves)
        return found

    patch.setattr(StateSlots, "begin", begin_otherwise)


def stale(patch: pytest.MonkeyPatch) -> None:
    """BUG: a step after a rejection goes on from the state that the rejected tokens left."""

    def from_tip(moves: np.ndarray) -> None:
        rolled_back = moves[:, 0] == moves[:, 3]
        moves[rolled_back, 3] = 1 - moves[rolled_back, 3]

    changed(patch, from_tip)


def not_replayed(patch: pytest.MonkeyPatch) -> None:
    """BUG: the state goes back, and what was kept of the draft is not brought into it."""

    def nothing(moves: np.ndarray) -> None:
        moves[:, 1] = moves[:, 2]

    changed(patch, nothing)


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    """BUG: the last token that was kept is not brought into the state."""

    def one_less(moves: np.ndarray) -> None:
        moves[:, 2] = np.maximum(moves[:, 1], moves[:, 2] - 1)

    changed(patch, one_less)


def not_recorded(patch: pytest.MonkeyPatch) -> None:
    """BUG: a pass does not write down what its tokens gave."""

    def silent(moves: np.ndarray) -> None:
        moves[:, 5] = 0

    changed(patch, silent)


def base_is_overwritten(patch: pytest.MonkeyPatch) -> None:
    """BUG: a pass leaves its state in the buffer that it is to be undone by."""

    def onto_base(moves: np.ndarray) -> None:
        moves[:, 4] = moves[:, 3]

    changed(patch, onto_base)


def shared_by_rows(patch: pytest.MonkeyPatch) -> None:
    """BUG: all rows move as the first one does."""

    def alike(moves: np.ndarray) -> None:
        moves[:] = moves[0]

    changed(patch, alike)


def too_few_records(patch: pytest.MonkeyPatch) -> None:
    """BUG: records of a pass lie on those that it brings into the base. Seen where heads share
    them: others are read in time."""
    patch.setattr(state_slots, "NUM_RECORDS", GAMMA + 1)
    patch.setattr(StateSlots, "_make_records", lambda self, count: None)
    moved = state_slots._moved
    patch.setattr(
        state_slots,
        "_moved",
        lambda line, start, width, n: _all_recorded(*moved(line, start, width, 1 << 30)),
    )


def _all_recorded(line: Any, move: Any) -> tuple[Any, Any]:
    return line, replace(move, is_recorded=1)


BUGS = [stale, not_replayed, off_by_one, not_recorded, base_is_overwritten, shared_by_rows]


def lost_records(number: int) -> Bug:
    """BUG: one operation finds no records of the tokens that were kept."""

    def lose(patch: pytest.MonkeyPatch) -> None:
        begun = StateSlots.begin

        def begin_without(self: StateSlots, *args: Any, **kwargs: Any) -> StatePass:
            found = begun(self, *args, **kwargs)
            records = list(found.records)
            records[number] = torch.zeros_like(records[number])
            return replace(found, records=records)

        patch.setattr(StateSlots, "begin", begin_without)

    return lose


def records_stay(patch: pytest.MonkeyPatch) -> None:
    """BUG: the records of a kept path stay among those of the tree."""
    patch.setattr(StateSlots, "_move_records", lambda self, *args: None)


def tip_of_a_tree(patch: pytest.MonkeyPatch) -> None:
    """BUG: a tree is taken for a chain, whose last token leaves a state."""
    begun = StateSlots.begin

    def begin_a_chain(
        self: StateSlots, *args: Any, in_tree: bool = False, **kwargs: Any
    ) -> StatePass:
        return begun(self, *args, **kwargs)

    patch.setattr(StateSlots, "begin", begin_a_chain)


@pytest.mark.parametrize("bug", [records_stay, tip_of_a_tree, *BUGS])
@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba"])
def test_bugs_of_trees_are_found(name: str, bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = subject(name)
    bug(monkeypatch)
    monkeypatch.setattr(lm, "kv", lm.twin().kv)
    with pytest.raises(AssertionError):
        branches(name, torch.float32)


# convolution and what follows it, or a delta rule alone
@pytest.mark.parametrize(
    ("name", "number"), [("falcon_h1", 0), ("falcon_h1", 1), ("mamba", 1), ("minimax", 0)]
)
def test_lost_records_of_any_operation_are_found(
    name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = subject(name)
    lost_records(number)(monkeypatch)
    monkeypatch.setattr(lm, "kv", lm.twin().kv)
    with pytest.raises(AssertionError):
        rejections(name, torch.float32)


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        *((name, bug) for name in ("qwen3_5_text", "lfm2") for bug in BUGS),
        ("falcon_h1", too_few_records),
        pytest.param(
            "qwen3_5_text",
            too_few_records,
            marks=skip_older("it repeats keys, so no heads share a record: none is lost"),
        ),
    ],
)
def test_bugs_of_rolling_back_are_found(
    name: str, bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = subject(name)
    bug(monkeypatch)
    monkeypatch.setattr(lm, "kv", lm.twin().kv)
    with pytest.raises(AssertionError):
        rejections(name, torch.float32)
