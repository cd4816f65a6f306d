"""llama.cpp's server flags (the `--spec-...` names of 2026)."""

from __future__ import annotations

from outrider.lab.tune.export.choice import Advice
from outrider.lab.tune.result import Words

ENGINE = "llama.cpp"
DRAFTERS = ("draft-model", "ngram")


def words(advice: Advice) -> Words:
    """A command line."""
    if not advice.recommended.speculate:
        return advice.off(ENGINE, "--spec-type none, and no draft model")
    choice = advice.choose(DRAFTERS)
    if choice is None:
        return advice.nothing(ENGINE, DRAFTERS)
    notes = [*choice.notes, "Models as GGUF files. Older builds call the length --draft-max."]
    if choice.drafter == "draft-model":
        flags = f"--spec-type draft-simple -md DRAFT.gguf --spec-draft-n-max {choice.size} --spec-draft-p-min 0"
    else:
        flags = f"--spec-type ngram-simple --spec-draft-n-max {choice.size}"
    if advice.sampled:
        notes.append("It accepts a draft token only where its own sample is that token: fewer are accepted at this temperature.")
    return Words(engine=ENGINE, text=f"llama-server -m TARGET.gguf {flags}", language="bash", notes=notes)
