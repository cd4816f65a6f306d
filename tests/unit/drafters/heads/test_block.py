"""The block drafter: its confidence stops drafting without bending the distribution, its context is
the text's, refusals."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.build import Options, build
from outrider.drafters.heads.block import BlockGuesses, BlockSettings, ConfidenceStop
from outrider.drafters.parallel import draft_chain, draft_tree
from outrider.errors import CapabilityError, CheckpointError, ConfigError
from outrider.models.heads.block import BlockHead
from outrider.models.heads.block_config import BlockConfig
from outrider.models.heads.block_files import save_block
from outrider.models.heads.block_pass import Guessed, ModulePasses
from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from outrider.trees.plan import TreePlan
from outrider.types import Draft
from outrider.verifiers import VERIFIERS
from tests import oracle
from tests.helpers import byte_tokenizer, make_row, save_checkpoint, tiny_llama
from tests.unit.drafters.enumerated import all_drafts

V = 3
LEVELS = 2
PROMPT = [0, 2]
PLAIN = SamplingParams(temperature=1.0)


def tiny_head(vocab_size: int, hidden: int = 8, **changes: object) -> BlockHead:
    values = {
        "hidden_size": hidden,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "vocab_size": vocab_size,
        "block_size": LEVELS,
        "target_hidden_size": hidden,
        "target_layers": (0, 1),
        "num_target_layers": 2,
        "mask_token_id": 0,
        "markov_rank": 4,
        "confidence": True,
        "trained_for": "x",
    }
    torch.manual_seed(4)
    head = BlockHead(BlockConfig(**{**values, **changes}))
    for weight in head.parameters():
        weight.data.copy_(torch.randn(weight.shape))
    return head.requires_grad_(False).eval()


def guesses_of(head: BlockHead, states: Tensor) -> BlockGuesses:
    return BlockGuesses(head, ModulePasses(head), Guessed(states, head.logits(states)))


def recurrence(head: BlockHead, states: Tensor, path: list[int]) -> Tensor:
    """Scores (V,) of the token behind this path (pending token first), written out from DSpark's
    RNN head."""
    weights = head.markov_head.state_dict()
    memory = torch.zeros(head.config.markov_rank)
    for state, token in zip(states, path, strict=False):
        joined = torch.cat([memory, weights["markov_w1.weight"][token], state])
        gate, candidate, output = (
            weights["joint_proj.weight"] @ joined + weights["joint_proj.bias"]
        ).chunk(3)
        memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
    return head.lm_head.weight @ states[len(path) - 1] + weights["markov_w2.weight"] @ output.tanh()


def test_a_recurrent_markov_head_knows_its_whole_path() -> None:
    """Catches a memory of another branch or row, lost between levels, or kept beyond a draft."""
    head = tiny_head(13, own_embedding=True, own_output=True, markov_recurrent=True, block_size=4)
    head.markov_head.joint_proj.weight.data *= 0.5  # away from where tanh is flat
    head.markov_head.markov_w2.weight.data *= 8
    states = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(2))
    rows = Rows(13, torch.device("cpu"))
    for number in range(2):
        rows.add(make_row([number + 3, number], SamplingParams(), seed=number))
    chain = draft_chain(rows, [4, 4], guesses_of(head, states))
    for tree, depth in (("1x1x1x1", 4), ("3x2x2", 3), ("best-first", 3)):
        settings = BlockSettings(tree=tree, top_k=3, max_depth=depth, min_gain=0.0)
        draft, _ = draft_tree(rows, [20, 17], guesses_of(head, states), TreePlan(settings))
        for index, row in enumerate(rows):
            tokens = draft.tokens[index].tolist()
            parents = draft.parent_lists[index]
            paths = {-1: [row.tokens[-1]]}
            for node in range(draft.lengths[index]):
                before = paths[parents[node]]
                paths[node] = [*before, tokens[node]]
                siblings = [
                    other
                    for other in range(draft.lengths[index])
                    if parents[other] == parents[node]
                ]
                likeliest = (
                    recurrence(head, states[index], before).topk(len(siblings)).indices.tolist()
                )
                assert tokens[node] == likeliest[siblings.index(node)]
            assert max(map(len, paths.values())) == depth + 1
            if tree == "1x1x1x1":
                assert chain.tokens[index].tolist() == tokens[:4]


class CheatingStop(ConfidenceStop):
    """What must not be done: a drawn token is dropped by a confidence that has seen it."""

    needs_probs = True

    def after(self, probs: Tensor, token: Tensor) -> None:
        self.dropped = probs.gather(1, token[:, None])[:, 0] < 0.4


def drafts(stop_below: float, *, cheating: bool = False) -> oracle.Proposals:
    head = tiny_head(V, own_embedding=True, own_output=True)
    states = torch.randn(1, LEVELS, 8, generator=torch.Generator().manual_seed(2))

    def drafted(rows: Rows) -> Draft:
        guesses = guesses_of(head, states.expand(len(rows), -1, -1))
        kind = CheatingStop if cheating else ConfidenceStop
        stop = kind(guesses, stop_below, len(rows), rows.device)
        draft = draft_chain(rows, [LEVELS] * len(rows), guesses, stop)
        if cheating and draft.num_nodes:
            draft.lengths = torch.where(
                stop.dropped & (draft.lengths == draft.num_nodes), draft.lengths - 1, draft.lengths
            )
        return draft

    return all_drafts(drafted, PROMPT, PLAIN, V)


def bias(proposals: oracle.Proposals, verifier: str) -> float:
    target = oracle.TableModel.random(
        torch.Generator().manual_seed(3), V, LEVELS + 1, PLAIN, PROMPT
    )
    return oracle.bias(VERIFIERS.load(verifier)().verify, target, proposals)


def survivals() -> list[float]:
    """Of all chains of a head that never stops: the chance it gives itself, token by token."""
    head = tiny_head(V, own_embedding=True, own_output=True)
    states = torch.randn(1, LEVELS, 8, generator=torch.Generator().manual_seed(2))
    guesses = guesses_of(head, states)
    first = float(guesses.confidence(0, torch.tensor([PROMPT[-1]])))
    return sorted(
        [
            first,
            *(first * float(guesses.confidence(1, torch.tensor([token]))) for token in range(V)),
        ]
    )


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_stopping_by_confidence_keeps_the_distribution(verifier: str) -> None:
    """Thresholds between all survivals the head can give: nothing drafted, some chains stopped,
    none stopped."""
    found = survivals()
    thresholds = [0.0, *((low + high) / 2 for low, high in pairwise(found)), 1.0]
    lengths = set()
    for threshold in thresholds:
        proposals = drafts(threshold)
        lengths.add(tuple(sorted(set(proposals.draft.lengths.tolist()))))
        assert bias(proposals, verifier) < 1e-6, threshold
    assert {(LEVELS,), (0,)} <= lengths
    assert any(len(line) > 1 for line in lengths), "no threshold stopped some chains and not others"


def test_dropping_a_token_by_its_own_confidence_is_noticed() -> None:
    """The trap of DSpark's appendix A, so that the test above is known to see it."""
    assert bias(drafts(0.0, cheating=True), "token") > 1e-3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("block")
    save_checkpoint(root / "target", tiny_llama(257, sharpness=2.0), byte_tokenizer())
    save_block(tiny_head(257, 64), root / "head")
    save_block(tiny_head(257, 64, confidence=False, confidence_with_markov=False), root / "unsure")
    save_block(tiny_head(257, 64, num_target_layers=3), root / "other")
    save_block(tiny_head(257, 64, max_positions=20), root / "short")
    return root


