"""EAGLE heads on the native runtime, against their modules: passes, trees, and whole chains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.heads.eagle import EagleDrafter
from outrider.drafters.heads.feature_fed import FedChain
from outrider.errors import CapabilityError, ConfigError
from outrider.models.derived.quantised_linear import QuantisedPanels
from outrider.models.heads.eagle import EagleHead, Kind
from outrider.models.heads.eagle_files import save_eagle
from outrider.models.heads.head_lm import HeadLM
from outrider.models.lm import LM
from outrider.runtime.fed import FedChains, FedRun
from outrider.trees.plan import TreePlan, TreeSettings
from outrider.verifiers.traversal import TraversalVerifier
from tests.heads import random_eagle
from tests.helpers import byte_tokenizer, make_row, run_to_end, save_checkpoint, tiny_llama
from tests.unit.runtime.beside import (
    FILTERED,
    HEADS,
    MIXED,
    NODES,
    PENALISED,
    VOCAB,
    Beside,
    Ragged,
    draft_side_by_side,
    models,
)


def on_runtime(head: str, path: Path) -> tuple[LM, HeadLM, FedChains, HeadLM]:
    """A target; its head on the runtime with whole chains; the same head as a module."""
    target, lm = models(head, torch.float32)
    plain = HeadLM(lm.head, VOCAB, lm.shape.context_length)
    lm.run = run = FedRun(lm, path)
    return target, lm, FedChains(lm, run), plain


@pytest.mark.parametrize(
    ("head", "which", "racing"),
    [
        ("eagle", MIXED, ()),
        ("eagle3", PENALISED, ()),
        ("eagle3.1", FILTERED, ()),
        ("eagle3", FILTERED, (0, 4)),
        ("eagle3.1", FILTERED, (0, 1, 4, 5)),
    ],
    ids=str,
)
def test_whole_chains_are_those_of_the_module(
    head: str, which: tuple[int, ...], racing: tuple[int, ...], library_path: Path
) -> None:
    """Catches a pair at the wrong position, a state that is not the last pair's, a token in the
    head's own numbering, distributions of another vocabulary, a pair kept after a rejection."""
    target, lm, chains, plain = on_runtime(head, library_path)
    both = Beside(FedChain(lm, chains), FedChain(plain), tolerance=2e-4)
    draft_side_by_side(target, both, Ragged(NODES), which, racing)
    assert both.compared > 30
    assert both.drawn > 5 or len(racing) == len(which)


@pytest.mark.parametrize("head", HEADS)
def test_a_chain_in_one_call_is_the_chain_token_by_token(head: str, library_path: Path) -> None:
    """Both on the runtime, to the last bits of a softmax."""
    target, lm, chains, _ = on_runtime(head, library_path)
    stepwise = HeadLM(lm.head, VOCAB, lm.shape.context_length)
    stepwise.run = FedRun(stepwise, library_path)
    both = Beside(FedChain(lm, chains), FedChain(stepwise), tolerance=2e-5)
    draft_side_by_side(target, both, Ragged(NODES), FILTERED)
    assert both.drawn > 30


def test_one_pass_of_masks_in_one_call(library_path: Path) -> None:
    """Of a P-EAGLE head, against its module: catches a feature beside another token, masks that
    stay in the cache, a token in the head's own numbering."""
    target, lm = models("eagle3", torch.float32, num_layers=2, mask_token=7)
    assert isinstance(lm.head, EagleHead)
    assert lm.head.mask_hidden is not None
    plain = HeadLM(lm.head, VOCAB, lm.shape.context_length)
    for each in (lm, plain):
        (each.mask_feature,) = plain.fused([lm.head.mask_hidden.detach()[None]])
    lm.run = run = FedRun(lm, library_path)
    both = Beside(
        FedChain(lm, FedChains(lm, run, 7), None, 7), FedChain(plain, None, None, 7), tolerance=2e-4
    )
    draft_side_by_side(target, both, Ragged(NODES), FILTERED, (0, 4))
    assert both.compared > 30
    assert both.drawn > 5


