"""The one loader of heads: names by tables in both directions, fp8 widened by its scales, what does
not fit named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.errors import CheckpointError
from outrider.models.heads.names import Names
from outrider.models.heads.source import HeadSource

NAMES = Names(
    ("{head}.{layer}.linear.{rest}", "heads.{head}.layers.{layer}.{rest}"),
    ("{head}.2.weight", "heads.{head}.output.weight"),
    aliases=(("model.{rest}", "{rest}"), ("more.{layer}.{rest}", "layers.{layer+1}.{rest}")),
)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("10.0.linear.bias", "heads.10.layers.0.bias"),
        ("3.2.weight", "heads.3.output.weight"),
        ("fc.weight", "fc.weight"),
    ],
)
def test_names_are_read_in_both_directions(there: str, here: str) -> None:
    """Catches a number that is taken for a part of another, and a point that stands for any
    character."""
    assert NAMES.ours(there) == here
    assert NAMES.ours(f"model.{there}") == here
    assert NAMES.theirs(here) == there
    assert NAMES.ours("3x2.weight") == "3x2.weight"


def test_an_alias_may_count_on() -> None:
    assert NAMES.ours("model.more.1.norm.weight") == "layers.2.norm.weight"


def test_a_place_that_a_parameter_lacks_is_given() -> None:
    names = Names(("layers.{last}.final.{rest}", "norm.{rest}"))
    assert names.ours("layers.7.final.weight") == "norm.weight"
    assert names.theirs("norm.weight", last=1) == "layers.1.final.weight"


def source(folder: Path, tensors: dict[str, Tensor], *, outline: bool = False) -> HeadSource:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return HeadSource.open(folder, Names(("w.{rest}", "{rest}")), outline=outline)


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale"])
def test_weights_in_fp8_are_widened_by_their_scales(tmp_path: Path, scale: str) -> None:
    codes = torch.randn(4, 6).to(torch.float8_e4m3fn)
    scales = torch.rand(4, 1) + 0.5
    tensors = {"w.weight": codes, f"w.{scale}": scales}
    filled = source(tmp_path, tensors).fill(nn.Linear(6, 4, bias=False), "a head")
    assert torch.equal(filled.weight, codes.float() * scales)
    outline = source(tmp_path, tensors, outline=True)
    with torch.device(outline.device):
        assert outline.fill(nn.Linear(6, 4, bias=False), "a head").weight.is_meta


WRONG = {
    r"lacks tensor 'w.bias'. It has: nothing\.": {"w.weight": torch.ones(4, 6)},
    r"tensor 'w.bias' has shape \[3\], expected \[4\]": {"w.weight": torch.ones(4, 6), "w.bias": torch.ones(3)},
    r"no part of a head: gate\. It may be a head of another kind": {
        "w.weight": torch.ones(4, 6), "w.bias": torch.ones(4), "gate": torch.ones(1),
    },
    r"damaged: tensor 'w.bias' has NaN": {"w.weight": torch.ones(4, 6), "w.bias": torch.full((4,), torch.nan)},
    r"'w.weight' is stored as F8_E4M3 and its scales 'w.weight_scale_inv' are missing": {
        "w.weight": torch.ones(4, 6).to(torch.float8_e4m3fn), "w.bias": torch.ones(4),
    },
    r"'w.weight' is stored as I8\.": {"w.weight": torch.ones(4, 6, dtype=torch.int8), "w.bias": torch.ones(4)},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named_as_in_the_files(tmp_path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        source(tmp_path, WRONG[message]).fill(nn.Linear(6, 4), "a head")