def options(root: Path, head: str, **settings: object) -> Options:
    return Options(
        str(root / "target"),
        drafter="block",
        draft=str(root / head),
        drafter_options=settings,
        dtype="float32",
        threads=1,
    )


@pytest.mark.slow
def test_the_context_is_that_of_the_text(target: Path) -> None:
    """Catches context of rejected tokens, at wrong positions, or lost when a row moves: caches
    equal those of a fresh start."""
    used = build(options(target, "head")).decoder
    fresh = build(options(target, "head")).decoder
    for number in range(3):
        used.add(
            make_row(
                [5, 80, 33 + number, 7], SamplingParams(temperature=1.0, max_tokens=40), seed=number
            )
        )
    for number in range(6):
        used.step()
        if number == 3:
            used.remove(0)
    for row in used.rows:
        fresh.add(row)
    with torch.inference_mode():
        used.catch_up()
        fresh.catch_up()
    used.drafter.context.settle()
    ours = used.drafter.kv
    theirs = fresh.drafter.kv
    ours.check_integrity()
    assert ours.lengths == theirs.lengths == [len(row.tokens) - 1 for row in used.rows]
    for left, right in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        for index, length in enumerate(ours.lengths):
            torch.testing.assert_close(
                left[index, :length], right[index, :length], rtol=1e-4, atol=1e-4
            )


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["chain", "2x1"])
def test_nothing_is_drafted_beyond_the_heads_own_context(target: Path, tree: str) -> None:
    """Catches drafts for positions that the head cannot tell apart, of one row and not of its
    neighbour."""
    built = build(options(target, "short", tree=tree))
    assert any(
        "knows 20 positions, its target" in note and "beyond 20 nothing is drafted" in note
        for note in built.notes
    )
    decoder = built.decoder
    for length in (4, 17):
        decoder.add(make_row([5 + index for index in range(length)], SamplingParams(max_tokens=30)))
    for _ in range(40):
        room = [max(0, 20 - len(row.tokens)) for row in decoder.rows]
        with torch.inference_mode():
            decoder.catch_up()
            draft = decoder.drafter.propose(decoder.rows, [4] * len(room))
        assert all(
            count <= limit for count, limit in zip(draft.lengths.tolist(), room, strict=True)
        )
        assert [count > 0 for count in draft.lengths.tolist()] == [limit > 0 for limit in room]
        decoder.drafter.context.settle()
        if not any(room):
            return
        decoder.step()
    raise AssertionError("no row grew beyond 20 tokens")


@pytest.mark.slow
@pytest.mark.parametrize("adapt", [False, True])
def test_trees_are_counted_where_they_follow_the_counts(target: Path, adapt: bool) -> None:
    """Catches growths not handed on, or twice: every step looks at the children of the pending
    token and of kept nodes."""
    decoder = build(options(target, "head", tree="best-first", adapt=adapt)).decoder
    decoder.add(make_row([5, 80, 33, 7], SamplingParams(max_tokens=30)))
    for _ in range(5):
        decoder.step()
    stats = decoder.rows[0].stats
    seen = sum(decoder.drafter._plan.worth._seen[0])
    # kept leaves have no children
    assert (stats.steps <= seen <= stats.steps + stats.accepted) if adapt else seen == 0


@pytest.mark.slow
def test_what_does_not_fit_is_refused(target: Path) -> None:
    with pytest.raises(CapabilityError, match="no confidence head"):
        build(options(target, "unsure", stop="confidence"))
    with pytest.raises(CheckpointError, match="3 layers; this one has 2"):
        build(options(target, "other"))
    with pytest.raises(CheckpointError, match="folder"):
        build(options(target, "nowhere"))
    with pytest.raises(ConfigError, match="--draft"):
        build(Options(str(target / "target"), drafter="block"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tree": "2x1", "stop": "confidence"}, "is for chains"),
        ({"stop_below": 2.0}, "stop_below"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BlockSettings(**settings)
