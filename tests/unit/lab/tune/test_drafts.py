"""What `--draft` names: told apart by files, and refused where it cannot take part."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.build import Options, embedded_heads
from outrider.errors import CheckpointError, ConfigError
from outrider.lab.tune.drafts import kind_of, read_drafts
from outrider.lab.tune.space import TrainedHead
from outrider.models.heads.exit import ExitConfig, ExitHead
from tests.heads import ACCEPTANCE, HEADS
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.mtp_heads import save_with_mtp


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of four layers, a draft model, and everything that can be trained for it."""
    root = tmp_path_factory.mktemp("drafts")
    target = tiny_llama(257, num_hidden_layers=4)
    save_checkpoint(root / "target", target, byte_tokenizer())
    save_checkpoint(root / "draft", tiny_llama(257, seed=1), byte_tokenizer())
    for kind, write in {**HEADS, **ACCEPTANCE}.items():
        write(target, root / kind)
    ExitHead(ExitConfig(64, 2, 4, 4, "mine")).save(root / "early-exit")
    return root


@pytest.mark.parametrize("kind", [*HEADS, "early-exit", "acceptance"])
def test_a_head_is_of_its_kind(root: Path, kind: str) -> None:
    """tests/unit/models/heads/test_kinds.py has the rest."""
    assert kind_of(str(root / kind)) == kind


def test_what_is_no_head_is_a_model(root: Path, tmp_path: Path) -> None:
    """Hub ids, and folders that loading will complain about, too."""
    for name in (
        str(root / "draft"),
        "org/some-model",
        "demo",
        str(tmp_path),
        str(tmp_path / "nowhere"),
    ):
        assert kind_of(name) == "draft-model"


def test_a_pickled_model_is_not_read_for_its_names(tmp_path: Path) -> None:
    """Gigabytes of it would be."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    assert kind_of(str(tmp_path)) == "draft-model"


def test_one_model_and_many_heads(root: Path) -> None:
    names = [
        str(root / name) for name in ("draft", "eagle3", "medusa", "block", "acceptance", "eagle3")
    ]
    drafts = read_drafts(Options(str(root / "target")), names)
    assert drafts.model == names[0]
    assert drafts.heads == (
        TrainedHead(kind="eagle3", folder=names[1]),
        TrainedHead(kind="medusa", folder=names[2], max_chain=3),
        TrainedHead(kind="block", folder=names[3], max_chain=6, confidence=True, markov=True),
        TrainedHead(kind="acceptance", folder=names[4]),
    )


def test_the_library_s_draft_may_be_a_head(root: Path) -> None:
    """`Options.draft` is what `--draft` is to other verbs."""
    drafts = read_drafts(Options(str(root / "target"), draft=str(root / "eagle3")))
    assert (drafts.model, [one.kind for one in drafts.heads]) == (None, ["eagle3"])


def test_the_demo_brings_its_own() -> None:
    """Their folders are not written into settings: the name of the drafter is enough there."""
    heads = read_drafts(Options("demo")).heads
    assert {one.kind: one.folder for one in heads} == dict.fromkeys(
        embedded_heads("demo", "cpu"), ""
    )
    assert next(one for one in heads if one.kind == "medusa").max_chain == 4


def test_a_checkpoint_brings_its_mtp_head(tmp_path: Path) -> None:
    """One of several layers drafts a token with each."""
    for layers in (1, 3):
        save_with_mtp(
            tmp_path / f"{layers}",
            lambda seed: tiny_llama(257, seed=seed),
            "deepseek",
            num_layers=layers,
        )
    assert read_drafts(Options(str(tmp_path / "1"))).heads == (TrainedHead(kind="mtp", folder=""),)
    assert read_drafts(Options(str(tmp_path / "3"))).heads == (
        TrainedHead(kind="mtp", folder="", max_chain=3),
    )


def test_two_models_cannot_be_tuned_at_once(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"one draft model at a time, got .*draft and org/other"):
        read_drafts(Options(str(root / "target")), [str(root / "draft"), "org/other"])


def test_a_stop_rule_needs_its_model(root: Path) -> None:
    with pytest.raises(ConfigError, match="name that, too, with another --draft"):
        read_drafts(Options(str(root / "target")), [str(root / "acceptance")])


def test_a_head_of_another_target_is_refused_before_anything_is_loaded(
    root: Path, tmp_path: Path
) -> None:
    other = tiny_llama(257, hidden_size=32, num_hidden_layers=2)
    HEADS["eagle3"](other, tmp_path / "eagle3")
    with pytest.raises(CheckpointError, match="eagle3"):
        read_drafts(Options(str(root / "target")), [str(tmp_path / "eagle3")])


@pytest.mark.parametrize("name", ["my head", "a,b", "x+y", "x;y"])
def test_a_name_that_no_configuration_can_hold(root: Path, tmp_path: Path, name: str) -> None:
    """Its label is read back: settings files and other engines' words would be about another
    folder."""
    (tmp_path / name).symlink_to(root / "eagle3")
    with pytest.raises(ConfigError, match="rename it, or give a link to it"):
        read_drafts(Options(str(root / "target")), [str(tmp_path / name)])
