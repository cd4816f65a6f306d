"""Heads known before a weight is read: what they are, how large, and whether they fit; and decoders
that refuse them in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import outrider.loader
from outrider.build import Options, build
from outrider.drafters import DRAFTERS
from outrider.errors import CapabilityError, CheckpointError, ConfigError
from outrider.models.heads.block_files import load_block
from outrider.models.heads.eagle_files import TargetSizes, load_eagle
from outrider.models.heads.exit import ExitConfig, ExitHead
from outrider.models.heads.medusa import export_medusa, load_medusa
from outrider.models.heads.mtp_files import load_mtp
from outrider.models.loaded import ModelMemory
from outrider.models.loading.memory import estimate_memory
from outrider.models.source import resolve
from tests.heads import HEADS
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama

WIDTH = 64
VOCAB = 257
LAYERS = 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, heads for it, and the weights of another target that can never be read."""
    folder = tmp_path_factory.mktemp("outlines")
    target = tiny_llama(VOCAB)
    save_checkpoint(folder / "target", target, byte_tokenizer())
    for name, write in HEADS.items():
        write(target, folder / name)
    save_checkpoint(
        folder / "other", tiny_llama(VOCAB, hidden_size=96, num_hidden_layers=3), byte_tokenizer()
    )
    ExitHead(ExitConfig(WIDTH, 1, LAYERS, 4, "mine")).save(folder / "early-exit")
    return folder


def pairs(root: Path) -> dict[str, tuple[Any, Any]]:
    """Name -> (its outline, the head loaded)."""
    sizes = TargetSizes(WIDTH, VOCAB, LAYERS)
    return {
        "eagle": (
            load_eagle(root / "eagle", "eagle", sizes, outline=True),
            load_eagle(root / "eagle", "eagle", sizes),
        ),
        "eagle3": (
            load_eagle(root / "eagle3", "eagle3", sizes, outline=True),
            load_eagle(root / "eagle3", "eagle3", sizes),
        ),
        "medusa": (
            load_medusa(root / "medusa", WIDTH, VOCAB, outline=True),
            load_medusa(root / "medusa", WIDTH, VOCAB),
        ),
        "block": (
            load_block(root / "block", WIDTH, VOCAB, LAYERS, outline=True),
            load_block(root / "block", WIDTH, VOCAB, LAYERS),
        ),
    }


# weighed by the headers of its files
@pytest.mark.parametrize("name", [name for name in HEADS if name != "mtp"])
def test_an_outline_is_the_head_without_its_weights(root: Path, name: str) -> None:
    """Same configuration, same shapes, no memory."""
    outline, loaded = pairs(root)[name]
    assert outline.config == loaded.config
    assert {n: t.shape for n, t in outline.named_parameters()} == {
        n: t.shape for n, t in loaded.named_parameters()
    }
    assert all(part.is_meta for part in outline.parameters())


@pytest.mark.parametrize("name", list(HEADS))
def test_a_head_is_weighed_as_it_is_loaded(root: Path, name: str) -> None:
    config = AutoConfig.from_pretrained(root / "target")
    found = DRAFTERS.load(name).weigh_head(str(root / name), config, torch.bfloat16)
    if name == "mtp":
        loaded = load_mtp(resolve(str(root / name)), config, torch.float32, torch.device("cpu"))
    else:
        loaded = pairs(root)[name][1]
    assert found.weights_bytes == 2 * sum(part.numel() for part in loaded.parameters())
    per_token = {"medusa": 0, "block": 2 * 2 * 2 * 16 * 2}
    assert found.kv_bytes_per_token == per_token.get(name, 2 * 2 * 16 * 2), (
        "layers x (keys, values) x KV heads x size x bytes"
    )


def test_vllms_medusa_layout_has_an_outline_too(root: Path, tmp_path: Path) -> None:
    heads = load_medusa(root / "medusa", WIDTH, VOCAB)
    heads.bind(tiny_llama(VOCAB).lm_head)
    export_medusa(heads, tmp_path, "vllm")
    again = load_medusa(tmp_path, WIDTH, VOCAB)
    assert load_medusa(tmp_path, WIDTH, VOCAB, outline=True).config == again.config


def test_heads_are_the_drafts_share(root: Path) -> None:
    """A target that fits alone and not with its head must be refused, with the advice that helps."""
    config = AutoConfig.from_pretrained(root / "target")
    head = ModelMemory("head", 1 << 20, 64)

    def weigh(available: int | None) -> Any:
        return estimate_memory(
            [resolve(str(root / "target"))],
            [config],
            heads=[head],
            dtype=torch.float32,
            device=torch.device("cpu"),
            num_tokens=256,
            available_bytes=available,
        )

    report = weigh(None)
    assert report.draft_bytes == (1 << 20) + 64 * 256
    assert report.needed_bytes == report.weights_bytes + report.kv_bytes + report.draft_bytes
    assert "+ draft 1.0 MiB" in report.one_line()
    assert json.loads(json.dumps(report.as_dict()))["heads"][0]["name"] == "head"
    with pytest.raises(CapabilityError, match=r"draft 1\.0 MiB.*--drafter ngram"):
        weigh(report.weights_bytes + report.kv_bytes)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("eagle", "fc.weight.*trained for another target"),
        ("eagle3", "fc.weight.*trained for another target"),
        (
            "mtp",
            r"mtp.fc.weight' has shape \[64, 128\], expected \[96, 192\]: it was trained for another",
        ),
        ("medusa", r"has shape \[64, 64\], expected \[96, 96\]"),
        ("block", "target with 2 layers; this one has 3"),
    ],
)
def test_a_head_of_another_target_is_refused_before_its_weights_are_read(
    root: Path, monkeypatch: pytest.MonkeyPatch, drafter: str, message: str
) -> None:
    """Not after ten minutes of loading the target."""

    def never(*given: Any, **more: Any) -> None:
        raise AssertionError("the target's weights were read")

    monkeypatch.setattr(outrider.loader, "load_module", never)
    for options in (
        Options(str(root / "other"), drafter=drafter, draft=str(root / drafter)),
        Options(
            str(root / "other"),
            drafter="composite",
            draft=str(root / drafter),
            drafter_options={"parts": f"ngram,{drafter}"},
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            build(options)


def test_an_exit_head_is_checked_first_as_well(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outrider.loader, "load_module", None)
    with pytest.raises(CheckpointError, match=r"2 layers of width 64; .* has 3 of 96"):
        build(
            Options(
                str(root / "other"),
                drafter="early-exit",
                drafter_options={"head": str(root / "early-exit")},
            )
        )


def test_a_composite_says_which_part_lacks_its_head(root: Path) -> None:
    with pytest.raises(ConfigError, match="drafter 'eagle3' needs a head"):
        build(
            Options(
                str(root / "target"), drafter="composite", drafter_options={"parts": "ngram,eagle3"}
            )
        )


@pytest.mark.slow
def test_a_composites_head_may_be_named_by_draft_or_by_its_option_but_not_both(root: Path) -> None:
    named = {"parts": "ngram,medusa", "options": f"medusa.head={root / 'medusa'}"}
    built = build(
        Options(
            str(root / "target"),
            drafter="composite",
            drafter_options=named,
            runtime="eager",
            dtype="float32",
        )
    )
    assert built.memory.heads[0].weights_bytes > 0
    assert built.decoder.drafter.signals
    with pytest.raises(ConfigError, match="two heads were named"):
        build(
            Options(
                str(root / "target"),
                drafter="composite",
                drafter_options=named,
                draft=str(root / "eagle"),
            )
        )
