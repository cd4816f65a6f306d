"""EAGLE heads at work: what they are fed, what they forget, and that batches, trees and gaps do not
confuse them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.build import Options, build
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.base import DraftSetup
from outrider.drafters.heads.eagle import Eagle3Drafter, EagleDrafter, EagleSettings
from outrider.drafters.heads.feature_fed import FedTree
from outrider.drafters.model.draft_tree import TreeModelDrafter
from outrider.errors import CapabilityError, CheckpointError, ConfigError
from outrider.models.heads.eagle import EagleHead
from outrider.models.heads.eagle_files import save_eagle
from outrider.models.loaded import LoadedModel, Tables
from outrider.models.loading.load import build_lm
from outrider.models.loading.read_card import card_of
from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from outrider.verifiers.coupled import CoupledVerifier
from outrider.verifiers.traversal import TraversalVerifier
from tests.heads import random_eagle
from tests.helpers import byte_tokenizer, make_row, run_to_end, save_checkpoint, tiny_llama

VOCAB = 60
CPU = torch.device("cpu")
KINDS = ("eagle", "eagle3")
PROMPTS = ([5, 6, 7, 8, 9, 10], [3, 4, 5, 3, 4, 5, 3, 4], [11])


def loaded_target() -> LoadedModel:
    module = tiny_llama(VOCAB, sharpness=2.0).requires_grad_(False)
    lm = build_lm(module, "tiny", torch.float32, CPU)
    return LoadedModel(
        "tiny", lm, card_of(module.config), None, frozenset(), tables=Tables.of(module)
    )


def drafter_of(target: LoadedModel, folder: Path, kind: str, **settings: Any) -> Any:
    kinds = {"eagle": EagleDrafter, "eagle3": Eagle3Drafter}
    return kinds[kind].build(DraftSetup(target, None, 4, EagleSettings(**settings), str(folder)))


def saved_head(folder: Path, kind: str, **changes: Any) -> Path:
    save_eagle(random_eagle(kind, tiny_llama(VOCAB).config, **changes), folder)
    return folder


def decoder_of(target: LoadedModel, drafter: Any, gamma: int = 4) -> Decoder:
    return Decoder(target.lm, drafter, TraversalVerifier.build(None), FixedLength(gamma))


@torch.inference_mode()
def plain_states(head: EagleHead, tokens: list[int], features: Tensor, window: int = 0) -> Tensor:
    """(n, H): the head over a whole text at once, with an ordinary causal attention that sees back
    as far as a window. Pairs (tokens[i], features[i])."""
    back = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
    sees = (back >= 0) & (back < (window or len(tokens)))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=sees, enable_gqa=True
        )
        return out.transpose(1, 2)

    positions = torch.arange(len(tokens))[None]
    return head(torch.tensor([tokens]), features[None], positions, attend)[0]


@pytest.mark.parametrize("kind", [*KINDS, "peagle"])
@pytest.mark.parametrize("tree", ["chain", "best-first", "2x2x1"])
@pytest.mark.parametrize("window", [0, 6])
@torch.inference_mode()
def test_what_is_drafted_is_what_the_head_says(
    tmp_path: Path, kind: str, tree: str, window: int
) -> None:
    """Catches a token beside the wrong feature, a drafted state kept as if it were the target's
    feature, a tree node that reads a state other than its parent's: every greedy draft is computed
    again from the text, with nothing remembered."""
    target = loaded_target()
    masked: dict[str, Any] = {"num_layers": 2, "mask_token": 7} if kind == "peagle" else {}
    kind = "eagle3" if masked else kind
    folder = saved_head(tmp_path, kind, **masked)
    drafter = drafter_of(target, folder, kind, tree=tree, window=window)
    decoder = decoder_of(target, drafter)
    for number, prompt in enumerate(PROMPTS):
        decoder.add(
            make_row(
                prompt,
                SamplingParams(max_tokens=30, temperature=[0.0, 1.0, 0.3][number]),
                seed=number,
            )
        )
    head = drafter.lm.head
    checked = 0
    for _ in range(8):
        decoder.step()
        draft = drafter.propose(decoder.rows, [4, 4, 4])
        for index, row in enumerate(decoder.rows):
            if not row.params.is_greedy and index != 2:
                # row 2 has a temperature, below which trees are greedy: its chains are drawn
                continue
            if index == 2 and tree == "chain":
                continue
            checked += check_draft(target, head, row.tokens, draft, index, window)
    assert checked > 20


def check_draft(
    target: LoadedModel,
    head: EagleHead,
    tokens: list[int],
    draft: Any,
    index: int,
    window: int = 0,
) -> int:
    """Every drafted node must be among the head's likeliest behind its parent; a chain's the
    likeliest."""
    alone = target.lm.twin()
    alone.kv.add_row()
    hidden = alone.forward(torch.tensor([tokens]), capture=head.config.signals).hidden
    features = head.features({key: states[0] for key, states in hidden.items()})[:-1]
    mask_token = head.config.mask_token
    nodes = draft.lists[1][index]
    for node in range(nodes):
        path = []
        at = draft.parent_lists[index][node]
        while at >= 0:
            path.insert(0, draft.lists[0][index][at])
            at = draft.parent_lists[index][at]
        text = tokens[1:]
        known = features
        states = plain_states(head, text, known, window)
        for token in path:
            feature = head.carry(states[-1:])
            if head.mask_hidden is not None:
                feature = head.fuse(head.mask_hidden[None])
            known = torch.cat([known, feature])
            text = [*text, token if mask_token is None else mask_token]
            states = plain_states(head, text, known, window)
        probs = (head.in_full(head.logits(states[-1])) / (0.3 if index == 2 else 1.0)).softmax(-1)
        mine = probs[draft.lists[0][index][node]]
        rank = int((probs > mine * (1 + 1e-4)).sum())
        # among impossible ones nothing ranks
        assert rank <= (0 if draft.parents is None else 3) or mine == 0, (node, rank)
    return nodes


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_read_in_part(tmp_path: Path, kind: str) -> None:
    """Catches a head that takes the first feature it hears for the one of position 0: here the
    beginning comes from a store."""
    target = loaded_target()
    drafter = drafter_of(target, saved_head(tmp_path, kind), kind)
    decoder = decoder_of(target, drafter)
    prompt = list(range(3, 23))
    decoder.add(make_row(prompt, SamplingParams(max_tokens=20), seed=0))
    with torch.inference_mode():
        target.lm.catch_up([[*prompt[:12], 0]])  # nobody listens
    for _ in range(4):
        decoder.step()
    fed = drafter._fed[0]
    assert fed.begin == 12
    tokens = decoder.rows[0].tokens
    alone = target.lm.twin()
    with torch.inference_mode():
        alone.kv.add_row()
        hidden = alone.forward(torch.tensor([tokens]), capture=drafter.signals).hidden
        features = drafter.lm.head.features({key: states[0] for key, states in hidden.items()})[
            12:-1
        ]
        states = plain_states(drafter.lm.head, tokens[13:], features)
        draft = drafter.propose(decoder.rows, [1])
    assert draft.lists[0][0][0] == int(
        drafter.lm.head.in_full(drafter.lm.head.logits(states[-1])).argmax()
    )


class Idle(FixedLength):
    """A controller that has found that drafting does not pay."""

    def choose(self, rows: Rows) -> list[int]:
        return [0] * len(rows)


def test_idle_steps_cost_no_memory_and_no_state(tmp_path: Path) -> None:
    """Catches features that pile up while nothing is drafted, or are lost then, and a first draft
    that reads them all itself."""
    target = loaded_target()
    drafter, fresh = (
        drafter_of(target, saved_head(tmp_path, "eagle3"), "eagle3") for _ in range(2)
    )
    decoder = decoder_of(target, drafter)
    decoder.control = Idle(1)
    decoder.add(make_row(PROMPTS[0], SamplingParams(max_tokens=300), seed=0))
    for _ in range(140):
        decoder.step()
    assert len(drafter._aside) < 64
    assert drafter._fed[0].num_waiting <= 64
    text = list(decoder.rows[0].tokens)
    drafter.catch_up(decoder.rows, [0])
    assert drafter.lm.kv.lengths[0] < len(text) - 2, "nobody asked"
    drafter.catch_up(decoder.rows, [3])
    assert drafter.lm.kv.lengths == [len(text) - 2]
    drafted = drafter.propose(decoder.rows, [3]).lists[0]
    decoder.remove(0)
    again = decoder_of(target, fresh)
    again.add(make_row(text, SamplingParams(max_tokens=300), seed=0))
    with torch.inference_mode():
        again.catch_up()
        assert fresh.propose(again.rows, [3]).lists[0] == drafted


@pytest.mark.parametrize("tree", ["chain", "2x2x1"])
def test_nothing_is_drafted_beyond_the_heads_own_context(tmp_path: Path, tree: str) -> None:
    """Catches drafts for positions that the head cannot tell apart, a cache that goes on growing, a
    neighbour that stops."""
    target = loaded_target()
    drafter = drafter_of(
        target, saved_head(tmp_path, "eagle3", max_position_embeddings=20), "eagle3", tree=tree
    )
    assert drafter.notes == [
        f"head '{tmp_path}' knows 20 positions, its target 2048: beyond 20 nothing is drafted"
    ]
    decoder = decoder_of(target, drafter)
    for number, length in enumerate((4, 16, 25)):
        decoder.add(
            make_row(
                list(range(3, 3 + length)),
                SamplingParams(max_tokens=30, ignore_eos=True),
                number=number,
            )
        )
    decoder.step()  # reads the prompts
    while len(decoder.rows[0].tokens) < 20:
        room = [max(0, 20 - len(row.tokens)) for row in decoder.rows]
        with torch.inference_mode():
            lengths = drafter.propose(decoder.rows, [4, 4, 4]).lengths.tolist()
        assert [count > 0 for count in lengths] == [limit > 0 for limit in room]
        assert tree != "chain" or all(
            count <= limit for count, limit in zip(lengths, room, strict=True)
        )
        decoder.step()
    before = list(drafter.lm.kv.lengths)
    assert before[2] == 0
    assert max(before) < 20
    decoder.step()  # nobody drafts
    assert drafter.lm.kv.lengths == before
    assert [fed.num_waiting for fed in drafter._fed] == [0, 0, 0]


@pytest.mark.parametrize("tree", ["chain", "2x2x1"])
def test_with_a_window_a_head_drafts_beyond_the_texts_it_knows(tmp_path: Path, tree: str) -> None:
    """Catches a limit that stays, a cache that keeps what no window reaches, a draft of other
    tokens than the head says far beyond the texts it knows."""
    target = loaded_target()
    folder = saved_head(tmp_path, "eagle3", max_position_embeddings=20)
    drafter = drafter_of(target, folder, "eagle3", tree=tree, window=8)
    assert drafter.notes == []
    decoder = decoder_of(target, drafter)
    text = [3 + number % 50 for number in range(1200)]
    decoder.add(make_row(text, SamplingParams(max_tokens=30, ignore_eos=True)))
    checked = 0
    for _ in range(4):
        decoder.step()
        with torch.inference_mode():
            draft = drafter.propose(decoder.rows, [4])
            checked += check_draft(target, drafter.lm.head, decoder.rows[0].tokens, draft, 0, 8)
    assert checked >= 12
    cache = drafter.lm.kv
    assert cache.lengths[0] > 1190
    assert cache.window_capacity < cache.capacity


def test_auto_is_what_the_head_knows(tmp_path: Path) -> None:
    target = loaded_target()
    folder = saved_head(tmp_path, "eagle3", max_position_embeddings=20)
    drafter = drafter_of(target, folder, "eagle3", window="auto")
    assert drafter.notes == [f"window=auto: '{folder}' sees the last 20 tokens while it drafts"]
    assert drafter.lm.shape.sliding_window == drafter.lm.kv.window == 20


def test_a_window_smaller_than_the_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="window=3 is smaller than a draft of 4 tokens: at least 5"
    ):
        drafter_of(loaded_target(), saved_head(tmp_path, "eagle"), "eagle", window=3)


def test_a_head_that_does_not_say_what_it_knows_drafts_to_the_end(tmp_path: Path) -> None:
    """Catches a default length in place of one that no file names."""
    target = loaded_target()
    folder = saved_head(tmp_path, "eagle")
    assert "max_position_embeddings" not in (folder / "config.json").read_text(encoding="utf-8")
    drafter = drafter_of(target, folder, "eagle")
    assert drafter.notes == []
    assert drafter.lm.shape.context_length == target.lm.shape.context_length


def test_sampled_distributions_are_zero_outside_the_draft_vocabulary(tmp_path: Path) -> None:
    """Catches a distribution over the head's own ids handed over as one over the target's (pitfall
    8)."""
    target = loaded_target()
    drafter = drafter_of(target, saved_head(tmp_path, "eagle3", draft_vocab=20), "eagle3")
    ids = drafter.lm.head.draft_ids.tolist()
    decoder = decoder_of(target, drafter)
    decoder.add(make_row(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=20), seed=0))
    decoder.step()
    draft = drafter.propose(decoder.rows, [4])
    assert draft.probs is not None
    assert draft.probs.shape == (1, 5, VOCAB)
    outside = [token for token in range(VOCAB) if token not in ids]
    assert float(draft.probs[0, :4, outside].max()) == 0.0
    torch.testing.assert_close(draft.probs[0, :4].sum(-1), torch.ones(4))
    assert all(token in ids for token in draft.lists[0][0])


def test_trees_rank_the_heads_own_tokens_as_those_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rows, and rows that share the target's noise: a row's nodes are the target's ids,
    whichever scores rank them."""
    folder = saved_head(tmp_path, "eagle3", draft_vocab=20)
    found = []
    for names in ((), ("known", "_logits", "_in_full")):
        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(FedTree, name, vars(TreeModelDrafter)[name])
            target = loaded_target()
            drafter = drafter_of(target, folder, "eagle3", tree="best-first", min_gain=0.0)
            decoder = decoder_of(target, drafter, 6)
            for number, temperature in enumerate((0.0, 0.8)):
                row = make_row(
                    PROMPTS[number],
                    SamplingParams(max_tokens=30, temperature=temperature),
                    seed=number,
                )
                row.verifier = CoupledVerifier() if temperature else None
                decoder.add(row)
            drafts = []
            for _ in range(4):
                decoder.step()
                draft = drafter.propose(decoder.rows, [6, 6])
                drafts.append((draft.lists, draft.parent_lists))
        found.append(drafts)
    assert found[0] == found[1]
    ids = drafter.lm.head.draft_ids.tolist()
    assert ids != sorted(range(20))
    assert all(token in ids for (tokens, _), _ in found[0] for line in tokens for token in line)


