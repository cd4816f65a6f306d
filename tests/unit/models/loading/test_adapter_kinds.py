"""Adapters of all of peft's kinds: merged they give what peft gives without merging, or they are
refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from outrider.errors import CapabilityError, CheckpointError
from outrider.llm import LLM
from outrider.models.loading.load import load_config, load_module
from outrider.models.loading.memory import model_memory
from outrider.models.source import resolve
from outrider.sampling.params import SamplingParams
from tests.contract.own_cache_families import make as own_cache_family
from tests.helpers import save_checkpoint, tiny_llama, word_tokenizer
from tests.unit.models.quantised import test_load
from tests.unit.runtime.families import make as family

peft = pytest.importorskip("peft")
CPU = torch.device("cpu")
IDS = torch.tensor([[5, 3, 4, 7, 9, 3, 5, 11, 3, 4, 8]])
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LAYERS = ["q_proj", "down_proj"]
TABLES = ["embed_tokens", "lm_head"]


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 16, "target_modules": LAYERS, **changes}
    )


def other(name: str, **changes: Any) -> Any:
    return getattr(peft, f"{name}Config")(
        **{"task_type": "CAUSAL_LM", "target_modules": LAYERS, **changes}
    )


LORAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "bias": {"bias": "all"},
    "pissa": {"init_lora_weights": "pissa"},
    "ranks": {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 64}},
    "norm": {"modules_to_save": ["norm"]},
    "parameters": {
        "target_modules": [],
        "target_parameters": ["q_proj.weight", "down_proj.weight"],
    },
    "head": {"target_modules": ["lm_head"]},
    "embeddings": {"target_modules": ["embed_tokens"]},
    "both": {"target_modules": TABLES},
    "both and layers": {"target_modules": [*TABLES, *LAYERS]},
    "both, tied": {"target_modules": TABLES, "ensure_weight_tying": True},
    "embeddings, tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "both by dora": {"target_modules": TABLES, "use_dora": True},
    "embeddings' parameter": {"target_modules": [], "target_parameters": ["embed_tokens.weight"]},
    "head's parameter": {"target_modules": [], "target_parameters": ["lm_head.weight"]},
    "whole head": {"modules_to_save": ["lm_head"]},
    "whole embeddings": {"modules_to_save": ["embed_tokens"]},
    "whole tables": {"modules_to_save": TABLES},
    "whole tables, tied": {"modules_to_save": TABLES, "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [3, 5]},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [3]}},
    "other tokens of each": {"trainable_token_indices": {"lm_head": [3], "embed_tokens": [4, 5]}},
}
OTHERS: dict[str, dict[str, Any]] = {
    "AdaLora": {"total_step": 10}, "BOFT": {}, "C3A": {"block_size": 16}, "Delora": {}, "FourierFT": {}, "HRA": {}, "IA3": {
        "feedforward_modules": ["down_proj", "lm_head"]}, "LoHa": {}, "LoKr": {}, "OFT": {}, "Shira": {}, "Vera": {}, "VBLoRA": {
        "vector_length": 16, "num_vectors": 16}, "RandLora": {}, "Miss": {},
}  # fmt: skip
REFUSED = {
    "alora": (lora(alora_invocation_tokens=[3, 4]), r"kind LORA, .*from some tokens of a text on \(alora_invocation_tokens\)"),
    "replicated": (lora(layer_replication=[[0, 2], [1, 2]]), r"it repeats layers of its base \(layer_replication\)"),
    "biases": (lora(lora_bias=True), r"cannot be merged .* because the base layer has no bias\."),
    "prefix": (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "kind PREFIX_TUNING, .*more than change"),
    "p-tuning": (peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "kind P_TUNING, "),
    "poly": (other("Poly", n_tasks=2, n_skills=2), "kind POLY, "),
}  # fmt: skip


def adapter(base: Path, folder: Path, settings: Any, tokens: int | None = None) -> Path:
    """An adapter of random values; trained after the base was given so many tokens."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base)
    if tokens is not None:
        model.resize_token_embeddings(tokens)
    adapted = peft.get_peft_model(model, copy.deepcopy(settings))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return folder


