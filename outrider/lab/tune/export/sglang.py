"""SGLang's server arguments. A chain of k: k steps, one branch, k + 1 tokens to verify (the pending one counts)."""

from __future__ import annotations

from outrider.lab.tune.export.choice import Advice
from outrider.lab.tune.result import Words

ENGINE = "SGLang"
DRAFTERS = ("draft-model", "ngram")


def words(advice: Advice) -> Words:
    """A command line."""
    if not advice.recommended.speculate:
        return advice.off(ENGINE, "leave --speculative-algorithm out")
    choice = advice.choose(DRAFTERS)
    if choice is None:
        return advice.nothing(ENGINE, DRAFTERS)
    lines = [f"python -m sglang.launch_server --model-path {advice.target}"]
    notes = list(choice.notes)
    if choice.drafter == "draft-model":
        lines += [
            f"--speculative-algorithm STANDALONE --speculative-draft-model-path {advice.draft}",
            f"--speculative-num-steps {choice.size} --speculative-eagle-topk 1 --speculative-num-draft-tokens {choice.size + 1}",
        ]
        if advice.sampled:
            lines.append("--speculative-use-rejection-sampling")
            notes.append("Rejection sampling came in May 2026; without it a sampled draft is accepted less often.")
    else:
        lines.append(f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {choice.size + 1}")
        notes.append("Its n-gram drafter builds trees and needs CUDA.")
    if len(choice.schedule) > 1:
        notes.append("It has no table of draft lengths by batch size; --speculative-adaptive follows acceptance for EAGLE only.")
    return Words(engine=ENGINE, text=" \\\n  ".join(lines), language="bash", notes=notes)
