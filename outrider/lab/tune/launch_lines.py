"""The recommendation as launch lines of vLLM, SGLang and llama.cpp: what makes them do the same,
and where they cannot.

No engine has every drafter: where one lacks the recommended drafter, the line is for the best that
it has, and says so. Speeds were measured here: acceptance carries over, costs do not. Option names
drift: vLLM's were checked with 0.32's parser, the others are those of 2026. Engines run block heads
at a whole block: its masks see one another, so fewer of them would be another computation.

`rejection_sample_method: block` is not written for vLLM: its model runner V1 takes the key, does
not have the method, and then drafts greedily and accepts with p alone.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from outrider.configuration import Configuration
from outrider.draft_length.length import DraftLength
from outrider.drafters.lookup.ngram import NgramSettings
from outrider.drafters.lookup.suffix import SuffixSettings
from outrider.lab.tune.space import TrainedHead
from outrider.lab.tune.tune_result import TuneResult, Words
from outrider.models.heads.kinds import EARLY_EXIT
from outrider.trees.plan import TreeSettings

HEADS = ("eagle", "eagle3", "medusa", "block")  # which `outrider export` writes
EXPORTED = "EXPORTED_HEAD"  # the folder that it writes
DRAFT_MODEL = "DRAFT_MODEL"  # the embedded draft, which other engines do not know by name
LOOKUPS = ("ngram", "suffix", "retrieval", "ngram-cache")  # drafters that need token ids only
PLUGGED = ("composite", "retrieval", "ngram-cache")  # which no engine has; Outrider brings them
PROPOSER = "outrider.integrations.vllm.Proposer"
LARGEST_BATCH = 4096  # rows that the last line of vLLM's table reaches to


@dataclass(frozen=True)
class Choice:
    """A configuration with a fixed length, of one tuning."""

    result: TuneResult
    configuration: Configuration

    @property
    def drafter(self) -> str:
        return self.configuration.drafter

    @property
    def options(self) -> dict[str, Any]:
        return self.configuration.drafter_options

    @property
    def head(self) -> TrainedHead | None:
        heads = {(head.kind, head.folder): head for head in self.result.tried.heads}
        return heads.get((self.drafter, str(self.options.get("head", ""))))

    @property
    def is_tree(self) -> bool:
        return str(self.options.get("tree", "chain")) not in ("chain", "False", "false")

    @property
    def is_dspark(self) -> bool:
        """Whether others call it DSpark: a block head with a Markov or a confidence head."""
        return self.head is not None and (self.head.markov or self.head.confidence)

    @property
    def is_masked(self) -> bool:
        """Whether it drafts in one pass, by a mask token (PARD, P-EAGLE)."""
        if self.drafter == "draft-model":
            return self.result.tried.draft_masked
        return self.head is not None and self.head.masked

    @property
    def is_sampled(self) -> bool:
        return self.result.tried.temperature > 0

    @property
    def size(self) -> int:
        """Draft tokens of a step, at most: other engines take a number where ours is `auto:8`."""
        asked = self.configuration.num_draft_tokens
        return 0 if asked is None else DraftLength.parse(asked, 1).max_nodes

    @property
    def length(self) -> int:
        """Draft tokens to ask for: a whole block of a block head."""
        whole = self.head.max_chain if self.head is not None and self.drafter == "block" else None
        return whole or self.size

    @property
    def model(self) -> str:
        """The method that drafts, by its name."""
        if self.drafter != "draft-model":
            return EXPORTED
        return self.result.tried.draft or DRAFT_MODEL

    @property
    def plugged(self) -> dict[str, Any]:
        """The settings of our own look-ups there."""
        options = {name: value for name, value in self.options.items() if name != "mode"}
        return {"drafter": self.drafter, "drafter_options": options}

    def schedule(self) -> list[tuple[int, int]]:
        """(From this many rows on, draft tokens), the first at 1 row, never more than at fewer; one
        entry: no schedule. Of other families' loads only where these want plain decoding."""
        family_of = {forecast.configuration: forecast.family for forecast in self.result.forecasts}
        family = family_of.get(self.configuration.label)
        steps = [(1, self.length)]
        loads = self.result.by_load.get(family or "", self.result.schedule)
        smallest = self.size
        for load in sorted(loads, key=lambda load: load.batch_size):
            fits = not load.size or family_of.get(load.configuration) == family
            if fits and load.batch_size > 1 and load.size < smallest:
                smallest = load.size
                size = self.length if load.size and self.drafter == "block" else load.size
                steps.append((load.batch_size, size))
        return steps


