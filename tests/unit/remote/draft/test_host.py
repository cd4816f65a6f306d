"""Look-up drafters and others behind a draft service, and those that cannot be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import CapabilityError, ConfigError
from outrider.remote.draft.host import GeneralHost, drafted_nodes, row_of
from outrider.remote.draft.hosted import (
    HostedDrafter,
    HostedDrafterOptions,
    chosen_parts,
    load_drafter,
)
from outrider.remote.draft.text import row_options
from outrider.remote.draft.texts import HostedText
from outrider.remote.protocol import messages
from outrider.rows import Rows
from tests.draft_bench import VOCAB, Bench, Reader, chain_of, save_draft
from tests.helpers import byte_tokenizer

GREEDY = messages.Sampling()
REPEATING = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model's checkpoint."""
    return save_draft(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target without weights: config and tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    save_draft(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return folder


LOOKUPS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "ngram, as trees": {"tree": "true"},
    "suffix": {},
    "ngram-cache": {},
    "composite": {"parts": "suffix,ngram"},
}

# messages, until what was learnt for all rows (of replaced texts, of drafts) shows
COMPARED = {"ngram-cache": 2, "composite": 1}


def hosted_lookup(name: str, target: Path, **options: Any) -> HostedDrafter:
    """A service's look-up drafter for this target."""
    all_options = {**LOOKUPS[name], **options}
    return load_drafter(
        HostedDrafterOptions(
            model=str(target), drafter=name.split(",")[0], drafter_options=all_options
        )
    )


@torch.inference_mode()
def fresh_draft(name: str, target: Path, tokens: list[int], count: int) -> list[int]:
    """What a new drafter proposes for this text in one process."""
    hosted = hosted_lookup(name, target)
    drafter = hosted.host.drafter
    rows = Rows(VOCAB, torch.device("cpu"))
    row = row_of(HostedText(0, Reader("fresh"), 0, row_options(GREEDY, VOCAB, 64), VOCAB), tokens)
    rows.add(row)
    drafter.start(row)
    return [node.token for node in drafted_nodes(drafter.propose(rows, [count]), rows)[0]]


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_draft_as_in_one_process(name: str, target: Path) -> None:
    """Beside another row, after commits, and after a text was replaced; no weights of the target
    are read."""
    bench = Bench(hosted_lookup(name, target))
    reader = bench.reader("a")
    bench.ask(reader, 2, tokens=[11, 12, 13, 11, 12], sampling=GREEDY, num_draft_tokens=3)
    for fields, text in (
        ({"tokens": REPEATING, "sampling": GREEDY}, REPEATING),
        ({"base_length": 14, "tokens": [6, 7]}, [*REPEATING, 6, 7]),
        ({"base_length": 10, "tokens": [7, 8]}, [*REPEATING[:10], 7, 8]),
    )[: COMPARED.get(name, 3)]:
        reply = bench.ask(reader, 1, num_draft_tokens=4, **fields)
        expected = fresh_draft(name, target, text, 4)
        assert chain_of(reply) == expected
        assert expected
        assert not any(node.HasField("distribution") for node in reply.nodes)


@pytest.mark.slow
def test_suffix_remembers_answers_and_no_guesses(target: Path) -> None:
    """A row's emitted text helps the next row; replaced or drafted tokens were never emitted."""
    bench = Bench(hosted_lookup("suffix", target))
    reader = bench.reader("a")
    sampling = messages.Sampling(num_prompt=2)
    bench.ask(reader, 1, tokens=[1, 2, *range(50, 60)], sampling=sampling, num_draft_tokens=2)
    bench.ask(reader, 1, base_length=8, tokens=[70, 71, 72, 73, 74], num_draft_tokens=2)
    assert bench.tell(reader, row=1, end=True) is None
    bench.worker.turn()
    reply = bench.ask(
        reader, 2, tokens=[50, 51, 52, 53, 54, 55], sampling=GREEDY, num_draft_tokens=4
    )
    assert [node.token for node in reply.nodes] == [70, 71, 72, 73]


@pytest.mark.slow
def test_a_model_with_another_tokenizer(folder: Path, target: Path, tmp_path: Path) -> None:
    """Universal: beside other rows it drafts what it drafts alone, with distributions where both
    vocabularies have the tokens."""
    hosted = load_drafter(
        HostedDrafterOptions(
            model=str(target),
            draft=str(folder),
            drafter="universal",
            dtype="float32",
            runtime="eager",
        )
    )
    assert isinstance(hosted.host, GeneralHost)
    drawn = messages.Sampling(temperature=1.0, seed=5)
    alone = Bench(hosted)
    first = alone.ask(alone.reader("a"), 1, tokens=REPEATING, sampling=drawn, num_draft_tokens=3)
    bench = Bench(hosted)
    reader = bench.reader("a")
    bench.ask(reader, 2, tokens=[11, 12, 13], sampling=GREEDY, num_draft_tokens=3)
    bench.ask(reader, 1, tokens=[*REPEATING[:6], 99], sampling=drawn, num_draft_tokens=3)
    reply = bench.ask(reader, 1, base_length=6, tokens=REPEATING[6:], num_draft_tokens=3)
    assert [node.token for node in reply.nodes] == [node.token for node in first.nodes]
    assert all(0 < len(node.distribution.tokens) <= 65 for node in reply.nodes)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"drafter": "eagle"}, "hidden states"),
        ({"drafter": "eagle3"}, "hidden states"),
        ({"drafter": "medusa"}, "hidden states"),
        ({"drafter": "block"}, "hidden states"),
        ({"drafter": "quantised", "model": "t"}, "own weights"),
        ({"drafter": "early-exit", "model": "t"}, "own weights"),
        ({"drafter": "recycling"}, "logits"),
        ({"drafter": "lookahead"}, "own passes"),
        ({"drafter": "prediction"}, "what a request expects"),
        ({"drafter": "none"}, "drafts nothing"),
        ({"drafter": "composite", "drafter_options": {"parts": "suffix,lookahead"}}, "'lookahead'"),
        (
            {
                "drafter": "composite",
                "drafter_options": {"parts": "suffix,eagle", "options": "eagle.head=x"},
            },
            "hidden states",
        ),
        (
            {"draft": "d", "drafter_options": {"tree": "best-first"}},
            "leave out the drafter's 'tree'",
        ),
        ({}, "needs a draft model"),
        ({"drafter": "suffix", "draft": "d", "model": "t"}, "uses no draft model"),
        ({"drafter": "suffix"}, "--model TARGET"),
        ({"draft": "d", "revision": "main"}, "--model TARGET"),
        ({"drafter": "sufix"}, "Did you mean 'suffix'"),
    ],
)
def test_drafters_that_no_service_can_host_are_refused(
    options: dict[str, Any], reason: str
) -> None:
    """Before anything is loaded, by name, with what works."""
    with pytest.raises((ConfigError, CapabilityError), match=reason) as raised:
        chosen_parts(HostedDrafterOptions(**options))
    if isinstance(raised.value, CapabilityError):
        assert "Use draft-model, universal, ngram" in str(raised.value)


@pytest.mark.slow
def test_a_draft_model_of_another_vocabulary_than_the_target_named(
    folder: Path, tmp_path: Path
) -> None:
    """With --model the two are compared at the start, not when the first asker comes."""
    other = byte_tokenizer()
    other.add_tokens(["<extra>"] * 1)
    vocab = {token: (index + 1) % VOCAB for token, index in byte_tokenizer().get_vocab().items()}
    save_draft(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    import json

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