def unmerged(base: Path, folder: Path, tokens: int | None = None) -> Any:
    """peft's own model, as its users load it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    if tokens is not None:
        model.resize_token_embeddings(tokens)
    return peft.PeftModel.from_pretrained(model, folder).eval()


def logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def greedy(model: Any) -> list[int]:
    asked = {
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "use_cache": False,
    }
    return model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), **asked)[
        0, IDS.shape[1] :
    ].tolist()


def assert_same(base: Path, folder: Path, tokens: int | None = None) -> tuple[Any, Any]:
    """Also in the configs, which whatever comes after reads."""
    config = load_config(resolve(str(folder)))
    module = load_module(resolve(str(folder)), config, torch.float32, CPU)
    expected = logits(unmerged(base, folder, tokens))
    plain = logits(AutoModelForCausalLM.from_pretrained(base))
    torch.testing.assert_close(logits(module), expected, rtol=0, atol=3e-5)
    assert expected.shape != plain.shape or (expected - plain).abs().max() > 1e-2, (
        "the adapter changes nothing"
    )
    is_tied = module.get_input_embeddings().weight is module.get_output_embeddings().weight
    for each in (config, module.config):
        assert (each.tie_word_embeddings, each.vocab_size) == (is_tied, expected.shape[-1])
    return module, config


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Mapping[bool, Path]:
    """A model whose output layer is tied to the embeddings, and one whose is not."""
    root = tmp_path_factory.mktemp("bases")
    return {
        tied: save_checkpoint(
            root / str(tied), tiny_llama(96, tie_word_embeddings=tied), word_tokenizer(96)
        )
        for tied in (False, True)
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", LORAS)
def test_merged_is_unmerged(
    name: str, tied: bool, bases: Mapping[bool, Path], tmp_path: Path
) -> None:
    """On tied models both tables had the sum of what each was to have."""
    assert_same(bases[tied], adapter(bases[tied], tmp_path / "adapter", lora(**LORAS[name])))


@pytest.mark.parametrize("where", [LAYERS, ["lm_head"]])
@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_are_merged_too(
    name: str, where: list[str], bases: Mapping[bool, Path], tmp_path: Path
) -> None:
    changes = {"target_modules": where, **OTHERS[name]}
    if name == "IA3":
        changes["feedforward_modules"] = [part for part in where if part != "q_proj"]
    assert_same(bases[True], adapter(bases[True], tmp_path / "adapter", other(name, **changes)))


@pytest.mark.parametrize("name", ["zamba2", "gemma3_text", "gpt2", "mixtral", "gemma3n_text"])
def test_families_with_shared_layers_scaled_embeddings_and_experts(
    name: str, tmp_path: Path
) -> None:
    """Zamba 2's blocks share their weights; each has an adapter of its own."""
    made = own_cache_family(name, tie_word_embeddings=True) if name == "zamba2" else family(name)
    base = save_checkpoint(tmp_path / "base", made, word_tokenizer(97))
    settings = lora(target_modules="all-linear", r=2, lora_alpha=2)
    if name == "mixtral":
        settings = lora(
            target_modules=[],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
            r=2,
            lora_alpha=2,
        )
    folder = adapter(base, tmp_path / "adapter", settings)
    module = load_module(
        resolve(str(folder)), load_config(resolve(str(folder))), torch.float32, CPU
    )
    expected = logits(unmerged(base, folder))
    torch.testing.assert_close(
        logits(module) / expected.abs().max(), expected / expected.abs().max(), rtol=0, atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(
    name: str, bases: Mapping[bool, Path], tmp_path: Path
) -> None:
    settings, message = REFUSED[name]
    folder = adapter(bases[True], tmp_path / "adapter", settings)
    with pytest.raises(CapabilityError, match=message) as refused:
        LLM(folder, drafter="none")
    assert len(str(refused.value).splitlines()) == 1


def test_x_lora_is_refused_though_peft_would_merge_a_part_of_it(
    bases: Mapping[bool, Path], tmp_path: Path
) -> None:
    folder = adapter(bases[True], tmp_path / "adapter", lora())
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "peft_type": "XLORA"}))
    with pytest.raises(
        CapabilityError, match="is an adapter of kind XLORA, which cannot be merged into weights"
    ):
        LLM(folder, drafter="none")


@pytest.mark.parametrize("tokens", [101, 90])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "both",
        "both by dora",
        "whole tables",
        "whole head",
        "tokens",
        "embeddings' parameter",
        "both, tied",
    ],
)
def test_adapters_with_added_tokens(
    name: str, tied: bool, tokens: int, bases: Mapping[bool, Path], tmp_path: Path
) -> None:
    """The base is given their rows, and loses those that training had cut off."""
    assert_same(
        bases[tied], adapter(bases[tied], tmp_path / "adapter", lora(**LORAS[name]), tokens), tokens
    )


@pytest.mark.slow
def test_rows_that_nobody_has_are_not_made_up(bases: Mapping[bool, Path], tmp_path: Path) -> None:
    """peft saves no output layer where only the embeddings have an adapter; a tied model has it all
    the same."""
    settings = lora(target_modules=["embed_tokens"])
    assert_same(bases[True], adapter(bases[True], tmp_path / "tied", settings, 101), 101)
    folder = adapter(bases[False], tmp_path / "untied", settings, 101)
    with pytest.raises(
        CheckpointError,
        match=r"trained with 101 tokens, its base '.*' has 96, and it lacks 'lm_head' for",
    ):
        LLM(folder, drafter="none")


def test_tables_that_stay_the_same_stay_tied(bases: Mapping[bool, Path], tmp_path: Path) -> None:
    settings = {
        "layers": lora(),
        "tokens": lora(trainable_token_indices=[3]),
        "head": lora(target_modules=["lm_head"]),
    }
    for name, tied in (("layers", True), ("tokens", True), ("head", False)):
        module, _ = assert_same(bases[True], adapter(bases[True], tmp_path / name, settings[name]))
        assert (
            module.get_input_embeddings().weight is module.get_output_embeddings().weight
        ) == tied


