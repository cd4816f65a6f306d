"""What `--draft` names may be a draft model or a trained head: 'auto' drafts with either, and
nobody takes one for the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.build import Options, choose
from outrider.demo import demo_heads, demo_paths
from outrider.errors import ConfigError
from tests.heads import HEADS, acceptance_head
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama


def test_without_a_draft_earlier_text_drafts(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", tiny_llama(257), byte_tokenizer())
    options, _ = choose(Options(str(folder)))
    assert options.drafter == "suffix"


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_auto_drafts_with_the_head_that_was_named(kind: str, tmp_path: Path) -> None:
    HEADS[kind](tiny_llama(257, num_hidden_layers=3), tmp_path)
    options, parts = choose(Options("target", draft=str(tmp_path)))
    assert (parts.drafter_name, parts.requirements.head_folder, options.draft) == (
        kind,
        str(tmp_path),
        None,
    )


def test_embedded_heads_and_models_are_told_apart() -> None:
    for kind, folder in demo_heads().items():
        assert choose(Options("demo", draft=str(folder)))[1].drafter_name == kind
    assert choose(Options("demo", draft=str(demo_paths().draft)))[1].drafter_name == "draft-model"


def test_models_and_names_on_the_hub_are_draft_models(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, tiny_llama(257), byte_tokenizer())
    for draft in (str(tmp_path), "somebody/EAGLE3-something"):
        options, parts = choose(Options("target", draft=draft))
        assert (parts.drafter_name, options.draft) == ("draft-model", draft)


@pytest.mark.parametrize("drafter", ["auto", "draft-model", "universal"])
def test_a_head_that_is_no_draft_model_is_refused_with_the_way_to_use_it(
    drafter: str, tmp_path: Path
) -> None:
    """Before, its missing tokenizer was."""
    acceptance_head(tiny_llama(257), tmp_path)
    with pytest.raises(
        ConfigError, match=f"is a trained head, not a draft model: .*acceptance_head={tmp_path}"
    ):
        choose(Options("target", drafter=drafter, draft=str(tmp_path)))


def test_the_wrong_drafter_beside_a_head(tmp_path: Path) -> None:
    HEADS["eagle3"](tiny_llama(257, num_hidden_layers=3), tmp_path)
    with pytest.raises(
        ConfigError, match=f"not a draft model: --drafter eagle3 --draft {tmp_path}"
    ):
        choose(Options("target", drafter="draft-model", draft=str(tmp_path)))
