"""`outrider export`: every kind in every layout it has, read back; kinds, layouts, folders and
targets that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.cli.app import run
from outrider.train.config import TrainConfig
from outrider.train.run import run_training
from tests.unit.report.test_card import of_a_head
from tests.unit.train.material import save_target, spec_for

pytestmark = pytest.mark.slow  # six short trainings before the first test
SETTINGS = {"early-exit": {"rank": "4"}, "draft-model": {"init_layers": "2"}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of every kind that can be exported."""
    folder = tmp_path_factory.mktemp("trained")
    for kind in ("draft-model", "medusa", "eagle", "eagle3", "block", "early-exit"):
        config = TrainConfig(max_steps=1, batch_size=4, held_out=0.2)
        run_training(spec_for(folder, kind, kind, settings=SETTINGS.get(kind, {}), config=config))
    return folder


def command(trained: Path, kind: str, layout: str, out: Path, *more: str) -> list[str]:
    drafter = str(trained / kind / "drafter")
    target = str(trained / "target")
    return ["export", drafter, "--target", target, "--to", layout, "--out", str(out), *more]


@pytest.mark.parametrize(
    ("kind", "layout", "files"),
    [
        ("draft-model", "transformers", {"model.safetensors", "tokenizer.json"}),
        ("medusa", "medusa", {"medusa_lm_head.pt"}),
        ("medusa", "vllm", {"model.safetensors"}),
        ("eagle", "raw", {"model.safetensors"}),
        ("eagle3", "raw", {"model.safetensors"}),
        ("eagle3", "speculators", {"model.safetensors"}),
        ("block", "raw", {"model.safetensors"}),
        ("block", "speculators", {"model.safetensors"}),
    ],
)
def test_every_layout(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    layout: str,
    files: set[str],
) -> None:
    """Written, recognised as its kind, and every tensor read back."""
    out = tmp_path / "out"
    assert run(command(trained, kind, layout, out, "--check")) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{kind} written to")
    assert ("tensors of" in output) or ("computes the logits" in output)
    assert {"config.json", *files} <= {path.name for path in out.iterdir()}
    if kind == "eagle3" and layout == "raw":
        tensors = load_file(out / "model.safetensors")
        assert "embed_tokens.weight" in tensors
        assert "midlayer.self_attn.q_proj.weight" in tensors


def test_a_changed_tensor_is_found(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--check must be able to fail."""
    from outrider.train import export

    real = export.WRITERS["eagle3"]["raw"]

    def wrong(source: Path, out: Path, target: export.Target) -> None:
        real(source, out, target)
        tensors = load_file(out / "model.safetensors")
        save_file(
            {**tensors, "norm.weight": tensors["norm.weight"] + torch.tensor(0.5)},
            out / "model.safetensors",
        )

    monkeypatch.setitem(export.WRITERS["eagle3"], "raw", wrong)
    assert run(command(trained, "eagle3", "raw", tmp_path / "out", "--check")) == 2
    assert "tensor 'norm.weight' is not that of the source" in capsys.readouterr().err


def test_what_does_not_fit(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in one line with what would."""
    out = tmp_path / "out"
    wide = save_target(tmp_path / "wide", hidden_size=128)
    cases = [
        (command(trained, "medusa", "raw", out), "whose layouts are medusa, vllm"),
        (command(trained, "early-exit", "raw", out), "which no other program reads"),
        (command(trained, "medusa", "safetensors", out), "--to takes one of"),
        (
            ["export", str(tmp_path / "none"), *command(trained, "medusa", "vllm", out)[2:]],
            "there is no folder",
        ),
        (
            [
                *command(trained, "eagle3", "raw", out)[:3],
                str(wide),
                *command(trained, "eagle3", "raw", out)[4:],
            ],
            "another",
        ),
        (command(trained, "medusa", "vllm", trained / "target"), "not empty"),
    ]
    for arguments, message in cases:
        assert run(arguments) == 2, message
        assert message in capsys.readouterr().err


def test_going_on(trained: Path, tmp_path: Path) -> None:
    """Every kind goes on from what it saved (--init), at the expected tau where it was."""
    for kind in ("medusa", "eagle3", "block"):
        spec = spec_for(
            trained,
            f"more-{kind}",
            kind,
            settings={},
            config=TrainConfig(max_steps=1, batch_size=4, held_out=0.2),
        )
        assert (
            run_training(replace(spec, init=trained / kind / "drafter", out=tmp_path / kind))
            is not None
        )


def test_a_card_from_a_result(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written beside the weights; refused before anything is written where it does not fit."""
    result = tmp_path / "result.json"
    of_a_head().write(result)
    out = tmp_path / "out"
    card = ["--card", str(result), "--license", "mit"]
    assert run(command(trained, "eagle3", "raw", out, *card)) == 0
    text = (out / "README.md").read_text()
    assert "license: mit" in text
    assert "# out: a drafter for" in text
    capsys.readouterr()
    assert run(command(trained, "medusa", "vllm", tmp_path / "other", *card)) == 2
    assert "no measurement of a drafter 'medusa'" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert run(command(trained, "eagle3", "raw", tmp_path / "third", "--license", "mit")) == 2
    assert "give --card FILE.json, too" in capsys.readouterr().err
