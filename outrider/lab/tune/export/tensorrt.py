"""TensorRT-LLM's `speculative_config` of its PyTorch backend, with `draft_len_schedule`."""

from __future__ import annotations

from outrider.lab.tune.export.choice import EXPORTED, EngineAdvice, EngineChoice
from outrider.lab.tune.tune_result import Words

ENGINE = "TensorRT-LLM"
DRAFTERS = ("draft-model", "ngram", "eagle3", "block")  # its PyTorch backend; EAGLE's first heads and Medusa's it does not read
CLASSES = {"draft-model": "DraftTargetDecodingConfig", "ngram": "NGramDecodingConfig", "eagle3": "Eagle3DecodingConfig"}


def words(advice: EngineAdvice) -> Words:
    """A piece of Python."""
    choice, notes = advice.ask("leave speculative_config out", DRAFTERS)
    if choice is None:
        return Words(engine=ENGINE, text="", notes=notes)
    name, arguments = _class(choice), [f"max_draft_len={choice.length}"]
    if choice.drafter == "ngram":
        arguments.append(f"max_matching_ngram_size={int(choice.options.get('max_ngram', 4))}")
    else:
        arguments.append(f'speculative_model="{advice.draft if choice.drafter == "draft-model" else EXPORTED}"')
    if len(choice.schedule) > 1 and choice.drafter != "block":
        arguments.append(f"draft_len_schedule={_schedule(choice)}")
    text = (
        f"from tensorrt_llm.llmapi import LLM, {name}\n\n"
        f"speculative_config = {name}({', '.join(arguments)})\n"
        f'llm = LLM("{advice.target}", speculative_config=speculative_config)'
    )
    return Words(engine=ENGINE, text=text, language="python", notes=[*notes, *_notes(choice, advice)])


def _class(choice: EngineChoice) -> str:
    if choice.drafter == "block":
        return "DSparkDecodingConfig" if choice.is_dspark else "DFlashDecodingConfig"
    return CLASSES[choice.drafter]


def _schedule(choice: EngineChoice) -> str:
    return "{" + ", ".join(f"{start}: {size}" for start, size in choice.schedule) + "}"


def _notes(choice: EngineChoice, advice: EngineAdvice) -> list[str]:
    notes = []
    if choice.drafter in ("eagle3", "block"):
        notes.append(advice.export_note(choice, "raw"))
    if len(choice.schedule) > 1 and choice.drafter != "block":
        notes.append(
            "draft_len_schedule: keys are the batch size from which a length holds, 1 must be among them and have max_draft_len; "
            "configurations of newer releases read them as the largest batch size, so check yours."
        )
    if advice.sampled:
        notes.append("It accepts exact matches only unless use_rejection_sampling (a prototype) is set; min_p is rejected.")
    return notes
