"""The two tables of docs/models.md, measured: `python -m tools.models_table` loads a tiny model of
each family and writes them.

    native  on the native runtime and our cache: chains and trees, greedy text with drafts that without to the bit
    torch   on PyTorch's modules and our cache: chains and trees
    own     on transformers' own cache (`models/stateful/`): chains
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.cache import cache_folder
from outrider.errors import CapabilityError
from outrider.models.loading.load import build_lm, finish
from outrider.models.stateful.lm import StateLM
from outrider.runtime.limits import find_native_limits
from outrider.runtime.own_states import native_states
from outrider.runtime.run import use_native_run
from tests.contract import multimodal_families, own_cache_families
from tests.unit.runtime import families

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN = "<!-- tables: written by python -m tools.models_table -->"
END = "<!-- end of tables -->"
NATIVE = "native"
TORCH = "torch"
OWN = "own"
FAMILIES = {  # the native tier, by model types
    "Apertus": ["apertus"],
    "Bamba": ["bamba"],
    "BLOOM": ["bloom"],
    "Cohere (Command R, R7B)": ["cohere", "cohere2", "cohere2_vision"],
    "DeepSeek V2, V3, R1, V3.2; Kimi K2": ["deepseek_v2", "deepseek_v3", "deepseek_v32"],
    "ERNIE 4.5": ["ernie4_5", "ernie4_5_moe"],
    "EXAONE 4": ["exaone4"],
    "Falcon, Falcon-H1": ["falcon", "falcon_h1"],
    "Gemma 1 to 4, 3n": [
        "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified",
        "gemma4_unified_text"],
    "GLM 4, 4.5 to 4.7, 5": [
        "glm", "glm4", "glm46v", "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe", "glm_moe_dsa"],
    "GPT-2, GPT-NeoX (Pythia)": ["gpt2", "gpt_neox"],
    "gpt-oss": ["gpt_oss"],
    "Granite 3, 4": ["granite", "granitemoe", "granitemoehybrid", "granitemoeshared"],
    "Hunyuan": ["hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3"],
    "Jamba": ["jamba"],
    "Kimi Linear": ["kimi_linear"],
    "LFM2": ["lfm2", "lfm2_moe", "lfm2_vl"],
    "Ling": ["bailing_hybrid"],
    "Llama 1 to 3, SmolLM 1 and 2": ["llama"],
    "Mamba 2": ["mamba2"],
    "MiMo": ["mimo_v2_flash"],
    "MiniMax": ["minimax", "minimax_m2"],
    "Mistral, Ministral, Mixtral": ["ministral", "ministral3", "mistral", "mistral3", "mixtral"],
    "Nemotron, Nemotron-H": ["nemotron", "nemotron_h"],
    "OLMo 2, 3": ["olmo2", "olmo3"],
    "Phi-3, Phi-4": ["phi3"],
    "Qwen2, Qwen2.5": ["qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl"],
    "Qwen3, Qwen3-Next": ["qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"],
    "Qwen3.5": ["qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"],
    "Seed-OSS": ["seed_oss"],
    "SmolLM3": ["smollm3"],
    "StableLM": ["stablelm"],
    "StarCoder 2": ["starcoder2"],
}  # fmt: skip
GENERAL = {
    NATIVE: "the native runtime, as above, by code that nobody wrote for them",
    TORCH: "PyTorch's modules and our cache: slower, chains and trees",
    OWN: "transformers' own cache: slower still, chains alone, up to rounding",
}


def makers() -> dict[str, Callable[[], Any]]:
    """By model type, what makes a random model of it."""
    every: dict[str, Callable[[str], Any]] = {
        name: families.make for name in (*families.FAMILIES, *families.NOT_LOWERED)
    }
    every |= {name: own_cache_families.make for name in own_cache_families.FAMILIES}
    every |= {name: multimodal_families.make_text for name in multimodal_families.FAMILIES}
    return {name: partial(make, name) for name, make in sorted(every.items())}


def measured(family: str, module: Any) -> str:
    """How this model runs, in float32 on the CPU."""
    lm = build_lm(module, family, torch.float32, torch.device("cpu"))
    try:
        if isinstance(lm, StateLM):
            lm = native_states(lm, module, cache_folder())
        else:
            use_native_run(lm, module, cache_folder())
    except CapabilityError:
        finish(lm, module)
        return OWN if isinstance(lm, StateLM) else TORCH
    limits = find_native_limits(lm)
    assert limits.exact_rows
    assert limits.exact_trees
    return NATIVE


def tables(runs: Mapping[str, str]) -> str:
    """Both tables, of how each model type runs. Raises AssertionError where one of the native tier
    does not."""
    native = {kind for kinds in FAMILIES.values() for kind in kinds}
    assert not (wrong := sorted(kind for kind in native if runs[kind] != NATIVE)), (
        f"listed as native, and are not: {wrong}"
    )
    lines = ["## Native families", "", "| family | `model_type` |", "|---|---|"]
    lines += [f"| {family} | {_listed(kinds)} |" for family, kinds in FAMILIES.items()]
    lines += [
        "",
        "## General tier",
        "",
        "| runs on | `model_type` of those that were tried |",
        "|---|---|",
    ]
    lines += [
        f"| {how} | {_listed(sorted(kind for kind in runs.keys() - native if runs[kind] == key))} |"
        for key, how in GENERAL.items()
    ]
    return "\n".join(lines)


def _listed(kinds: list[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def written() -> dict[str, str]:
    """How each model type runs, as the page says."""
    table = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    native, general = table.split("## General tier")
    labels = {how: key for key, how in GENERAL.items()}
    found = {
        kind: NATIVE
        for line in native.splitlines()
        for kind in line.split("`")[1::2]
        if "model_type" not in line
    }
    for line in general.splitlines():
        key = labels.get(line.strip("| ").split(" | ")[0])
        found |= {} if key is None else dict.fromkeys(line.split("`")[1::2], key)
    return found


def main() -> None:
    """Measures all families and writes the tables."""
    torch.set_num_threads(1)
    runs = {}
    for family, make in makers().items():
        runs[family] = measured(family, make())
        print(family, runs[family], flush=True)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(
        f"{before}{BEGIN}\n\n{tables(runs)}\n\n{END}{rest.split(END)[1]}", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
