"""Draft heads in GGUF files of their own against the folders of the same heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.build import Options, build, head_in
from outrider.errors import CapabilityError, CheckpointError
from outrider.models.heads.block_files import load_block, save_block
from outrider.models.heads.eagle_files import TargetSizes, load_eagle, save_eagle
from tests.gguf_files import Kind, rounded
from tests.gguf_heads import write_draft_head
from tests.heads import DFLASH, DFLASH2, random_block, random_eagle
from tests.helpers import tiny_llama, word_tokenizer
from tests.unit.drafters.heads.test_mtp import watched, write

VOCAB = 96
MARKOV = {"markov_rank": 32, "markov_gated": False, "confidence": True}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
EAGLES: dict[str, dict[str, Any]] = {
    "plain": {}, "own tables": {"own_embedding": True}, "reduced": {"draft_vocab": 64}, "shared output": {"own_output": False},
    "normed": {"norm_before_residual": True},
}  # fmt: skip
BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": DFLASH, "dflash, reduced": {**DFLASH, "draft_vocab": 64}, "dflash, causal": {**DFLASH, "causal": True},
    "dspark": MARKOV, "dspark, from a bonus": {**MARKOV, "sample_from_anchor": False},
    "dflash2": {**DFLASH2, "selector_rank": 32},
}  # fmt: skip


def target() -> Any:
    return tiny_llama(VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=8)


def round_head(head: Any, kind: Kind) -> None:
    for name, value in head.named_parameters():
        if value.ndim == 2 and value.shape[-1] % 32 == 0 and "codebook" not in name:
            value.data.copy_(rounded(value.data.contiguous(), kind))


def same(one: Any, other: Any) -> None:
    """Weights and config are equal, but for how far positions are known."""
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.allclose(value.float(), other.state_dict()[name].float(), rtol=0, atol=1e-7), (
            name
        )
    changes = (
        {"max_positions": 512}
        if hasattr(one.config, "max_positions")
        else {"max_position_embeddings": 512}
    )
    assert replace(one.config, **changes, trained_for="") == replace(
        other.config, **changes, trained_for=""
    )


def drafts(target_folder: Path, drafter: str, head: Path) -> tuple[Any, list[list[int]]]:
    run = build(
        Options(
            str(target_folder),
            dtype="float32",
            threads=1,
            num_draft_tokens=3,
            drafter=drafter,
            draft=str(head),
        )
    )
    seen = watched(run)
    return seen, [row.output for row in write(run)]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.Q8_0])
@pytest.mark.parametrize("name", EAGLES)
def test_eagle3(tmp_path: Path, name: str, kind: Kind) -> None:
    """Catches queries in the converter's order, offsets taken for tokens, layers counted by their
    outputs."""
    head = random_eagle("eagle3", target().config, **EAGLES[name])
    if kind is not Kind.F32:
        round_head(head, kind)
    save_eagle(head, tmp_path / "folder")
    path = write_draft_head(tmp_path / "head.gguf", head, "eagle3", kind=kind)
    sizes = TargetSizes.of(target().config)
    same(load_eagle(tmp_path / "folder", "eagle3", sizes), load_eagle(path, "eagle3", sizes))
    assert (
        load_eagle(path, "eagle3", sizes, outline=True).config
        == load_eagle(path, "eagle3", sizes).config
    )
    assert head_in(str(path)) == "eagle3"


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
@pytest.mark.parametrize("name", BLOCKS)
def test_block_heads(tmp_path: Path, name: str, kind: Kind) -> None:
    """DFlash, DSpark and DFlash2, whose convolutions and codebooks have other names."""
    head = random_block(target(), **BLOCKS[name])
    if kind is not Kind.F32:
        round_head(head, kind)
    save_block(head, tmp_path / "folder")
    path = write_draft_head(tmp_path / "head.gguf", head, "dflash", kind=kind)
    sizes = (64, VOCAB, 8)
    same(load_block(tmp_path / "folder", *sizes), load_block(path, *sizes))
    assert load_block(path, *sizes, outline=True).config == load_block(path, *sizes).config
    assert head_in(str(path)) == "block"


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3", "block"])
def test_a_file_drafts_what_its_folder_drafts(tmp_path: Path, drafter: str) -> None:
    model = target()
    model.save_pretrained(tmp_path / "target")
    word_tokenizer(VOCAB).save_pretrained(tmp_path / "target")
    head: Any = (
        random_eagle("eagle3", model.config, draft_vocab=64)
        if drafter == "eagle3"
        else random_block(model, **MARKOV)
    )
    (save_eagle if drafter == "eagle3" else save_block)(head, tmp_path / "folder")
    path = write_draft_head(
        tmp_path / "head.gguf", head, "eagle3" if drafter == "eagle3" else "dflash"
    )
    seen, texts = drafts(tmp_path / "target", "auto", path)
    assert sum(len(draft) for _, draft in seen) > 60
    assert (seen, texts) == drafts(tmp_path / "target", drafter, tmp_path / "folder")
    assert texts == [
        row.output
        for row in write(build(Options(str(tmp_path / "target"), dtype="float32", drafter="none")))
    ]


def test_llama_3s_positions_are_recognised_by_their_divisors(tmp_path: Path) -> None:
    head = random_eagle("eagle3", target().config, rope=LLAMA3)
    divisors = _frequencies({"rope_type": "default", "rope_theta": 5e5}) / _frequencies(LLAMA3)
    path = write_draft_head(
        tmp_path / "head.gguf", head, "eagle3", tensors={"rope_freqs.weight": divisors.numpy()}
    )
    sizes = TargetSizes.of(target().config)
    found = load_eagle(path, "eagle3", sizes)
    assert torch.allclose(found.rotary.inv_freq, head.rotary.inv_freq, rtol=1e-5)
    other = write_draft_head(
        tmp_path / "o.gguf", head, "eagle3", tensors={"rope_freqs.weight": np.linspace(1, 3, 8)}
    )
    with pytest.raises(CapabilityError, match="by a rule that is not Llama 3's"):
        load_eagle(other, "eagle3", sizes)


def _frequencies(rope: dict[str, Any]) -> torch.Tensor:
    return random_eagle("eagle3", target().config, rope=rope).rotary.inv_freq


def test_files_that_are_no_such_head(tmp_path: Path) -> None:
    """One line each: another kind, a part that is not read, metadata that lacks something, a head
    where a target is wanted."""
    head = random_eagle("eagle3", target().config)
    sizes = TargetSizes.of(target().config)
    path = write_draft_head(tmp_path / "head.gguf", head, "eagle3")
    with pytest.raises(CheckpointError, match="is no block head"):
        load_block(path, 64, VOCAB, 8)
    with pytest.raises(
        CheckpointError, match=r"holds a draft head and no model\. Use it with --draft"
    ):
        build(Options(str(path)))
    write_draft_head(path, head, "eagle3", tensors={"blk.0.attn_sinks.weight": np.ones(4)})
    with pytest.raises(
        CheckpointError, match=r"no part of an EAGLE-3 head: blk.0.attn_sinks.weight"
    ):
        load_eagle(path, "eagle3", sizes)
    write_draft_head(path, head, "eagle3", changes={"extract_layers": None})
    with pytest.raises(CheckpointError, match=r"lacks 'eagle3.target_layers' of its metadata"):
        load_eagle(path, "eagle3", sizes)
    write_draft_head(
        path, random_block(target(), **DFLASH), "dflash", changes={"hyper_connection_count": 4}
    )
    with pytest.raises(
        CapabilityError, match=r"whose layers have hyper-connections, which is not read"
    ):
        load_block(path, 64, VOCAB, 8)