@dataclass(frozen=True)
class Engine:
    """Another program: what it can draft with, and how a choice is written there."""

    name: str
    drafters: Collection[str]
    off: str  # how it decodes plainly
    text: Callable[[Choice], str]
    notes: Callable[[Choice], Iterable[str]]
    trees: Collection[str] = ()  # drafters of which it has best-first trees

    def lacks(self, choice: Choice) -> str:
        """Why it cannot draft so; "" where it can. Of a composite it must have all parts."""
        parts = str(choice.options.get("parts", "draft-model,suffix")).split(",")
        if choice.drafter == EARLY_EXIT and "head" in choice.options:
            return "which no other program reads"
        if choice.is_masked and self.name != "vLLM":
            return "which would draft without its mask token"
        if choice.drafter not in self.drafters:
            return f"which it does not have ({choice.drafter})"
        has_tree = choice.options.get("tree") == "best-first" and choice.drafter in self.trees
        if choice.is_tree and not has_tree:
            return "whose trees it does not have"
        if choice.drafter == "composite" and any(part.strip() not in LOOKUPS for part in parts):
            return "of whose parts it has look-ups alone"
        return ""


def launch_lines(result: TuneResult) -> list[Words]:
    """One entry an engine, about all traffic."""
    measured = {summary.configuration: summary.speedup.value for summary in result.confirmed}
    known = {**result.overall_speedup, **measured}
    order = sorted(known, key=lambda label: (label in measured, known[label], label), reverse=True)
    choices = {
        label: Choice(result, Configuration.parse(label)) for label in order if known[label] > 1
    }
    first = result.recommendations[0]
    entries = []
    for engine in ENGINES:
        able = [label for label, choice in choices.items() if not engine.lacks(choice)]
        text = ""
        if not first.speculate:
            notes = [f"Do not speculate ({first.reason}): {engine.off}."]
        elif not able:
            has = ", ".join(sorted(engine.drafters))
            notes = [f"It has no drafter that paid here; it has {has}."]
        else:
            choice = choices[able[0]]
            how = "measured" if able[0] in measured else "forecast"
            about = f"{known[able[0]]:.2f}x, {how} with outrider"
            text = engine.text(choice)
            notes = [*_notes(choice, engine, about), *engine.notes(choice)]
        entries.append(Words(engine=engine.name, text=text, notes=notes))
    return entries


def _notes(choice: Choice, engine: Engine, about: str) -> Iterator[str]:
    result = choice.result
    recommended = Configuration.parse(result.recommendations[0].configuration)
    if choice.configuration.label != recommended.label:
        lacks = engine.lacks(Choice(result, recommended))
        why = f", {lacks}" if lacks else ""
        yield f"Recommended is {recommended.label}{why}; this is {choice.configuration.label}: {about}."
    if stop := choice.options.get("stop"):
        yield f"Without the stop rule '{stop}', which it does not have."
    if choice.drafter == "block":
        yield f"It drafts whole blocks, {choice.length} tokens; here {choice.size} were best."
    if choice.drafter in HEADS:
        layout = "vllm" if choice.drafter == "medusa" else "raw"
        folder = choice.options.get("head") or f"outrider/demo/models/heads/{choice.drafter}"
        target = result.tried.target
        yield f"First: outrider export {folder} --target {target} --to {layout} --out {EXPORTED}"