@pytest.mark.parametrize("tree", ["chain", "best-first", "2x2x1"])
def test_tokens_the_head_does_not_know_can_be_all_that_may_be_emitted(
    tmp_path: Path, tree: str
) -> None:
    """Catches a request that fails because its grammar, or its allowed tokens, leave nothing of a
    reduced draft vocabulary."""
    target = loaded_target()
    drafter = drafter_of(
        target, saved_head(tmp_path, "eagle3", draft_vocab=20), "eagle3", tree=tree
    )
    foreign = [token for token in range(VOCAB) if token not in drafter.lm.head.draft_ids.tolist()][
        :3
    ]
    decoder = decoder_of(target, drafter)
    for number, temperature in enumerate((0.0, 1.0)):
        wanted = SamplingParams(max_tokens=12, temperature=temperature, allowed_token_ids=foreign)
        decoder.add(make_row(PROMPTS[number], wanted, seed=number, number=number))
    rows = run_to_end(decoder)
    assert [len(row.output) for row in rows] == [12, 12]
    assert all(set(row.output) <= set(foreign) for row in rows)
    assert all(row.stats.drafted for row in rows)


@pytest.mark.slow
def test_through_the_front_door(tmp_path: Path) -> None:
    """--draft names the head's folder; what does not fit is refused before the first token, in one
    line."""
    target = save_checkpoint(
        tmp_path / "target", tiny_llama(257, num_hidden_layers=4), byte_tokenizer()
    )
    config = tiny_llama(257, num_hidden_layers=4).config
    save_eagle(random_eagle("eagle3", config), tmp_path / "head")
    options = Options(
        str(target), drafter="eagle3", draft=str(tmp_path / "head"), dtype="float32", threads=1
    )
    built = build(options)
    assert built.options.draft is None
    assert built.options.drafter_options["head"] == str(tmp_path / "head")
    assert built.decoder.drafter.signals == (1, 2, 3)
    same = build(replace(options, draft=None, drafter_options={"head": str(tmp_path / "head")}))
    assert same.options == built.options
    with pytest.raises(ConfigError, match=r"needs a head.*--draft"):
        build(replace(options, draft=None))
    with pytest.raises(ConfigError, match="two heads"):
        build(replace(options, drafter_options={"head": "elsewhere"}))
    with pytest.raises(CheckpointError, match="use --drafter eagle3"):
        build(replace(options, drafter="eagle"))
    with pytest.raises(CheckpointError, match="no head folder"):
        build(replace(options, draft=str(tmp_path / "nothing")))
    with pytest.raises(CapabilityError, match="trained"):
        EagleDrafter.build(DraftSetup(loaded_target(), None, 4, EagleSettings()))
