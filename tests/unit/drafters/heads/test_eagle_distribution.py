"""Texts drafted by an EAGLE-3 head of a reduced vocabulary, against the target's distribution
(`e2e/test_distribution.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.build import Options, build
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.models.heads.eagle_files import save_eagle
from outrider.models.lm import PassLimits
from outrider.parts import choose_parts
from tests.e2e.test_distribution import CASES, SIZES, World, holm, p_value, sample
from tests.heads import random_eagle
from tests.helpers import save_checkpoint, tiny_llama, word_tokenizer

V = 12
NUM_TEXTS = 1200  # of each kind: a total variation of 0.13 in the first two tokens is noticed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "verifier", "nodes"), [({}, "block", 3), ({"tree": "2x2"}, "traversal", 6)]
)
def test_texts_follow_the_target_distribution(
    settings: dict[str, Any], verifier: str, nodes: int, tmp_path: Path
) -> None:
    """Catches a distribution that is not the one drawn from: over the head's own ids, of another
    node, or before the filters."""
    target = tiny_llama(V, seed=3, sharpness=2.0, **SIZES)
    save_checkpoint(tmp_path / "target", target, word_tokenizer(V))
    # a head whose distributions overlap the target's, and that cannot emit three of its tokens
    save_eagle(
        random_eagle(
            "eagle3", target.config, draft_vocab=9, logit_scale=0.2, num_key_value_heads=2
        ),
        tmp_path / "head",
    )
    threads = torch.get_num_threads()
    head = {"head": str(tmp_path / "head")}
    options = Options(
        str(tmp_path / "target"), drafter="eagle3", drafter_options=head, dtype="float32", threads=1
    )
    built = build(options)
    torch.set_num_threads(threads)
    built.target.lm.limits = PassLimits()
    parts = choose_parts("eagle3", {**settings, **head}, verifier, {}, nodes, lossy=False)
    decoder = Decoder(
        built.target.lm,
        parts.make_drafter(built.target, None),
        parts.make_verifier(),
        FixedLength(nodes),
    )
    counts = sample(decoder, NUM_TEXTS)
    world = World(built, target, target)
    assert not holm({case.name: p_value(counts[case.name], world.joint(case, 2)) for case in CASES})
