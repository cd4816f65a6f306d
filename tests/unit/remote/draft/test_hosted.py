"""Which draft models a service hosts, and how it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import CapabilityError, ConfigError
from outrider.remote.draft.hosted import HostedDrafterOptions, load_drafter
from outrider.remote.protocol import messages
from tests.draft_bench import VOCAB, Bench, hosted_model, save_draft
from tests.helpers import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model's checkpoint."""
    return save_draft(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "needs a draft model"),
        (
            {"draft": "d", "drafter_options": {"tree": "best-first"}},
            "leave out the drafter's 'tree'",
        ),
        ({"draft": "d", "drafter_options": {"stp": "mass"}}, "Did you mean 'stop'"),
        ({"draft": "d", "revision": "main"}, "--model TARGET"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], reason: str) -> None:
    """Before anything is loaded."""
    with pytest.raises(ConfigError, match=reason):
        HostedDrafterOptions(**options)


def test_a_target_s_tokenizer_is_what_askers_are_compared_with(
    folder: Path, tmp_path: Path
) -> None:
    """With --model; no weights of the target are read."""
    save_draft(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    hosted = hosted_model(folder, model=str(tmp_path))
    assert hosted.identity.name == str(tmp_path)
    assert hosted.vocab_size == VOCAB
    bench = Bench(hosted)
    sampling = messages.Sampling()
    reply = bench.ask(bench.reader("a"), 1, tokens=[1, 2, 3], sampling=sampling, num_draft_tokens=2)
    assert len(reply.nodes) == 2


def test_a_chain_ends_where_the_stop_rule_says(folder: Path) -> None:
    """Options of drafter 'draft-model' are the service's."""
    hosted = hosted_model(folder, drafter_options={"stop": "product", "stop_below": "0.9"})
    bench = Bench(hosted)
    reply = bench.ask(
        bench.reader("a"),
        1,
        tokens=[1, 2, 3],
        sampling=messages.Sampling(temperature=1.0),
        num_draft_tokens=6,
    )
    assert 0 < len(reply.nodes) < 6


def test_a_draft_model_of_another_vocabulary_than_the_target_named(
    folder: Path, tmp_path: Path
) -> None:
    """With --model the two are compared at the start, not when the first asker comes."""
    other = byte_tokenizer()
    other.add_tokens(["<extra>"] * 1)
    vocab = {token: (index + 1) % VOCAB for token, index in byte_tokenizer().get_vocab().items()}
    save_draft(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    table = json.loads(text)
    table["model"]["vocab"] = vocab
    table["added_tokens"][0]["id"] = vocab["<|end|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(CapabilityError, match="another tokenizer"):
        load_drafter(
            HostedDrafterOptions(
                model=str(tmp_path), draft=str(folder), dtype="float32", runtime="eager"
            )
        )


def test_within_a_window_a_draft_model_drafts_in_the_targets_longer_texts(tmp_path: Path) -> None:
    """Catches a service that refuses texts beyond its draft's own context, and a window that its
    model does not get."""
    draft = save_draft(tmp_path / "draft", max_position_embeddings=32)
    target = save_draft(tmp_path / "target", max_position_embeddings=512)
    plain = hosted_model(draft, model=str(target))
    assert plain.max_context == 32
    hosted = hosted_model(draft, model=str(target), drafter_options={"window": "auto"})
    assert hosted.max_context == 512
    assert hosted.notes == [f"window=auto: '{draft}' sees the last 32 tokens while it drafts"]
    bench = Bench(hosted)
    sampling = messages.Sampling(temperature=1.0)
    reply = bench.ask(bench.reader("a"), 1, tokens=[5] * 100, sampling=sampling, num_draft_tokens=4)
    assert len(reply.nodes) == 4
    with pytest.raises(ConfigError, match="window=8 is smaller than a draft of 8 tokens"):
        hosted_model(draft, drafter_options={"window": 8})
