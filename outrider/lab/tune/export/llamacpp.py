"""llama.cpp's server flags (the `--spec-...` names of 2026)."""

from __future__ import annotations

from outrider.lab.tune.export.choice import EXPORTED, EngineAdvice, EngineChoice
from outrider.lab.tune.tune_result import Words

ENGINE = "llama.cpp"
DRAFTERS = ("draft-model", "ngram", "eagle3", "block")


def words(advice: EngineAdvice) -> Words:
    """A command line."""
    choice, notes = advice.ask("--spec-type none, and no draft model", DRAFTERS)
    if choice is None:
        return Words(engine=ENGINE, text="", notes=notes)
    flags = f"--spec-type {_type(choice)} {_model(choice)}--spec-draft-n-max {choice.length}"
    if choice.drafter == "draft-model":
        flags += " --spec-draft-p-min 0"
    text = f"llama-server -m TARGET.gguf {flags}"
    return Words(engine=ENGINE, text=text, language="bash", notes=[*notes, *_notes(choice, advice)])


def _type(choice: EngineChoice) -> str:
    if choice.drafter == "block":
        return "draft-dspark" if choice.is_dspark else "draft-dflash"
    return {"draft-model": "draft-simple", "ngram": "ngram-simple"}.get(choice.drafter, "draft-eagle3")


def _model(choice: EngineChoice) -> str:
    if choice.drafter == "ngram":
        return ""
    return "-md DRAFT.gguf " if choice.drafter == "draft-model" else "-md HEAD.gguf "


def _notes(choice: EngineChoice, advice: EngineAdvice) -> list[str]:
    notes = ["Models as GGUF files. Older builds call the length --draft-max."]
    if choice.drafter in ("eagle3", "block"):
        notes.append(advice.export_note(choice, "raw"))
        notes.append(f"Then: python convert_hf_to_gguf.py {EXPORTED} --target-model-dir {advice.target} --outfile HEAD.gguf")
    if advice.sampled:
        notes.append("It accepts a draft token only where its own sample is that token: fewer are accepted at this temperature.")
    return notes
