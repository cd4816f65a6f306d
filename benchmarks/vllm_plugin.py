"""Outrider's look-up drafters inside vLLM (docs/vllm.md): beside vLLM's own n-gram drafter and
beside none, on the same weights.

    python benchmarks/vllm_plugin.py MODEL

MODEL is a transformers folder. One worker process for each configuration, all loaded at once; each
prompt goes through all of them, forwards and backwards in turn, so that a slow minute hits all
alike. Greedy, one request at a time, exactly `--max-tokens` tokens. Asked of the answers: whether
they are vLLM's own plain text, and how close the two likeliest tokens are where they part; whether
as much is accepted as in Outrider itself, along the same texts. vLLM lies in `.peers/vllm`
(setup_peers.sh).

Workloads: Spec-Bench's summarization, and `edits`: a short Python file with the request to write it
again with one name changed.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from in_vllm.compare import Following
from transformers import AutoModelForCausalLM, AutoTokenizer
from workers import Configuration, Worker
from workload import PEERS, SHARED, console, model_name, write_result

from outrider.lab.workload.load import load_workload
from outrider.lab.workload.prompts import prepare
from outrider.lab.workload.types import Workload, WorkloadRequest
from outrider.llm import LLM

MAX_MODEL_LEN = 2048
ROOM = 16  # positions behind an answer: near its end vLLM lets nobody draft
OURS = "outrider.integrations.vllm.Proposer"
DRAFTERS = {"ngram": {}, "suffix": {}, "composite": {"parts": "suffix,ngram", "mode": "best"}}
COUNTERS = ("iterations", "drafts", "draft_tokens", "accepted_tokens")
NAME = re.compile(r"\bdef ([a-z_]{4,})\(")


@dataclass(frozen=True)
class Engine(Configuration):
    """One way for vLLM to draft."""

    label: str
    speculative: dict[str, Any] | None
    additional: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.label


def engines(k: int, drafters: list[str]) -> list[Engine]:
    """Plain decoding, vLLM's n-gram drafter as it comes and as prompt lookup is usually set, and
    ours."""
    own = {"method": "ngram", "num_speculative_tokens": k}
    ours = {"method": "custom_class", "model": OURS, "num_speculative_tokens": k}
    return [
        Engine("vllm", 0, "plain", None),
        Engine("vllm", k, "vllm ngram", own),
        Engine(
            "vllm", k, "vllm ngram 2-4", {**own, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        ),
        *(
            Engine(
                "vllm",
                k,
                f"outrider {name}",
                ours,
                {"outrider": {"drafter": name, "drafter_options": DRAFTERS[name]}},
            )
            for name in drafters
        ),
    ]


def summaries() -> Workload:
    """Questions of Spec-Bench's category summarization."""
    return load_workload("spec-bench:summarization", data=SHARED / "data")


def edits() -> Workload:
    """Short Python files, each to be written again with one function renamed."""
    found: list[WorkloadRequest] = []
    for line in (SHARED / "data" / "code" / "python.jsonl").open(encoding="utf-8"):
        text = json.loads(line)["text"]
        names = Counter(NAME.findall(text))
        if 500 <= len(text) <= 1200 and names:
            name = names.most_common(1)[0][0]
            question = (
                f"Here is a Python file:\n\n```python\n{text.strip()}\n```\n\nRewrite the whole file with the function `{name}` "
                f"renamed to `{name}_v2`. Change nothing else. Answer with the code only."
            )
            found.append(
                WorkloadRequest(str(len(found)), messages=({"role": "user", "content": question},))
            )
    return Workload("edits", tuple(found))


WORKLOADS = {"summarization": summaries, "edits": edits}


@contextmanager
def intel_openmp() -> Iterator[None]:
    """Workers started in here have the OpenMP that vLLM asks for on CPUs: without it, it says,
    drafts cost much more."""
    library = next((PEERS / "vllm" / "lib").glob("libiomp5.so"), None)
    before = os.environ.get("LD_PRELOAD")
    if library is not None:
        os.environ["LD_PRELOAD"] = str(library)
    try:
        yield
    finally:
        os.environ.pop("LD_PRELOAD", None)
        if before is not None:
            os.environ["LD_PRELOAD"] = before


