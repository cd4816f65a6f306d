"""vLLM's `speculative_config`; its batch-size table is `num_speculative_tokens_per_batch_size`. Keys checked with 0.32's parser.

`rejection_sample_method: block` is not in it. vLLM's model runner V1 (the default of older versions, and of any without Triton)
takes the key and does not have the method; worse, it then drafts greedily whatever `draft_sample_method` says, and accepts with
p alone. Token by token, both runners follow their settings.

Heads were tried in 0.32 (docs/train.md, "In vLLM"): methods eagle, eagle3, medusa (a chain of best guesses, no tree), dflash;
block heads with a Markov or a confidence head are its dspark, which needs its model runner V2, so a GPU.

Look-ups that it does not have (several at once, a corpus, a table over all texts) are Outrider's own, as its custom_class; it
verifies chains, so a composite takes the best part of each row there.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from outrider.lab.tune.export.choice import PLUGGED, Engine, EngineAdvice, EngineChoice

OWN = ("draft-model", "ngram", "suffix", "eagle", "eagle3", "mtp", "medusa", "block")
PROPOSER = "outrider.integrations.vllm.Proposer"
LAYOUTS = {"eagle": "raw", "eagle3": "raw", "medusa": "vllm", "block": "raw"}  # of `outrider export`
SAMPLING = ("draft-model", "eagle", "eagle3")  # whose tokens it can draw
LARGEST_BATCH = 4096  # rows that the last line of the table reaches to


def arguments(choice: EngineChoice, advice: EngineAdvice) -> dict[str, Any]:
    """Engine arguments by name."""
    found = {"speculative_config": config(choice, advice)}
    if choice.drafter in PLUGGED:
        found["additional_config"] = additional_config(choice)
    return found


def command(target: str, found: dict[str, Any], more: Sequence[str] = ()) -> list[str]:
    """The server's command line, word by word, drafting last."""
    drafting = [word for name, value in found.items() for word in (f"--{name.replace('_', '-')}", json.dumps(value))]
    return ["vllm", "serve", target, *more, *drafting]


def config(choice: EngineChoice, advice: EngineAdvice) -> dict[str, Any]:
    """The `speculative_config`."""
    found: dict[str, Any] = {"method": method_of(choice), "num_speculative_tokens": choice.length}
    if choice.drafter in PLUGGED:
        found["model"] = PROPOSER
    elif choice.drafter in LAYOUTS or choice.drafter == "draft-model":
        found["model"] = advice.exported if choice.drafter in LAYOUTS else advice.draft
        if advice.sampled and choice.drafter in SAMPLING:  # its default takes the draft's favourite and accepts it with p alone
            found["draft_sample_method"] = "probabilistic"
    elif choice.drafter == "mtp":
        pass  # it finds the head in the target's checkpoint
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
        steps = [(start, choice.length if choice.drafter == "block" and nodes else nodes) for start, nodes in choice.schedule]
        found["num_speculative_tokens_per_batch_size"] = batch_size_table(steps)
    return found


def batch_size_table(steps: Sequence[tuple[int, int]]) -> list[list[int]]:
    """[first row, last row, tokens] of each step, from (rows, tokens from so many rows on)."""
    ends = [start - 1 for start, _ in steps[1:]] + [LARGEST_BATCH]
    return [[start, end, tokens] for (start, tokens), end in zip(steps, ends, strict=True)]


def additional_config(choice: EngineChoice) -> dict[str, Any]:
    """What our proposer reads of vLLM's `additional_config`."""
    options = {name: value for name, value in choice.options.items() if name != "mode"}
    return {"outrider": {"drafter": choice.drafter, "drafter_options": options}}


def method_of(choice: EngineChoice) -> str:
    """What vLLM calls it."""
    if choice.drafter in PLUGGED:
        return "custom_class"
    if choice.drafter == "block":
        return "dspark" if choice.is_dspark else "dflash"
    return choice.drafter.replace("-", "_")


def _notes(choice: EngineChoice, advice: EngineAdvice) -> Iterator[str]:
    if choice.drafter in PLUGGED:
        yield "Needs outrider beside vLLM, on every node (docs/vllm.md); it drafts chains there, whatever was tried here."
    if choice.drafter == "suffix":
        yield "Needs arctic-inference==0.1.1 beside vLLM."
    if choice.drafter in ("suffix", "ngram"):
        ours = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": choice.size}
        yield (
            f"Or with Outrider's own {choice.drafter} (docs/vllm.md): --speculative-config '{json.dumps(ours)}' "
            f"--additional-config '{json.dumps(additional_config(choice))}'"
        )
    if choice.drafter == "draft-model":
        yield "The draft's vocabulary must have the target's size."
    if choice.drafter in LAYOUTS:
        yield from advice.export_notes(choice, LAYOUTS[choice.drafter])
    if choice.drafter == "mtp":
        yield "It takes the MTP head in the target's checkpoint."
    if choice.is_dspark:
        yield "Heads with a Markov or a confidence head are its dspark: model runner V2 only, which needs Triton."
    if advice.sampled and choice.drafter in ("medusa", "block"):
        yield "It takes this head's likeliest tokens, of which fewer are kept than of sampled ones (not tried)."
    if advice.sampled:
        yield "min_p and logit_bias are refused while it speculates."
        if choice.drafter == "draft-model":
            yield 'Model runner V2 has "rejection_sample_method": "block", which accepts more; V1 ignores it and loses.'
    if len(choice.schedule) > 1:
        yield "The batch-size table is ignored under data parallelism."


def _text(choice: EngineChoice, advice: EngineAdvice) -> str:
    """A command line with the configuration as JSON."""
    return shlex.join(command(advice.target, arguments(choice, advice)))


VLLM = Engine("vLLM", OWN + PLUGGED, "leave --speculative-config out", "bash", _text, _notes)
