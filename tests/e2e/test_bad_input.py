"""What a person gets for a mistake: the right class of error, one line, and what to do about it.
Never a traceback.

Every test goes through `LLM`, the door users come through; the command line prints these messages
as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, LlamaConfig, ViTConfig, ViTForImageClassification

from outrider import LLM, SamplingParams
from outrider.errors import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    NumericalError,
    OutriderError,
    RequestError,
)
from tests.helpers import (
    byte_tokenizer,
    disturbed,
    save_checkpoint,
    tiny_llama,
    widened,
    word_tokenizer,
)

CONTEXT = 48


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with nothing wrong."""
    model = tiny_llama(257, max_position_embeddings=CONTEXT)
    return save_checkpoint(tmp_path_factory.mktemp("good"), model, byte_tokenizer())


@pytest.fixture(scope="module")
def llm(good: Path) -> LLM:
    return load(good)


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    for file in good.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(target: Path | str, **options: Any) -> LLM:
    return LLM(
        target,
        **{"drafter": "ngram", "dtype": "float32", "runtime": "eager", "threads": 1, **options},
    )


def refusal(kind: type[OutriderError], action: Callable[[], object]) -> str:
    """The message of the error, which must be of exactly this class and one line long."""
    with pytest.raises(OutriderError) as caught:
        action()
    message = str(caught.value)
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {message}"
    assert len(message.splitlines()) == 1, message
    return message


# ---------------------------------------------------------------- checkpoints


def test_missing_folder() -> None:
    """Catches a typo in a path turning into a long failure to reach the hub."""
    assert "/nowhere/model" in refusal(CheckpointError, lambda: load("/nowhere/model"))
    assert "./nowhere" in refusal(CheckpointError, lambda: load("./nowhere"))


def test_misspelt_folder(folder: Path) -> None:
    """The folder beside it that is probably meant; none where nothing is alike, or there is no such
    place."""
    misspelt = f"{folder}s"
    assert f"Did you mean '{folder}'?" in refusal(CheckpointError, lambda: load(misspelt))
    for other in (folder.parent / "quite-another", Path("/nowhere/at/all")):
        assert "Did you mean" not in refusal(CheckpointError, lambda name=other: load(name))  # type: ignore[misc]


@pytest.mark.slow
def test_a_home_folder_that_no_shell_expanded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--draft=~/model reaches us as it is typed, and so does a path in a file of settings."""
    monkeypatch.setenv("HOME", str(folder.parent))
    loaded = load(f"~/{folder.name}", drafter="draft-model", draft=f"~/{folder.name}")
    assert (loaded.config["target"], loaded.config["draft"]) == (str(folder), str(folder))


def test_unknown_hub_id() -> None:
    """Catches transformers' page of advice about a name that neither the disk nor the hub knows."""
    assert "nobody/nothing" in refusal(CheckpointError, lambda: load("nobody/nothing"))


def test_folder_without_config(tmp_path: Path) -> None:
    """Catches a KeyError about model_type."""
    assert "config.json" in refusal(CheckpointError, lambda: load(tmp_path))


def test_broken_config(folder: Path) -> None:
    """Catches a JSON traceback."""
    (folder / "config.json").write_text("{ not json")
    assert str(folder) in refusal(CheckpointError, lambda: load(folder))


@pytest.mark.parametrize(
    "config",
    [{}, {"model_type": "no-such-architecture"}, {"model_type": "llama", "hidden_size": "x"}],
)
def test_unusable_config(folder: Path, config: dict[str, object]) -> None:
    """Catches a config that parses and still describes nothing we know."""
    (folder / "config.json").write_text(json.dumps(config))
    assert str(folder) in refusal(CheckpointError, lambda: load(folder))