# ---------------------------------------------------------------- vLLM

VLLM_OPTIONS: dict[
    str, dict[str, tuple[str, Any]]
] = {  # of look-ups: ours -> theirs and our default
    "ngram": {
        "max_ngram": ("prompt_lookup_max", NgramSettings.max_ngram),
        "min_ngram": ("prompt_lookup_min", NgramSettings.min_ngram),
    },
    "suffix": {
        "max_depth": ("suffix_decoding_max_tree_depth", SuffixSettings.max_depth),
        "alpha": ("suffix_decoding_max_spec_factor", SuffixSettings.alpha),
        "min_probability": ("suffix_decoding_min_token_prob", SuffixSettings.min_probability),
    },
}


def _vllm_text(choice: Choice) -> str:
    config: dict[str, Any] = {
        "method": choice.drafter.replace("-", "_"),
        "num_speculative_tokens": choice.length,
    }
    arguments = {"speculative_config": config}
    if choice.drafter in PLUGGED:
        config |= {"method": "custom_class", "model": PROPOSER}
        arguments["additional_config"] = {"outrider": choice.plugged}
    elif choice.drafter in ("draft-model", *HEADS):
        config["model"] = choice.model
        if choice.drafter == "block":
            config["method"] = "dspark" if choice.is_dspark else "dflash"
        if choice.is_masked:
            config["parallel_drafting"] = True
        # else it takes the draft's favourite
        if choice.is_sampled and choice.drafter not in ("medusa", "block"):
            config["draft_sample_method"] = "probabilistic"
    for ours, (theirs, default) in VLLM_OPTIONS.get(choice.drafter, {}).items():
        config[theirs] = type(default)(choice.options.get(ours, default))
    steps = choice.schedule()
    if len(steps) > 1:
        ends = [rows - 1 for rows, _ in steps[1:]] + [LARGEST_BATCH]
        table = [[rows, end, size] for (rows, size), end in zip(steps, ends, strict=True)]
        config["num_speculative_tokens_per_batch_size"] = table
    words = ["vllm", "serve", choice.result.tried.target]
    for name, value in arguments.items():
        words += [f"--{name.replace('_', '-')}", json.dumps(value)]
    return shlex.join(words)


def _vllm_notes(choice: Choice) -> Iterator[str]:
    if choice.drafter in PLUGGED:
        yield "Needs outrider alongside vLLM, on every node (docs/vllm.md); it drafts chains there, whatever was tried here."
    if choice.drafter == "suffix":
        yield "Needs arctic-inference==0.1.1 alongside vLLM."
    if choice.drafter in VLLM_OPTIONS:
        ours = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": choice.size}
        yield (
            f"Or with Outrider's own {choice.drafter} (docs/vllm.md): --speculative-config "
            f"'{json.dumps(ours)}' --additional-config '{json.dumps({'outrider': choice.plugged})}'"
        )
    if choice.is_dspark:
        yield "Heads with a Markov or a confidence head are its dspark: model runner V2 only, which needs Triton."
    if choice.is_sampled:
        yield "min_p and logit_bias are refused while it speculates."
        if choice.drafter == "draft-model":
            yield 'Model runner V2 has "rejection_sample_method": "block", which accepts more; V1 ignores it and loses.'


# ---------------------------------------------------------------- SGLang