@pytest.mark.slow
@pytest.mark.parametrize("name", ["head", "embeddings", "both", "whole embeddings"])
def test_texts_on_the_native_runtime_and_of_drafts(
    name: str, bases: Mapping[bool, Path], tmp_path: Path
) -> None:
    """Catches whatever takes the output layer for the embeddings after merging."""
    folder = adapter(bases[True], tmp_path / "adapter", lora(**LORAS[name]))
    expected = greedy(unmerged(bases[True], folder))
    assert expected != greedy(AutoModelForCausalLM.from_pretrained(bases[True]))
    numbers: dict[str, Any] = {"dtype": "float32", "threads": 1}
    ways = (
        ("none", "native"),
        ("none", "native"),
        ("none", "eager"),
        ("early-exit", "auto"),
        ("quantised", "auto"),
    )
    for drafter, runtime in ways:  # the second is a later start
        llm = LLM(folder, drafter=drafter, runtime=runtime, **numbers)
        assert llm.generate([IDS[0].tolist()], GREEDY)[0].token_ids == expected
    drafted = LLM(folder, draft=folder, num_draft_tokens=3, **numbers).generate(
        [IDS[0].tolist()], GREEDY
    )[0]
    assert drafted.token_ids == expected
    assert drafted.stats.accepted == drafted.stats.tested > 0


@pytest.mark.slow
def test_rounding_on_loading_takes_the_untied_model(
    bases: Mapping[bool, Path], tmp_path: Path
) -> None:
    folder = adapter(bases[True], tmp_path / "adapter", lora(target_modules=TABLES))
    whole = load_module(
        resolve(str(folder)), load_config(resolve(str(folder))), torch.bfloat16, CPU
    )
    merged = save_checkpoint(tmp_path / "merged", whole, word_tokenizer(96))
    texts = [
        LLM(name, drafter="none", quantise=8, threads=1).generate([IDS[0].tolist()], GREEDY)[0]
        for name in (folder, merged)
    ]
    assert texts[0].token_ids == texts[1].token_ids


def test_memory_of_a_table_that_is_untied(bases: Mapping[bool, Path], tmp_path: Path) -> None:
    config = load_config(resolve(str(bases[True])))
    table = 96 * 64 * 4
    base = model_memory(resolve(str(bases[True])), config, torch.float32).weights_bytes
    for name, untied in (("plain", 0), ("head", table), ("whole head", 0)):
        folder = adapter(bases[True], tmp_path / name, lora(**LORAS[name]))
        size = (folder / "adapter_model.safetensors").stat().st_size
        assert (
            model_memory(resolve(str(folder)), config, torch.float32).weights_bytes
            == base + size + untied
        )


def test_an_adapter_of_a_gguf_file_or_a_quantised_checkpoint(
    bases: Mapping[bool, Path], tmp_path: Path
) -> None:
    """The first was "no such folder", though the file was there; the second spoke of layers that
    nobody knows."""
    folder = adapter(bases[True], tmp_path / "adapter", lora())
    settings = json.loads((folder / "adapter_config.json").read_text())

    def named(base: str) -> Path:
        (folder / "adapter_config.json").write_text(
            json.dumps({**settings, "base_model_name_or_path": base})
        )
        return folder

    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "gguf" / "unnamed").write_bytes(b"GGUF" + bytes(100))
    for base in (
        "gguf/model.gguf",
        "gguf/unnamed",
        "gguf",
        "/elsewhere/model.gguf",
        "USER/REPO-GGUF",
        "USER/REPO:Q4_K_M",
    ):
        message = rf"is an adapter for '{base}', which is a GGUF file: weights that stay in blocks take no adapter\. Set base_"
        with pytest.raises(CapabilityError, match=message):
            LLM(named(base), drafter="none")
    quantised = test_load.checkpoint(tmp_path / "gptq", "gptq-4")[0]
    with pytest.raises(
        CapabilityError,
        match=r"is an adapter for '.*gptq', which is quantised by gptq: weights that stay in",
    ):
        LLM(named(str(quantised)), drafter="none")


def test_an_error_of_two_lines_says_both(bases: Mapping[bool, Path], tmp_path: Path) -> None:
    """It ended in "Error(s) in loading state_dict for PeftModelForCausalLM:"."""
    folder = adapter(bases[True], tmp_path / "adapter", lora())
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "r": 8}))
    with pytest.raises(
        CheckpointError,
        match=r"state_dict for PeftModelForCausalLM: size mismatch for base_model\.model\.",
    ):
        LLM(folder, drafter="none")


def test_an_adapter_with_values_that_are_no_numbers(
    bases: Mapping[bool, Path], tmp_path: Path
) -> None:
    settings = lora(modules_to_save=["norm"])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(bases[True]), settings)
    with torch.no_grad():
        model.base_model.model.model.norm.modules_to_save["default"].weight[3] = float("nan")
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        CheckpointError, match=r"is damaged: '.*norm\.weight' has values that are no finite numbers"
    ):
        LLM(tmp_path / "adapter", drafter="none")
