"""The recommendation as launch lines of vLLM, SGLang and llama.cpp: what makes them do the same,
and where they cannot.

Option names drift: vLLM's were checked with 0.32's parser, llama.cpp's are those of 2026. Look-ups
that vLLM and SGLang do not have are Outrider's own (docs/vllm.md, docs/sglang.md). Engines run
block heads at a whole block: its masks see one another, so fewer of them would be another
computation.

`rejection_sample_method: block` is not written for vLLM: its model runner V1 takes the key, does
not have the method, and then drafts greedily and accepts with p alone.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.lab.tune.engine_advice import TRAINED, Engine, EngineAdvice, EngineChoice, tuned
from outrider.lab.tune.tune_result import TuneResult, Words
from outrider.trees.plan import TreeSettings

# which no engine has; Outrider brings them along
PLUGGED = ("composite", "retrieval", "ngram-cache")
PROPOSER = "outrider.integrations.vllm.Proposer"
LARGEST_BATCH = 4096  # rows that the last line of vLLM's table reaches to


def _plugged_options(choice: EngineChoice) -> dict[str, Any]:
    return {name: value for name, value in choice.options.items() if name != "mode"}


# ---------------------------------------------------------------- vLLM


def vllm_arguments(choice: EngineChoice, advice: EngineAdvice) -> dict[str, Any]:
    """Engine arguments by name."""
    config: dict[str, Any] = {
        "method": choice.drafter.replace("-", "_"),
        "num_speculative_tokens": choice.length,
    }
    more: dict[str, Any] = {}
    if choice.drafter in PLUGGED:
        config |= {"method": "custom_class", "model": PROPOSER}
        more = {"additional_config": {"outrider": _plugged(choice)}}
    elif choice.drafter in ("draft-model", *TRAINED):
        config["model"] = advice.draft if choice.drafter == "draft-model" else advice.exported
        if choice.drafter == "block":
            config["method"] = "dspark" if choice.is_dspark else "dflash"
        # else it takes the draft's favourite
        if advice.sampled and choice.drafter not in ("medusa", "block"):
            config["draft_sample_method"] = "probabilistic"
    elif choice.drafter == "ngram":
        config["prompt_lookup_max"] = int(choice.options.get("max_ngram", 4))
        config["prompt_lookup_min"] = int(choice.options.get("min_ngram", 1))
    elif choice.drafter == "suffix":
        config["suffix_decoding_max_tree_depth"] = int(choice.options.get("max_depth", 64))
        config["suffix_decoding_max_spec_factor"] = float(choice.options.get("alpha", 4.0))
        config["suffix_decoding_min_token_prob"] = float(
            choice.options.get("min_probability", 0.05)
        )
    if len(choice.schedule) > 1:
        is_block = choice.drafter == "block"
        steps = [
            (rows, choice.length if is_block and size else size) for rows, size in choice.schedule
        ]
        ends = [rows - 1 for rows, _ in steps[1:]] + [LARGEST_BATCH]
        table = [[rows, end, size] for (rows, size), end in zip(steps, ends, strict=True)]
        config["num_speculative_tokens_per_batch_size"] = table
    return {"speculative_config": config, **more}


def _plugged(choice: EngineChoice) -> dict[str, Any]:
    """What our proposer reads of vLLM's `additional_config`."""
    return {"drafter": choice.drafter, "drafter_options": _plugged_options(choice)}


def vllm_command(target: str, arguments: dict[str, Any], more: Sequence[str] = ()) -> list[str]:
    """The server's command line, word by word, drafting last."""
    words = ["vllm", "serve", target, *more]
    for name, value in arguments.items():
        words += [f"--{name.replace('_', '-')}", json.dumps(value)]
    return words


def _vllm_notes(choice: EngineChoice, advice: EngineAdvice) -> Iterator[str]:
    if choice.drafter in PLUGGED:
        yield "Needs outrider beside vLLM, on every node (docs/vllm.md); it drafts chains there, whatever was tried here."
    if choice.drafter == "suffix":
        yield "Needs arctic-inference==0.1.1 beside vLLM."
    if choice.drafter in ("suffix", "ngram"):
        ours = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": choice.size}
        yield (
            f"Or with Outrider's own {choice.drafter} (docs/vllm.md): --speculative-config '{json.dumps(ours)}' "
            f"--additional-config '{json.dumps({'outrider': _plugged(choice)})}'"
        )
    if choice.is_dspark:
        yield "Heads with a Markov or a confidence head are its dspark: model runner V2 only, which needs Triton."
    if advice.sampled:
        yield "min_p and logit_bias are refused while it speculates."
        if choice.drafter == "draft-model":
            yield 'Model runner V2 has "rejection_sample_method": "block", which accepts more; V1 ignores it and loses.'
    if len(choice.schedule) > 1:
        yield "The batch-size table is ignored under data parallelism."


VLLM = Engine(
    "vLLM",
    ("draft-model", "ngram", "suffix", "mtp", *TRAINED, *PLUGGED),
    "leave --speculative-config out",
    lambda choice, advice: shlex.join(vllm_command(advice.target, vllm_arguments(choice, advice))),
    _vllm_notes,
)


# ---------------------------------------------------------------- SGLang

