"""SGLang's server arguments. A chain of k: k steps, one branch, k + 1 tokens to verify (the pending one counts); a best-first
tree, which it grows as EAGLE-2 does, has as many steps as levels, and `top_k` branches. Block heads are drafted whole. Look-ups
that it does not have are Outrider's own (docs/sglang.md), named in the environment."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping

from outrider.lab.tune.export.choice import PLUGGED, Engine, EngineAdvice, EngineChoice
from outrider.trees.plan import TreeSettings

OWN = ("draft-model", "ngram", "eagle", "eagle3", "block")
BROUGHT = ("suffix", *PLUGGED)
ALGORITHMS = {"draft-model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}


def variables(choice: EngineChoice) -> dict[str, str]:
    """Variables of the environment."""
    if choice.drafter not in BROUGHT:
        return {}
    options = {name: value for name, value in choice.options.items() if name != "mode"}
    return {"OUTRIDER_DRAFTER": choice.drafter} | ({"OUTRIDER_DRAFTER_OPTIONS": json.dumps(options)} if options else {})


def command(target: str, environment: Mapping[str, str]) -> list[str]:
    """What starts the server, word by word."""
    before = ["env", *(f"{name}={value}" for name, value in environment.items())] if environment else []
    return [*before, "python", "-m", "sglang.launch_server", "--model-path", target]


def arguments(choice: EngineChoice, advice: EngineAdvice) -> list[list[str]]:
    """The words of each line of --speculative-... arguments."""
    if choice.drafter == "ngram" or choice.drafter in BROUGHT:
        algorithm = "NGRAM" if choice.drafter == "ngram" else "OUTRIDER"
        return [["--speculative-algorithm", algorithm, "--speculative-num-draft-tokens", f"{choice.size + 1}"]]
    if choice.drafter == "block":
        algorithm = "DSPARK" if choice.is_dspark else "DFLASH"
        size = [] if choice.is_dspark else ["--speculative-num-draft-tokens", f"{choice.length + 1}"]
        return [["--speculative-algorithm", algorithm, "--speculative-draft-model-path", advice.exported, *size]]
    model = advice.draft if choice.drafter == "draft-model" else advice.exported
    steps, branches = _shape(choice)
    lines = [
        ["--speculative-algorithm", ALGORITHMS[choice.drafter], "--speculative-draft-model-path", str(model)],
        [
            "--speculative-num-steps", f"{steps}", "--speculative-eagle-topk", f"{branches}",
            "--speculative-num-draft-tokens", f"{choice.size + 1}",
        ],
    ]  # fmt: skip
    if advice.sampled and not choice.is_tree:
        lines.append(["--speculative-use-rejection-sampling"])
    return lines


def _shape(choice: EngineChoice) -> tuple[int, int]:
    """(Levels, branches.)"""
    if not choice.is_tree:
        return choice.size, 1
    usual = TreeSettings()
    return min(int(choice.options.get("max_depth", usual.max_depth)), choice.size), int(choice.options.get("top_k", usual.top_k))


def _notes(choice: EngineChoice, advice: EngineAdvice) -> Iterator[str]:
    if choice.drafter in BROUGHT:
        yield "Needs outrider beside SGLang, on every node (docs/sglang.md): chains there, and not yet run on a GPU."
    if choice.drafter == "ngram":
        yield "Its n-gram drafter builds trees and needs CUDA."
    if choice.head is not None or choice.drafter in ("eagle", "eagle3", "block"):
        yield from advice.export_notes(choice, "raw")
    if choice.drafter == "eagle3":
        yield "EAGLE in place of EAGLE3 starts as well, and accepts nothing."
    if choice.is_tree:
        yield "Trees are its older path, without overlapped scheduling."
    if advice.sampled and choice.drafter in ALGORITHMS:
        yield (
            "It verifies trees by the target's own samples, which keeps fewer than rejection sampling." if choice.is_tree
            else "Rejection sampling came in May 2026; without it a sampled draft is accepted less often."
        )  # fmt: skip
    if len(choice.schedule) > 1:
        yield "It has no table of draft lengths by batch size; --speculative-adaptive follows acceptance for EAGLE only."


def _text(choice: EngineChoice, advice: EngineAdvice) -> str:
    """One shell command on several lines."""
    lines = [command(advice.target, variables(choice)), *arguments(choice, advice)]
    return " \\\n  ".join(map(shlex.join, lines))


SGLANG = Engine(
    "SGLang", OWN + BROUGHT, "leave --speculative-algorithm out", "bash", _text, _notes, trees=("eagle", "eagle3")
)