BROUGHT = ("suffix", *PLUGGED)
ALGORITHMS = {"draft-model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}


def _sglang_text(choice: Choice) -> str:
    """One shell command on several lines; look-ups of ours are named by variables."""
    variables = []
    if choice.drafter in BROUGHT:
        variables = ["env", f"OUTRIDER_DRAFTER={choice.drafter}"]
        if options := choice.plugged["drafter_options"]:
            variables.append(f"OUTRIDER_DRAFTER_OPTIONS={json.dumps(options)}")
    start = [*variables, "python", "-m", "sglang.launch_server", "--model-path"]
    lines = [[*start, choice.result.tried.target], *_sglang_drafting(choice)]
    return " \\\n  ".join(map(shlex.join, lines))


def _sglang_drafting(choice: Choice) -> list[list[str]]:
    """The pending token counts among those to verify."""
    verified = ["--speculative-num-draft-tokens", f"{choice.length + 1}"]
    drafts = ["--speculative-draft-model-path", choice.model]
    if choice.drafter in LOOKUPS or choice.drafter in BROUGHT:
        algorithm = "NGRAM" if choice.drafter == "ngram" else "OUTRIDER"
        return [["--speculative-algorithm", algorithm, *verified]]
    if choice.drafter == "block":
        if choice.is_dspark:
            return [["--speculative-algorithm", "DSPARK", *drafts]]
        return [["--speculative-algorithm", "DFLASH", *drafts, *verified]]
    steps = choice.size
    branches = 1
    if choice.is_tree:
        usual = TreeSettings()
        steps = min(int(choice.options.get("max_depth", usual.max_depth)), choice.size)
        branches = int(choice.options.get("top_k", usual.top_k))
    shape = ["--speculative-num-steps", f"{steps}", "--speculative-eagle-topk", f"{branches}"]
    lines = [
        ["--speculative-algorithm", ALGORITHMS[choice.drafter], *drafts],
        [*shape, *verified],
    ]
    if choice.is_sampled and not choice.is_tree:
        lines.append(["--speculative-use-rejection-sampling"])
    return lines


def _sglang_notes(choice: Choice) -> Iterator[str]:
    if choice.drafter in BROUGHT:
        yield "Needs outrider alongside SGLang, on every node (docs/sglang.md): chains there, and not yet run on a GPU."
    if choice.drafter == "ngram":
        yield "Its n-gram drafter builds trees and needs CUDA."
    if choice.is_sampled and choice.is_tree:
        yield "It verifies trees by the target's own samples, which keeps fewer than rejection sampling."
    if len(choice.schedule()) > 1:
        yield "It has no table of draft lengths by batch size."


# ---------------------------------------------------------------- llama.cpp

TYPES = {
    "draft-model": "draft-simple -md DRAFT.gguf",
    "ngram": "ngram-simple",
    "eagle3": "draft-eagle3 -md HEAD.gguf",
}


def _llamacpp_text(choice: Choice) -> str:
    block = f"{'draft-dspark' if choice.is_dspark else 'draft-dflash'} -md HEAD.gguf"
    every = " --spec-draft-p-min 0" if choice.drafter == "draft-model" else ""
    kind = TYPES.get(choice.drafter, block)
    return (
        f"llama-server -m TARGET.gguf --spec-type {kind} --spec-draft-n-max {choice.length}{every}"
    )


def _llamacpp_notes(choice: Choice) -> Iterator[str]:
    yield "Models as GGUF files. Older builds call the length --draft-max."
    if choice.drafter in HEADS:
        target = choice.result.tried.target
        yield f"Then: python convert_hf_to_gguf.py {EXPORTED} --target-model-dir {target} --outfile HEAD.gguf"
    if choice.is_sampled:
        yield "It accepts a draft token only where its own sample is that token: fewer are accepted at this temperature."


ENGINES = (
    Engine(
        "vLLM",
        ("draft-model", "ngram", "suffix", "mtp", *HEADS, *PLUGGED),
        "leave --speculative-config out",
        _vllm_text,
        _vllm_notes,
    ),
    Engine(
        "SGLang",
        ("ngram", "block", *ALGORITHMS, *BROUGHT),
        "leave --speculative-algorithm out",
        _sglang_text,
        _sglang_notes,
        trees=("eagle", "eagle3"),
    ),
    Engine(
        "llama.cpp",
        (*TYPES, "block"),
        "--spec-type none, and no draft model",
        _llamacpp_text,
        _llamacpp_notes,
    ),
)
