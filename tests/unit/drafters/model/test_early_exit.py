"""The target's own layers as a draft: what they draft, that they leave nothing behind, which exit
is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.build import Built, Options, build
from outrider.errors import CapabilityError, ConfigError
from outrider.models.derived.exit_search import find_exit
from outrider.models.derived.truncate import DecoderLayers
from outrider.sampling.params import SamplingParams
from tests.helpers import byte_tokenizer, make_row, run_to_end, save_checkpoint, tiny_llama

PROMPT = [5, 17, 3, 60, 41, 8, 22]
NUM_LAYERS = 4


def model(*, silent: tuple[int, ...] = (), num_layers: int = NUM_LAYERS) -> nn.Module:
    """A random target whose `silent` layers add nothing, so that an exit before them loses nothing."""
    module = tiny_llama(257, sharpness=2.0, num_hidden_layers=num_layers)
    with torch.no_grad():
        for index in silent:
            for parameter in module.model.layers[index].parameters():
                parameter.zero_()
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), model(), byte_tokenizer())


def built(folder: Path, **settings: object) -> Built:
    return build(
        Options(
            target=str(folder),
            dtype="float32",
            runtime="eager",
            drafter="early-exit",
            drafter_options=settings,
            num_draft_tokens=4,
        )
    )


@torch.inference_mode()
@pytest.mark.parametrize("exit_layer", [1, 3])
def test_it_drafts_what_the_first_layers_say(folder: Path, exit_layer: int) -> None:
    """Catches keys of the wrong layer, a prefix that is missing, a position that is off: against
    transformers itself."""
    decoder = built(folder, exit_layer=exit_layer).decoder
    short = model()
    del short.model.layers[exit_layer:]
    short.config.num_hidden_layers = exit_layer
    decoder.add(make_row(PROMPT, SamplingParams(max_tokens=20)))
    for _ in range(3):
        decoder.step()
        text = list(decoder.rows[0].tokens)
        for _ in range(4):
            text.append(int(short(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        decoder.target.catch_up([row.tokens for row in decoder.rows])
        drafted = decoder.drafter.propose(decoder.rows, [4]).tokens[0].tolist()
        assert drafted == text[-4:]


@torch.inference_mode()
def test_a_draft_leaves_the_target_as_it_was(folder: Path) -> None:
    """Catches drafts written over committed keys or values, or lengths that were moved."""
    decoder = built(folder, skip_layers="1,2").decoder
    # the second is 511 tokens long: its draft enters the next block of keys
    for row, prompt in enumerate((PROMPT, PROMPT * 73)):
        decoder.add(make_row(prompt, SamplingParams(max_tokens=20), number=row))
    target = decoder.target
    texts = [row.tokens for row in decoder.rows]
    target.catch_up(texts)
    lengths = list(target.kv.lengths)
    before = [
        [store[row, :length].clone() for row, length in enumerate(lengths)]
        for store in target.kv.keys
    ]
    assert decoder.drafter.propose(decoder.rows, [4, 4]).lengths.tolist() == [4, 4]
    assert target.kv.lengths == lengths
    for store, kept in zip(target.kv.keys, before, strict=True):
        assert all(
            torch.equal(store[row, :length], kept[row]) for row, length in enumerate(lengths)
        )
    assert decoder.drafter.lm.kv.allocated_bytes == 0


def test_layers_that_add_nothing_are_missed_by_nobody(tmp_path: Path) -> None:
    """Catches good drafts that are rejected: without its silent layers the draft is the target."""
    folder = save_checkpoint(tmp_path, model(silent=(1, 2)), byte_tokenizer())
    decoder = built(folder, skip_layers="1,2").decoder
    decoder.add(make_row(PROMPT, SamplingParams(max_tokens=40)))
    stats = run_to_end(decoder)[0].stats
    assert stats.accepted == stats.tested == stats.drafted > 0


@pytest.mark.parametrize("silent", [(1, 2, 3), (2, 3), (3,)])
def test_auto_finds_the_exit_that_pays(tmp_path: Path, silent: tuple[int, ...]) -> None:
    """Catches a search that reads the wrong position or layer: the first exit that is always right
    is the best here."""
    decoder = built(save_checkpoint(tmp_path, model(silent=silent), byte_tokenizer())).decoder
    assert f"first {silent[0]} of 4 layers: 100% of greedy tokens right" in decoder.drafter.notes[0]


@pytest.mark.slow
def test_the_search_is_repeatable_and_touches_nothing(folder: Path) -> None:
    """Catches a search on the user's cache, with running rows in it, or one that times anything."""
    made = built(folder, exit_layer=1)
    target = made.target
    layers = DecoderLayers(target.module, target.lm, "it")
    expected = find_exit(layers, target, 4)
    made.decoder.add(make_row(PROMPT, SamplingParams(max_tokens=20)))
    made.decoder.step()
    before = [store.clone() for store in (*target.lm.kv.keys, *target.lm.kv.values)]
    assert find_exit(layers, target, 4) == expected
    assert all(map(torch.equal, before, (*target.lm.kv.keys, *target.lm.kv.values)))
    target.tokenizer = None
    assert 1 <= find_exit(layers, target, 4).layer < NUM_LAYERS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exit_layer": 0}, "exit_layer must be 'auto' or at least 1, got 0"),
        ({"exit_layer": "late"}, "must be a whole number or 'auto', got 'late'"),
        ({"exit_layer": 2, "skip_layers": "1"}, "exit_layer or skip_layers, not both"),
        ({"skip_layers": "1,,2"}, "must be layer numbers like 3,4,7, got '1,,2'"),
        ({"skip_layers": "-1"}, "must be layer numbers"),
        ({"skip_layers": "2,2"}, "names a layer twice: '2,2'"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    """Refused by name, before a model is read: the folder does not even exist."""
    with pytest.raises(ConfigError, match=message):
        built(Path("nowhere"), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exit_layer": 4}, "exit_layer must be between 1 and 3 for .*, got 4"),
        ({"skip_layers": "1,4"}, r"must leave out some of layers 0\.\.3 of .*, got '1,4'"),
        ({"skip_layers": "0,1,2,3"}, "must leave out some of layers"),
    ],
)
def test_layers_that_do_not_exist(folder: Path, settings: dict[str, object], message: str) -> None:
    """The valid range is reported before the first token."""
    with pytest.raises(ConfigError, match=message):
        built(folder, **settings)


def test_a_model_of_one_layer_is_refused(tmp_path: Path) -> None:
    """Catches a draft of no layers."""
    folder = save_checkpoint(tmp_path, model(num_layers=1), byte_tokenizer())
    with pytest.raises(CapabilityError, match="has 1 layer, so a draft cannot leave one out"):
        built(folder)
