"""Trees of heads at temperature 1, against the target's distribution: trees that branch and are
rejected in the middle.

A tree that happens to be a chain, or of which all or nothing is kept, would pass with any mistake
in siblings and inner nodes. So what the trees looked like and how they were judged is counted and
required.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from outrider.build import Options, build
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.models.heads.block_files import save_block
from outrider.models.heads.eagle import Kind
from outrider.models.heads.eagle_files import save_eagle
from outrider.models.lm import PassLimits
from outrider.parts import choose_parts
from outrider.step import StepFacts
from tests.e2e import test_distribution
from tests.e2e.test_distribution import CASES, SIZES, World, holm, p_value, sample
from tests.heads import medusa_heads, random_block, random_eagle
from tests.helpers import save_checkpoint, tiny_llama, word_tokenizer

V = 12
NODES = 7
# room for whole trees
LONG = tuple(replace(case, params=replace(case.params, max_tokens=16)) for case in CASES)
NUM_TEXTS = 1200  # of each kind: a total variation of 0.13 in the first two tokens is noticed
BRANCHES = {"sibling_acceptance": "0.4,0.3,0.2"}  # at temperature 1 shapes are planned by these
PLACED = {"tree": "best-first", "sample_from": 2.0, "top_k": 3, "min_gain": 0.0}


Writer = Callable[[LlamaForCausalLM, Path], None]


def eagle(kind: Kind, draft_vocab: int | None) -> Writer:
    """Writes a head whose distributions overlap the target's. `draft_vocab`: it can emit this many
    of its tokens."""
    changes = {"draft_vocab": draft_vocab, "logit_scale": 0.2, "num_key_value_heads": 2}
    return lambda target, folder: save_eagle(random_eagle(kind, target.config, **changes), folder)


HEADS: dict[str, Writer] = {
    "eagle3": eagle("eagle3", 9),
    "eagle": eagle("eagle", None),
    "medusa": medusa_heads,
    "block": lambda target, folder: save_block(random_block(target), folder),
}


class Shapes:
    """Counts what trees had, and what became of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def observe(self, facts: StepFacts) -> None:
        verdicts = zip(*facts.verdict.lists, strict=True)
        for children, (path, num_accepted, _, all_accepted) in zip(
            facts.draft.children, verdicts, strict=True
        ):
            outputs = [0, *(node + 1 for node in path[:num_accepted])]
            self.counts["trees"] += 1
            self.counts["branch at the root"] += len(children[0]) > 1
            self.counts["branch below"] += any(len(siblings) > 1 for siblings in children[1:])
            self.counts["rejected behind a kept node"] += num_accepted > 0 and not all_accepted
            self.counts["several rejected behind a kept node"] += (
                num_accepted > 0 and len(children[outputs[-1]]) > 1
            )
            self.counts["later sibling kept"] += any(
                children[parent].index(node) > 0
                for parent, node in zip(outputs, path[:num_accepted], strict=False)
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "settings", "verifier", "cases"),
    [
        ("eagle3", {"tree": "best-first", **BRANCHES}, "traversal", LONG),
        ("eagle3", {"tree": "best-first", **BRANCHES}, "multi-round", LONG),
        ("eagle3", PLACED, "traversal", LONG),
        # rows without penalties and filters: whole trees from one call
        ("eagle3", PLACED, "multi-round", LONG[:1]),
        ("eagle3", {**PLACED, "sample_from": 0.5}, "gumbel", LONG),
        ("eagle", {"tree": "best-first", **BRANCHES}, "traversal", LONG),
        ("medusa", {"tree": "3x2x1"}, "traversal", LONG),
        ("block", {"tree": "3x2x1"}, "traversal", LONG),
    ],
    ids=[
        "drawn",
        "drawn, top down",
        "placed",
        "placed in one call",
        "raced",
        "eagle",
        "medusa",
        "block",
    ],
)
def test_texts_follow_the_target_distribution(
    drafter: str,
    settings: dict[str, Any],
    verifier: str,
    cases: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_distribution, "CASES", cases)
    target = tiny_llama(V, seed=3, sharpness=2.0, **SIZES)
    save_checkpoint(tmp_path / "target", target, word_tokenizer(V))
    HEADS[drafter](target, tmp_path / "head")
    threads = torch.get_num_threads()
    head = {"head": str(tmp_path / "head")}
    built = build(
        Options(
            str(tmp_path / "target"),
            drafter=drafter,
            drafter_options=head,
            dtype="float32",
            threads=1,
        )
    )
    torch.set_num_threads(threads)
    built.target.lm.limits = PassLimits()
    parts = choose_parts(drafter, {**settings, **head}, verifier, {}, NODES, lossy=False)
    decoder = Decoder(
        built.target.lm,
        parts.make_drafter(built.target, None),
        parts.make_verifier(),
        FixedLength(NODES),
    )
    shapes = Shapes()
    decoder.observers.append(shapes)
    counts = sample(decoder, NUM_TEXTS)
    world = World(built, target, target)
    assert not holm({case.name: p_value(counts[case.name], world.joint(case, 2)) for case in cases})
    wanted = {
        "branch at the root",
        "branch below",
        "rejected behind a kept node",
        "several rejected behind a kept node",
        "later sibling kept",
    }
    assert {
        name: shapes.counts[name] for name in wanted if shapes.counts[name] < NUM_TEXTS / 50
    } == {}, shapes.counts