@pytest.mark.parametrize("keep", [0.5, 0.001, 0.0])
def test_truncated_weights(folder: Path, keep: float) -> None:
    """Catches a download that stopped half way."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    message = refusal(CheckpointError, lambda: load(folder))
    assert "model.safetensors" in message
    assert "damaged" in message


def test_garbage_weights(folder: Path) -> None:
    """Catches a file of the right name and the wrong kind."""
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>" * 100)
    assert str(folder) in refusal(CheckpointError, lambda: load(folder))


def test_no_weights(folder: Path) -> None:
    """Catches a folder that was copied without its large files."""
    (folder / "model.safetensors").unlink()
    message = refusal(CheckpointError, lambda: load(folder))
    assert str(folder) in message
    assert "weights" in message


def test_absent_tensors(folder: Path) -> None:
    """Catches the worst: transformers fills missing weights with random numbers, warns, and goes
    on."""
    file = folder / "model.safetensors"
    weights = {
        name: weight for name, weight in load_file(file).items() if "layers.1.mlp" not in name
    }
    save_file(weights, file, metadata={"format": "pt"})
    message = refusal(CheckpointError, lambda: load(folder))
    assert "3 weights" in message
    assert "layers.1.mlp" in message


def test_weights_of_another_shape(folder: Path) -> None:
    """Catches a config.json beside the weights of another size."""
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] += 8
    (folder / "config.json").write_text(json.dumps(config))
    assert str(folder) in refusal(CheckpointError, lambda: load(folder))


def test_no_tokenizer(folder: Path) -> None:
    """Catches text going in through a tokenizer that is not there."""
    for file in folder.glob("tokenizer*"):
        file.unlink()
    message = refusal(CheckpointError, lambda: load(folder))
    assert "tokenizer.json" in message
    assert str(folder) in message


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_not_a_language_model(tmp_path: Path, kind: str) -> None:
    """Catches a model that has weights and a tokenizer but cannot continue text."""
    small = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = (
        BertModel(BertConfig(vocab_size=257, **small))
        if kind == "bert"
        else ViTForImageClassification(ViTConfig(**small))
    )
    save_checkpoint(tmp_path, model, byte_tokenizer())
    with pytest.raises((CheckpointError, CapabilityError)) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


# ---------------------------------------------------------------- draft and target


def test_other_tokenizer(good: Path, tmp_path: Path) -> None:
    """Catches a draft whose ids mean something else: it would run, and be rejected for ever."""
    save_checkpoint(tmp_path, tiny_llama(20), word_tokenizer(20))
    message = refusal(CapabilityError, lambda: load(good, drafter="draft-model", draft=tmp_path))
    assert "20 against 257" in message
    assert "id 1 ('w1' against" in message
    assert "--drafter ngram" in message
    assert str(tmp_path) in message


@pytest.mark.slow
def test_one_token_differs(tmp_path: Path) -> None:
    """Catches a check that looks at sizes only."""
    for name, prefix in (("target", "w"), ("draft", "v")):
        save_checkpoint(tmp_path / name, tiny_llama(20), word_tokenizer(20, prefix=prefix))
    message = refusal(
        CapabilityError,
        lambda: load(tmp_path / "target", drafter="draft-model", draft=tmp_path / "draft"),
    )
    assert "id 1 ('v1' against 'w1')" in message


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(257, 320), (320, 257)])
def test_padded_vocabularies_are_fine(tmp_path: Path, widths: tuple[int, int]) -> None:
    """Catches the refusal, or the crash, of a pair that only pads its embeddings differently
    (Qwen's sizes do)."""
    target = tiny_llama(257)
    for name, model, width in zip(
        ("target", "draft"), (target, disturbed(target, 0.05)), widths, strict=True
    ):
        save_checkpoint(tmp_path / name, widened(model, width), byte_tokenizer())
    both = load(tmp_path / "target", drafter="draft-model", draft=tmp_path / "draft")
    plain = load(tmp_path / "target", drafter="none")
    for params in (
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=20, temperature=1.0, repetition_penalty=1.2),
    ):
        done = both.generate("abc", params)[0]
        assert done.stats.accepted > 0
        assert params.temperature or done.token_ids == plain.generate("abc", params)[0].token_ids


def test_draft_without_need(good: Path) -> None:
    """Catches an option that is accepted and ignored."""
    assert "ngram" in refusal(ConfigError, lambda: load(good, drafter="ngram", draft=good))