def prompt_tokens(model: Path, workload: Workload, count: int, max_tokens: int) -> list[list[int]]:
    """The first `count` prompts that fit, in the model's chat template."""
    prepared = prepare(
        workload,
        AutoTokenizer.from_pretrained(model),
        context=MAX_MODEL_LEN - ROOM,
        max_tokens=max_tokens,
        on_bad="skip",
    )
    return [prompt.tokens for prompt in prepared.prompts[:count]]


def measure(
    workers: list[Worker], prompts: list[list[int]], max_tokens: int
) -> dict[str, list[dict[str, Any]]]:
    """The answers of every worker to all prompts, one prompt after the other."""
    answers: dict[str, list[dict[str, Any]]] = {worker.configuration.name: [] for worker in workers}
    for number, prompt in enumerate(prompts):
        for worker in workers if number % 2 == 0 else workers[::-1]:
            answers[worker.configuration.name].append(worker.run(prompt, max_tokens))
    return answers


def rate(answer: dict[str, Any]) -> float:
    """Tokens per second behind the first token."""
    return (len(answer["token_ids"]) - 1) / (answer["seconds"] - answer["ttft_s"])


def acceptance(before: dict[str, Any], answers: list[dict[str, Any]]) -> dict[str, float]:
    """vLLM's own counters over these answers. Each draft counts in full, also where it goes beyond
    the answer's end; a prompt is read in one pass."""
    after = answers[-1]["counters"]
    counted = {name: int(after.get(name, 0) - before.get(name, 0)) for name in COUNTERS}
    steps = counted.pop("iterations") - len(answers)
    return {**counted, "steps": steps, "tau": 1 + counted["accepted_tokens"] / steps}


def departures(
    model: Path, prompts: list[list[int]], plain: list[Any], other: list[Any]
) -> list[dict[str, Any]]:
    """Where a text leaves vLLM's plain one: how far the two tokens' logits lie below the best one
    there, by a pass in float32, and what a step of bfloat16 is at that size."""
    found: list[dict[str, Any]] = []
    network: Any = None
    for number, (prompt, a, b) in enumerate(zip(prompts, plain, other, strict=True)):
        left = a["token_ids"]
        right = b["token_ids"]
        index = next(
            (i for i, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1]), None
        )
        if index is None:
            continue
        network = network or AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        with torch.inference_mode():
            logits = network(torch.tensor([prompt + left[:index]])).logits[0, -1]
        best = logits.max().item()
        below = [best - logits[tokens[index]].item() for tokens in (left, right)]
        step = 2.0 ** (math.floor(math.log2(abs(best))) - 7)
        found.append(
            {
                "prompt": number,
                "place": index,
                "plain_below_best": below[0],
                "below_best": below[1],
                "bf16_step": step,
            }
        )
    return found


def followed(
    model: Path,
    name: str,
    k: int,
    prompts: list[list[int]],
    answers: list[dict[str, Any]],
    threads: int,
) -> dict[str, Any]:
    """Outrider's own acceptance with this drafter, along the texts that vLLM wrote with it."""
    llm = LLM(
        str(model),
        drafter=name,
        drafter_options=DRAFTERS[name],
        num_draft_tokens=k,
        dtype="bfloat16",
        threads=threads,
        runtime="eager",
        max_num_seqs=1,
    )
    following = Following(llm, k)
    departed = sum(
        following.along(prompt, answer["token_ids"])
        for prompt, answer in zip(prompts, answers, strict=True)
    )
    counted = following.counted()
    counts = {
        "drafted": counted.drafted,
        "accepted": counted.accepted,
        "steps": counted.drafts,
        "tau": counted.tau,
    }
    return {**counts, "departures": departed}