BROUGHT = ("suffix", *PLUGGED)
ALGORITHMS = {"draft-model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}


def sglang_variables(choice: EngineChoice) -> dict[str, str]:
    """Variables of the environment that name one of our look-ups."""
    if choice.drafter not in BROUGHT:
        return {}
    variables = {"OUTRIDER_DRAFTER": choice.drafter}
    if options := _plugged_options(choice):
        variables["OUTRIDER_DRAFTER_OPTIONS"] = json.dumps(options)
    return variables


def sglang_command(target: str, environment: Mapping[str, str]) -> list[str]:
    """What starts the server, word by word."""
    before = (
        ["env", *(f"{name}={value}" for name, value in environment.items())] if environment else []
    )
    return [*before, "python", "-m", "sglang.launch_server", "--model-path", target]


def sglang_arguments(choice: EngineChoice, advice: EngineAdvice) -> list[list[str]]:
    """The words of each line of --speculative-... arguments. The pending token counts among those
    to verify."""
    num_verified = ["--speculative-num-draft-tokens", f"{choice.length + 1}"]
    if choice.drafter == "ngram" or choice.drafter in BROUGHT:
        algorithm = "NGRAM" if choice.drafter == "ngram" else "OUTRIDER"
        return [["--speculative-algorithm", algorithm, *num_verified]]
    if choice.drafter == "block":
        drafts = ["--speculative-draft-model-path", advice.exported]
        if choice.is_dspark:
            return [["--speculative-algorithm", "DSPARK", *drafts]]
        return [["--speculative-algorithm", "DFLASH", *drafts, *num_verified]]
    model = str(advice.draft if choice.drafter == "draft-model" else advice.exported)
    steps = choice.size
    branches = 1
    if choice.is_tree:
        usual = TreeSettings()
        steps = min(int(choice.options.get("max_depth", usual.max_depth)), choice.size)
        branches = int(choice.options.get("top_k", usual.top_k))
    lines = [
        [
            "--speculative-algorithm",
            ALGORITHMS[choice.drafter],
            "--speculative-draft-model-path",
            model,
        ],
        [
            "--speculative-num-steps",
            f"{steps}",
            "--speculative-eagle-topk",
            f"{branches}",
            *num_verified,
        ],
    ]
    if advice.sampled and not choice.is_tree:
        lines.append(["--speculative-use-rejection-sampling"])
    return lines


def _sglang_text(choice: EngineChoice, advice: EngineAdvice) -> str:
    """One shell command on several lines."""
    lines = [
        sglang_command(advice.target, sglang_variables(choice)),
        *sglang_arguments(choice, advice),
    ]
    return " \\\n  ".join(map(shlex.join, lines))


def _sglang_notes(choice: EngineChoice, advice: EngineAdvice) -> Iterator[str]:
    if choice.drafter in BROUGHT:
        yield "Needs outrider beside SGLang, on every node (docs/sglang.md): chains there, and not yet run on a GPU."
    if choice.drafter == "ngram":
        yield "Its n-gram drafter builds trees and needs CUDA."
    if choice.drafter == "eagle3":
        yield "EAGLE in place of EAGLE3 starts as well, and accepts nothing."
    if advice.sampled and choice.is_tree:
        yield "It verifies trees by the target's own samples, which keeps fewer than rejection sampling."
    if len(choice.schedule) > 1:
        yield "It has no table of draft lengths by batch size."


SGLANG = Engine(
    "SGLang",
    ("ngram", "block", *ALGORITHMS, *BROUGHT),
    "leave --speculative-algorithm out",
    _sglang_text,
    _sglang_notes,
    trees=("eagle", "eagle3"),
)


# ---------------------------------------------------------------- llama.cpp

TYPES = {
    "draft-model": "draft-simple -md DRAFT.gguf",
    "ngram": "ngram-simple",
    "eagle3": "draft-eagle3 -md HEAD.gguf",
}


def _llamacpp_text(choice: EngineChoice, advice: EngineAdvice) -> str:
    block = f"{'draft-dspark' if choice.is_dspark else 'draft-dflash'} -md HEAD.gguf"
    every = " --spec-draft-p-min 0" if choice.drafter == "draft-model" else ""
    kind = TYPES.get(choice.drafter, block)
    return (
        f"llama-server -m TARGET.gguf --spec-type {kind} --spec-draft-n-max {choice.length}{every}"
    )


def _llamacpp_notes(choice: EngineChoice, advice: EngineAdvice) -> Iterator[str]:
    yield "Models as GGUF files. Older builds call the length --draft-max."
    if choice.drafter in TRAINED:
        folder = advice.exported
        target = advice.target
        yield f"Then: python convert_hf_to_gguf.py {folder} --target-model-dir {target} --outfile HEAD.gguf"
    if advice.sampled:
        yield "It accepts a draft token only where its own sample is that token: fewer are accepted at this temperature."


LLAMACPP = Engine(
    "llama.cpp",
    (*TYPES, "block"),
    "--spec-type none, and no draft model",
    _llamacpp_text,
    _llamacpp_notes,
)

ENGINES = (VLLM, SGLANG, LLAMACPP)


def launch_lines(result: TuneResult) -> list[Words]:
    """One entry an engine, about all traffic."""
    advice = tuned(result)
    entries = []
    for engine in ENGINES:
        choice, notes = advice.ask(engine)
        entries.append(
            Words(
                engine=engine.name,
                text="" if choice is None else engine.text(choice, advice),
                notes=notes,
            )
        )
    return entries
