"""TensorRT-LLM's `speculative_config`, transformers' `generate` arguments and llama.cpp's server flags.

TensorRT-LLM: its PyTorch backend, with `draft_len_schedule`; EAGLE's first heads and Medusa's it does not read. transformers:
batch 1, its own loop; or our loop inside it (docs/transformers.md). llama.cpp: the `--spec-...` names of 2026.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.lab.tune.export.choice import Engine, EngineAdvice, EngineChoice

CLASSES = {"draft-model": "DraftTargetDecodingConfig", "ngram": "NGramDecodingConfig", "eagle3": "Eagle3DecodingConfig"}
FIXED = (
    '{model}.generation_config.num_assistant_tokens = {size}\n'
    '{model}.generation_config.num_assistant_tokens_schedule = "constant"\n'
    "{model}.generation_config.assistant_confidence_threshold = 0.0  # else it stops drafting by a threshold of its own\n"
)
TYPES = {"draft-model": "draft-simple -md DRAFT.gguf", "ngram": "ngram-simple", "eagle3": "draft-eagle3 -md HEAD.gguf"}


def _tensorrt(choice: EngineChoice, advice: EngineAdvice) -> str:
    block = "DSparkDecodingConfig" if choice.is_dspark else "DFlashDecodingConfig"
    name, arguments = CLASSES.get(choice.drafter, block), [f"max_draft_len={choice.length}"]
    if choice.drafter == "ngram":
        arguments.append(f"max_matching_ngram_size={int(choice.options.get('max_ngram', 4))}")
    else:
        arguments.append(f'speculative_model="{advice.draft if choice.drafter == "draft-model" else advice.exported}"')
    if len(choice.schedule) > 1 and choice.drafter != "block":
        arguments.append(f"draft_len_schedule={dict(choice.schedule)}")
    return (
        f"from tensorrt_llm.llmapi import LLM, {name}\n\n"
        f"speculative_config = {name}({', '.join(arguments)})\n"
        f'llm = LLM("{advice.target}", speculative_config=speculative_config)'
    )


def _tensorrt_notes(choice: EngineChoice, advice: EngineAdvice) -> Iterator[str]:
    if choice.drafter in ("eagle3", "block"):
        yield from advice.export_notes(choice, "raw")
    if len(choice.schedule) > 1 and choice.drafter != "block":
        yield (
            "draft_len_schedule: keys are the batch size from which a length holds, 1 must be among them and have max_draft_len; "
            "configurations of newer releases read them as the largest batch size, so check yours."
        )
    if advice.sampled:
        yield "It accepts exact matches only unless use_rejection_sampling (a prototype) is set; min_p is rejected."


def _transformers(choice: EngineChoice, advice: EngineAdvice) -> str:
    if choice.drafter == "ngram":
        ngram = int(choice.options.get("max_ngram", 4))
        return f"model.generate(**inputs, prompt_lookup_num_tokens={choice.size}, max_matching_ngram_size={ngram})"
    if choice.drafter == "early-exit":
        exits = f"model.generate(**inputs, assistant_early_exit={int(choice.options['exit_layer'])})"
        return FIXED.format(model="model", size=choice.size) + exits
    return (
        f'assistant = AutoModelForCausalLM.from_pretrained("{advice.draft}", dtype="auto")\n'
        + FIXED.format(model="assistant", size=choice.size)
        + "model.generate(**inputs, assistant_model=assistant)"
    )


def _transformers_notes(choice: EngineChoice, advice: EngineAdvice) -> list[str]:
    return ["One prompt at a time: its assisted generation does not batch."]


def _llamacpp(choice: EngineChoice, advice: EngineAdvice) -> str:
    block = f"{'draft-dspark' if choice.is_dspark else 'draft-dflash'} -md HEAD.gguf"
    every = " --spec-draft-p-min 0" if choice.drafter == "draft-model" else ""
    kind = TYPES.get(choice.drafter, block)
    return f"llama-server -m TARGET.gguf --spec-type {kind} --spec-draft-n-max {choice.length}{every}"


def _llamacpp_notes(choice: EngineChoice, advice: EngineAdvice) -> Iterator[str]:
    yield "Models as GGUF files. Older builds call the length --draft-max."
    if choice.drafter in ("eagle3", "block"):
        folder, target = advice.exported, advice.target
        yield from advice.export_notes(choice, "raw")
        yield f"Then: python convert_hf_to_gguf.py {folder} --target-model-dir {target} --outfile HEAD.gguf"
    if advice.sampled:
        yield "It accepts a draft token only where its own sample is that token: fewer are accepted at this temperature."


TENSORRT = Engine(
    "TensorRT-LLM", ("draft-model", "ngram", "eagle3", "block"), "leave speculative_config out", "python", _tensorrt,
    _tensorrt_notes,
)  # fmt: skip
TRANSFORMERS = Engine(
    "transformers", ("draft-model", "ngram", "early-exit"),
    "give generate() neither assistant_model nor prompt_lookup_num_tokens", "python", _transformers, _transformers_notes,
)  # fmt: skip
LLAMACPP = Engine(
    "llama.cpp", ("draft-model", "ngram", "eagle3", "block"), "--spec-type none, and no draft model", "bash", _llamacpp,
    _llamacpp_notes,
)  # fmt: skip
