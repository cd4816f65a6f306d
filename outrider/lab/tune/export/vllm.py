"""vLLM's `speculative_config`; its batch-size table is `num_speculative_tokens_per_batch_size`. Keys checked with 0.32's parser.

`rejection_sample_method: block` is not in it. vLLM's model runner V1 (the default of older versions, and of any without Triton)
takes the key and does not have the method; worse, it then drafts greedily whatever `draft_sample_method` says, and accepts with
p alone. Token by token, both runners do what they are told.
"""

from __future__ import annotations

import json
from typing import Any

from outrider.lab.tune.export.choice import Advice, Choice
from outrider.lab.tune.result import Words

ENGINE = "vLLM"
DRAFTERS = ("draft-model", "ngram", "suffix")
LARGEST_BATCH = 4096  # rows that the last line of the table reaches to


def words(advice: Advice) -> Words:
    """A command line with the configuration as JSON."""
    if not advice.recommended.speculate:
        return advice.off(ENGINE, "leave --speculative-config out")
    choice = advice.choose(DRAFTERS)
    if choice is None:
        return advice.nothing(ENGINE, DRAFTERS)
    text = f"vllm serve {advice.target} --speculative-config '{json.dumps(config(choice, advice))}'"
    return Words(engine=ENGINE, text=text, language="bash", notes=[*choice.notes, *_notes(choice, advice)])


def config(choice: Choice, advice: Advice) -> dict[str, Any]:
    """The `speculative_config`."""
    found: dict[str, Any] = {"method": choice.drafter.replace("-", "_"), "num_speculative_tokens": choice.size}
    if choice.drafter == "draft-model":
        found["model"] = advice.draft
        if advice.sampled:  # its default takes the draft's favourite and accepts it with p alone
            found["draft_sample_method"] = "probabilistic"
    elif choice.drafter == "ngram":
        found |= {
            "prompt_lookup_max": int(choice.options.get("max_ngram", 4)),
            "prompt_lookup_min": int(choice.options.get("min_ngram", 1)),
        }
    else:
        found |= {
            "suffix_decoding_max_tree_depth": int(choice.options.get("max_depth", 64)),
            "suffix_decoding_max_spec_factor": float(choice.options.get("alpha", 4.0)),
            "suffix_decoding_min_token_prob": float(choice.options.get("min_probability", 0.05)),
        }
    if len(choice.schedule) > 1:
        ends = [start - 1 for start, _ in choice.schedule[1:]] + [LARGEST_BATCH]
        found["num_speculative_tokens_per_batch_size"] = [
            [start, end, size] for (start, size), end in zip(choice.schedule, ends, strict=True)
        ]
    return found


def _notes(choice: Choice, advice: Advice) -> list[str]:
    notes = []
    if choice.drafter == "suffix":
        notes.append("Needs arctic-inference==0.1.1 beside vLLM.")
    if choice.drafter == "draft-model":
        notes.append("The draft's vocabulary must have the target's size.")
    if advice.sampled:
        notes.append("min_p and logit_bias are refused while it speculates.")
        if choice.drafter == "draft-model":
            notes.append('Model runner V2 has "rejection_sample_method": "block", which accepts more; V1 ignores it and loses.')
    if len(choice.schedule) > 1:
        notes.append("The batch-size table is ignored under data parallelism.")
    return notes