def test_draft_missing(good: Path) -> None:
    """Catches a drafter that fails later, when it looks for its model."""
    assert "--draft" in refusal(ConfigError, lambda: load(good, drafter="draft-model"))


# ---------------------------------------------------------------- names and parameters


@pytest.mark.parametrize(
    ("option", "typo", "meant"), [("drafter", "ngarm", "ngram"), ("verifier", "blok", "block")]
)
def test_unknown_names(good: Path, option: str, typo: str, meant: str) -> None:
    """Catches an error that does not say what there is."""
    message = refusal(ConfigError, lambda: load(good, **{option: typo}))
    assert f"unknown {option} '{typo}'. Did you mean '{meant}'?" in message
    assert "Available:" in message


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_draft_tokens", 0),
        ("num_draft_tokens", 65),
        ("max_num_seqs", 0),
        ("threads", 0),
        ("max_model_len", 1),
        ("runtime", "maybe"),
        ("dtype", "float31"),
        ("device", "tpu"),
    ],
)
def test_options_out_of_range(good: Path, option: str, value: object) -> None:
    """Catches a value that is clamped, ignored, or fails deep inside torch."""
    message = refusal(ConfigError, lambda: load(good, **{option: value}))
    assert str(value) in message
    assert option in message


COMBINATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a chain verifier for trees": ({"drafter": "lookahead", "verifier": "block"}, "traversal"),
    "a tree of no known shape": (
        {"drafter": "draft-model", "drafter_options": {"tree": "4y2"}},
        "4x2x1",
    ),
    "a stop rule for trees": (
        {"drafter": "draft-model", "drafter_options": {"tree": "2x2", "stop": "entropy"}},
        "for chains",
    ),
    "a lossy verifier unasked": ({"verifier": "typical"}, "--lossy"),
    "lossy without a lossy verifier": ({"lossy": True}, "typical, top-k"),
    "an option of another drafter": (
        {"drafter": "ngram", "drafter_options": {"exit_layer": 1}},
        "min_ngram",
    ),
    "a misspelt option": ({"drafter": "suffix", "drafter_options": {"max_dept": 3}}, "'max_depth'"),
    "an exit behind the last layer": (
        {"drafter": "early-exit", "drafter_options": {"exit_layer": 99}},
        "between 1 and 1",
    ),
    "bits no kernel has": ({"drafter": "quantised", "drafter_options": {"bits": 3}}, "4 or 8"),
    "no corpus": ({"drafter": "retrieval"}, "corpus=PATH"),
    "a corpus that is not there": (
        {"drafter": "retrieval", "drafter_options": {"corpus": "/nowhere"}},
        "/nowhere",
    ),
    "two models in a composite": (
        {"drafter": "composite", "drafter_options": {"parts": "quantised,early-exit"}},
        "one model",
    ),
    "a draft service in a composite": (
        {"drafter": "composite", "drafter_options": {"parts": "remote,suffix"}},
        "use --drafter remote alone",
    ),
    "a length that is no number": ({"num_draft_tokens": "many"}, "auto:N"),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_impossible_combinations(good: Path, name: str) -> None:
    """Catches a combination that fails in the middle of a text, and a refusal that does not say
    what would work."""
    options, hint = COMBINATIONS[name]
    with pytest.raises((ConfigError, CapabilityError)) as caught:
        load(good, **options)
    assert hint in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", -0.1),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("max_tokens", 0),
        ("seed", 2**64),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("allowed_token_ids", []),
        ("logprobs", -1),
        ("logit_bias", {1: "x"}),
    ],
)
def test_sampling_out_of_range(name: str, value: object) -> None:
    """Catches a sampling option that silently means something else."""
    assert name in refusal(ConfigError, lambda: SamplingParams(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [("allowed_token_ids", [257]), ("logit_bias", {9999: 1.0}), ("logprobs", 258)],
)
def test_sampling_outside_the_vocabulary(llm: LLM, name: str, value: object) -> None:
    """Catches what only the model's vocabulary can refuse, and a refusal that leaves a dead row
    behind."""
    with pytest.raises((ConfigError, RequestError)) as caught:
        llm.generate("abc", SamplingParams(max_tokens=4, **{name: value}))
    assert name in str(caught.value)
    assert len(llm.generate("abc", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_wrong_number_of_params(llm: LLM) -> None:
    """Catches params that are cut to the shorter list."""
    message = refusal(ConfigError, lambda: llm.generate(["a", "b"], [SamplingParams()] * 3))
    assert "3 sampling_params for 2 prompts" in message


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("prompt", ["", []])
def test_empty_prompt(llm: LLM, prompt: str | list[int]) -> None:
    """Catches an index error on a text without tokens."""
    message = refusal(RequestError, lambda: llm.generate([prompt], SamplingParams(max_tokens=2)))
    assert "prompt 0 is empty" in message


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_prompt_longer_than_the_context(llm: LLM, length: int) -> None:
    """Catches positions the model never saw."""
    message = refusal(
        RequestError, lambda: llm.generate(["ok", "x" * length], SamplingParams(max_tokens=2))
    )
    assert "prompt 1" in message
    assert str(length) in message
    assert str(CONTEXT) in message


@pytest.mark.parametrize("room", [1, 2, 5])
def test_the_context_ends_the_text(good: Path, room: int) -> None:
    """Catches a draft that runs over the context's end, and an end that is not reported as such."""
    for options in ({}, {"drafter": "draft-model", "draft": good}):
        done = load(good, **options).generate(
            "x" * (CONTEXT - room), SamplingParams(max_tokens=100, ignore_eos=True)
        )[0]
        assert (len(done.token_ids), done.finish_reason) == (room, "length")


def test_token_id_outside_the_vocabulary(llm: LLM) -> None:
    """Catches an embedding look-up far from the mistake."""
    assert "257" in refusal(
        RequestError, lambda: llm.generate([[1, 2, 257]], SamplingParams(max_tokens=2))
    )


def test_no_chat_template(llm: LLM) -> None:
    """Catches transformers' advice about a template we cannot set here."""
    assert "chat template" in refusal(
        ConfigError, lambda: llm.chat_prompt([{"role": "user", "content": "hi"}])
    )


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_stop_the_generation(tmp_path: Path, temperature: float) -> None:
    """Catches a model gone wrong that goes on talking (argmax of NaN is a token like any other)."""
    model = tiny_llama(257)
    with torch.no_grad():  # one token, which the probes at loading do not happen to use
        model.model.embed_tokens.weight[byte_tokenizer()("z")["input_ids"][0]] = float("nan")
    save_checkpoint(tmp_path, model, byte_tokenizer())
    llm = load(tmp_path, drafter="none")
    params = SamplingParams(max_tokens=8, temperature=temperature, ignore_eos=True)
    before = llm.generate("abc", SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids
    message = refusal(NumericalError, lambda: llm.generate(["a", "xyz"], params))
    assert "NaN" in message
    assert "layer 0 of 0..1, fed by the embedding" in message
    assert "row 1" in message
    after = llm.generate(["abc", "abd"], SamplingParams(max_tokens=8, ignore_eos=True))
    assert after[0].token_ids == before, (
        "what the failed generation left in the cache reaches the next one"
    )


def test_nan_weights_are_refused_or_stop(tmp_path: Path) -> None:
    """Catches a damaged checkpoint that loads, passes its probes because NaN compares with nothing,
    and speaks."""
    model = tiny_llama(257)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    save_checkpoint(tmp_path, model, byte_tokenizer())
    message = refusal(
        NumericalError, lambda: load(tmp_path).generate("abc", SamplingParams(max_tokens=2))
    )
    assert "NaN" in message
    assert "model.layers.0.mlp.down_proj.weight" in message


def test_config_objects_are_not_shared() -> None:
    """Catches a helper of these tests that would hide a real one: `widened` must not change its
    argument."""
    model = tiny_llama(257)
    widened(model, 320)
    assert isinstance(model.config, LlamaConfig)
    assert model.config.vocab_size == 257
