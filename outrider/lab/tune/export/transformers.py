"""transformers' `generate` arguments: batch 1, its own loop; or our loop inside it (docs/transformers.md)."""

from __future__ import annotations

from outrider.lab.tune.export.choice import EngineAdvice
from outrider.lab.tune.tune_result import Words

ENGINE = "transformers"
DRAFTERS = ("draft-model", "ngram", "early-exit")
FIXED = (
    '{model}.generation_config.num_assistant_tokens = {size}\n'
    '{model}.generation_config.num_assistant_tokens_schedule = "constant"\n'
    "{model}.generation_config.assistant_confidence_threshold = 0.0  # else it stops drafting by a threshold of its own\n"
)


def words(advice: EngineAdvice) -> Words:
    """A piece of Python."""
    choice, notes = advice.ask("give generate() neither assistant_model nor prompt_lookup_num_tokens", DRAFTERS)
    if choice is None:
        return Words(engine=ENGINE, text="", notes=notes)
    notes = [*notes, "One prompt at a time: its assisted generation does not batch."]
    if choice.drafter == "ngram":
        ngram = int(choice.options.get("max_ngram", 4))
        text = f"model.generate(**inputs, prompt_lookup_num_tokens={choice.size}, max_matching_ngram_size={ngram})"
        return Words(engine=ENGINE, text=text, language="python", notes=notes)
    if choice.drafter == "early-exit":
        text = FIXED.format(model="model", size=choice.size)
        text += f"model.generate(**inputs, assistant_early_exit={int(choice.options['exit_layer'])})"
        return Words(engine=ENGINE, text=text, language="python", notes=notes)
    text = (
        f'assistant = AutoModelForCausalLM.from_pretrained("{advice.draft}", dtype="auto")\n'
        + FIXED.format(model="assistant", size=choice.size)
        + "model.generate(**inputs, assistant_model=assistant)"
    )
    return Words(engine=ENGINE, text=text, language="python", notes=notes)