@pytest.mark.parametrize("head", HEADS)
def test_trees_are_those_of_the_module(head: str, library_path: Path) -> None:
    """Catches a node beside another's parent, or one that sees what is not on its path."""
    target, lm, _, plain = on_runtime(head, library_path)

    def drafter(own: HeadLM) -> Any:
        return EagleDrafter(own, TreePlan(TreeSettings(tree="best-first")))  # type: ignore[arg-type]

    both = Beside(drafter(lm), drafter(plain), tolerance=2e-4)
    decoder = Decoder(target, both, TraversalVerifier(), FixedLength(6))
    for number, prompt in enumerate(([5, 6, 7, 8], [9])):
        decoder.add(make_row(prompt, SamplingParams(max_tokens=30), seed=number, number=number))
    run_to_end(decoder)
    assert both.compared > 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tree"), [("eagle", "chain"), ("eagle3", "chain"), ("eagle3", "best-first")]
)
def test_greedy_text_is_that_of_plain_decoding(
    kind: Kind, tree: str, tmp_path: Path, library_path: Path
) -> None:
    """To the bit, in bfloat16, alone and in a batch: whatever hidden states the target is asked
    for."""
    module = tiny_llama(257, sharpness=2.0)
    target = save_checkpoint(tmp_path / "target", module, byte_tokenizer())
    save_eagle(
        random_eagle(kind, module.config, draft_vocab=100 if kind == "eagle3" else None),
        tmp_path / "head",
    )
    prompts = [[5, 6, 7], [9] * 40, [80, 33]]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    same: dict[str, Any] = {"dtype": "bfloat16", "runtime": "native", "threads": 2}
    plain = LLM(target, drafter="none", **same).generate(prompts, params)
    llm = LLM(target, draft=tmp_path / "head", drafter=kind, drafter_options={"tree": tree}, **same)
    drafter: Any = llm._built.decoder.drafter
    assert isinstance(drafter.lm.run, FedRun)
    assert tree != "chain" or isinstance(drafter._whole, FedChains)
    assert not llm._built.notes
    assert [one.token_ids for one in llm.generate(prompts, params)] == [
        one.token_ids for one in plain
    ]
    assert llm.generate(prompts[:1], params)[0].token_ids == plain[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_a_rounded_head_drafts_for_the_same_text(
    bits: int, tmp_path: Path, library_path: Path
) -> None:
    """Its own layers are in integers, and drafts stay close to those of the head as it is stored."""
    module = tiny_llama(257, sharpness=2.0)
    target = save_checkpoint(tmp_path / "target", module, byte_tokenizer())
    save_eagle(random_eagle("eagle3", module.config, draft_vocab=96), tmp_path / "head")
    prompts = [[5, 6, 7], [9] * 40]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    same: dict[str, Any] = {"dtype": "bfloat16", "runtime": "native", "threads": 1}
    plain = LLM(target, drafter="none", **same).generate(prompts, params)
    llm = LLM(
        target, draft=tmp_path / "head", drafter="eagle3", drafter_options={"bits": bits}, **same
    )
    drafter: Any = llm._built.decoder.drafter
    head = drafter.lm.head
    assert isinstance(drafter._whole, FedChains)
    assert not llm._built.notes
    assert {type(part) for part in (head.lm_head, head.fc, head.layers[0].mlp.up_proj)} == {
        QuantisedPanels
    }
    assert head.lm_head.bits == bits
    assert [one.token_ids for one in llm.generate(prompts, params)] == [
        one.token_ids for one in plain
    ]


@pytest.mark.slow
def test_rounding_a_head_needs_the_native_runtime(tmp_path: Path) -> None:
    module = tiny_llama(257)
    target = save_checkpoint(tmp_path / "target", module, byte_tokenizer())
    save_eagle(random_eagle("eagle3", module.config), tmp_path / "head")
    same: dict[str, Any] = {"draft": tmp_path / "head", "drafter": "eagle3", "runtime": "eager"}
    with pytest.raises(CapabilityError, match="bits=8 rounds the head for the native runtime"):
        LLM(target, drafter_options={"bits": 8}, **same)
    with pytest.raises(ConfigError, match="bits must be 16, 8 or 4, got 5"):
        LLM(target, drafter_options={"bits": 5}, **same)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "gumbel"),
        ({"verifier": "traversal"}, "traversal"),
        ({"drafter_options": {"tree": "chain"}}, "block"),
        ({"runtime": "eager"}, "traversal"),
    ],
    ids=str,
)
def test_shared_noise_verifies_answers_without_a_seed(
    given: dict[str, Any], expected: str, tmp_path: Path, library_path: Path
) -> None:
    """Where the trees of rows that draw would take a pass a level; a named verifier is kept."""
    module = tiny_llama(257, sharpness=2.0)
    target = save_checkpoint(tmp_path / "target", module, byte_tokenizer())
    save_eagle(random_eagle("eagle3", module.config, draft_vocab=100), tmp_path / "head")
    options: dict[str, Any] = {
        "drafter_options": {"tree": "best-first"},
        "runtime": "native",
        "threads": 1,
    } | given
    llm = LLM(target, draft=tmp_path / "head", drafter="eagle3", dtype="bfloat16", **options)
    drawn, greedy = llm.generate(
        [[5, 6, 7]] * 2,
        [SamplingParams(temperature=1.0, max_tokens=9), SamplingParams(max_tokens=9)],
    )
    assert drawn.verifier == expected
    assert greedy.verifier == ("block" if expected == "block" else "traversal")