def main(
    model: Annotated[
        Path, typer.Argument(help="A transformers folder.", exists=True, file_okay=False)
    ],
    prompts: Annotated[int, typer.Option(min=1)] = 8,
    max_tokens: Annotated[int, typer.Option(min=2)] = 96,
    k: Annotated[int, typer.Option(min=1, help="Most draft tokens a step.")] = 5,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    drafters: Annotated[str, typer.Option(help=f"Ours: {', '.join(DRAFTERS)}.")] = ",".join(
        DRAFTERS
    ),
    name: Annotated[str, typer.Option(help="Of the result.")] = "vllm-plugin",
) -> None:
    """See the module docstring."""
    ours = [one.strip() for one in drafters.split(",")]
    tokens = {
        workload: prompt_tokens(model, make(), prompts, max_tokens)
        for workload, make in WORKLOADS.items()
    }
    workers: list[Worker] = []
    with intel_openmp(), (PEERS / "vllm_plugin.log").open("w") as log:
        try:
            for engine in engines(k, ours):
                load = {
                    "target": str(model.resolve()),
                    "threads": threads,
                    "max_model_len": MAX_MODEL_LEN,
                    "speculative": engine.speculative,
                    "additional_config": engine.additional,
                    "kv_blocks": 40,
                }
                workers.append(Worker(engine, load, log))
                console().print(f"loaded: {engine.label}")
            warm = {
                one.configuration.name: one.run(tokens["edits"][-1][:64], 16)["counters"]
                for one in workers
            }
            runs = {}
            before = warm
            found = {}
            for workload, lines in tokens.items():
                runs[workload] = measure(workers, lines, max_tokens)
                found[workload] = summarise(runs[workload], before)
                before = {
                    label: answers[-1]["counters"] for label, answers in runs[workload].items()
                }
                show(workload, found[workload])
            about = workers[0].about
        finally:
            for worker in workers:
                worker.close()
    for workload, answers in runs.items():
        for label, entry in found[workload].items():
            differing = departures(model, tokens[workload], answers["plain"], answers[label])
            entry["departures"] = differing
            entry["same_texts"] = len(tokens[workload]) - len(differing)
        for one in ours:
            there = found[workload][f"outrider {one}"]
            there["in_outrider"] = followed(
                model, one, k, tokens[workload], answers[f"outrider {one}"], threads
            )
            there["tau_ratio"] = there["acceptance"]["tau"] / there["in_outrider"]["tau"]
        show(workload, found[workload])
    settings = {
        "prompts": prompts,
        "max_tokens": max_tokens,
        "k": k,
        "drafters": DRAFTERS,
        "max_model_len": MAX_MODEL_LEN,
    }
    content = {
        "model": model_name(model),
        "engine": about,
        "settings": settings,
        "workloads": found,
        "runs": slim(runs),
    }
    console().print(f"written: {write_result(name, content, threads)}")


def summarise(
    answers: dict[str, list[dict[str, Any]]], before: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Rates and vLLM's own counters, by configuration; speedups prompt by prompt."""
    plain = [rate(answer) for answer in answers["plain"]]
    own = [rate(answer) for answer in answers["vllm ngram"]]
    found = {}
    for label, lines in answers.items():
        rates = [rate(answer) for answer in lines]
        found[label] = {
            "tokens_per_s": statistics.median(rates),
            "over_plain": statistics.median(a / b for a, b in zip(rates, plain, strict=True)),
            "over_vllm_ngram": statistics.median(a / b for a, b in zip(rates, own, strict=True)),
            "other_cpu": statistics.mean(answer["other_cpu"] for answer in lines),
            "acceptance": acceptance(before[label], lines),
        }
    return found


def show(workload: str, found: dict[str, dict[str, Any]]) -> None:
    """One line a configuration."""
    console().print(f"\n{workload}")
    for label, entry in found.items():
        counts = entry["acceptance"]
        more = f"  same {entry['same_texts']}" if "same_texts" in entry else ""
        more += f"  tau here/Outrider {entry['tau_ratio']:.3f}" if "tau_ratio" in entry else ""
        console().print(
            f"  {label:20s} {entry['tokens_per_s']:6.1f} tok/s  {entry['over_plain']:.2f}x plain  "
            f"{entry['over_vllm_ngram']:.2f}x ngram  tau {counts['tau']:.2f}  "
            f"{counts['accepted_tokens']}/{counts['draft_tokens']}  others "
            f"{entry['other_cpu']:.0%}{more}"
        )


def slim(
    runs: dict[str, dict[str, list[dict[str, Any]]]],
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Every single measurement, without the texts."""
    kept = ("seconds", "ttft_s", "other_cpu")
    return {
        workload: {
            label: [{name: answer[name] for name in kept} for answer in lines]
            for label, lines in answers.items()
        }
        for workload, answers in runs.items()
    }


if __name__ == "__main__":
    typer.run(main)
