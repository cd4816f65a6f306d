"""Does a drafter trained here do in vLLM what it does in Outrider? It is exported, and drafts in
both engines: the same weights, prompts, texts and draft length, acceptance from vLLM's own counters
against ours, greedy.

    python benchmarks/head_in_vllm.py demo eagle3=outrider/demo/models/heads/eagle3:raw
    medusa=runs/medusa/drafter:vllm

Each drafter is NAME=FOLDER:LAYOUT. vLLM lies in `.peers/vllm` (benchmarks/setup_peers.sh) or where
--python says. Exit code 1 where tau differs by more than 3 % or vLLM refuses a drafter: its words,
and the end of its log, are shown.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from in_vllm.compare import Acceptance, Compared, Comparing, compare, method_for, prompt_tokens
from in_vllm.process import Interpreter, VllmError
from workload import PEERS, console, model_name, write_result

from outrider.demo import demo_paths
from outrider.errors import OutriderError
from outrider.lab.workload.load import load_workload
from outrider.train.export import Target, export


def engine(one: Acceptance) -> dict[str, Any]:
    """One engine's numbers."""
    return {
        "tau": one.tau,
        "draft_utilisation": one.accepted / max(one.drafted, 1),
        "per_position": one.per_position,
        "drafted": one.drafted,
        "accepted": one.accepted,
    }


@dataclass(frozen=True)
class Prompts:
    """What all drafters draft for."""

    tokens: list[list[int]]
    max_new_tokens: int
    threads: int
    timeout_s: float


def run(
    name: str, folder: Path, layout: str, target: Target, interpreter: Interpreter, prompts: Prompts
) -> dict[str, Any]:
    """Export and compare one; what is stored about it."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "head"
        kind = export(folder, layout, out, target)
        about = {
            "kind": kind,
            "layout": layout,
            "prompts": len(prompts.tokens),
            "max_new_tokens": prompts.max_new_tokens,
        }
        method = method_for(kind, folder, target)
        how = Comparing(
            prompts.tokens, method, prompts.max_new_tokens, prompts.threads, prompts.timeout_s
        )
        try:
            found = compare(
                interpreter,
                kind,
                folder,
                out,
                target,
                how,
                PEERS / f"head-vllm-{name}.log",
                console().print,
            )
        except VllmError as error:
            console().print("\n".join(["vLLM refused it:", *error.tail()]))
            return {**about, "not_compared": error.reason}
    return {**about, "dtype": target.dtype, **entry(found)}


def entry(found: Compared) -> dict[str, Any]:
    """What a comparison found, as results keep it."""
    return {
        "method": found.method.name,
        "num_draft_tokens": found.method.num_draft_tokens,
        "outrider": engine(found.outrider),
        "vllm": {**engine(found.vllm), "versions": found.versions},
        "departures": found.departures,
        "same_texts": found.same_texts,
        "tau_ratio": found.tau_ratio,
        "is_within": found.is_within,
    }


def main(
    target: Annotated[str, typer.Argument(help="'demo' or a folder.")],
    drafters: Annotated[list[str], typer.Argument(help="NAME=FOLDER:LAYOUT, several.")],
    prompts: Annotated[str, typer.Option(help="A prompts file or a built-in name.")] = "demo",
    limit: Annotated[int, typer.Option(help="Most prompts.")] = 24,
    tokens: Annotated[int, typer.Option(help="Per answer.")] = 64,
    threads: Annotated[int, typer.Option(help="CPU threads of both engines.")] = 2,
    python: Annotated[Path, typer.Option(help="One that has vLLM.")] = PEERS
    / "vllm"
    / "bin"
    / "python",
    timeout: Annotated[
        float,
        typer.Option(help="Seconds until vLLM must be done with a drafter, its start included."),
    ] = 900.0,
    dry: Annotated[bool, typer.Option("--dry", help="Show the result and write none.")] = False,
) -> None:
    """Drafters in two engines."""
    interpreter = Interpreter.find(str(python))
    folder = Path(demo_paths().target) if target == "demo" else Path(target)
    loaded = Target.load(str(folder), target)
    material = Prompts(
        prompt_tokens(load_workload(prompts, limit=limit), loaded, tokens), tokens, threads, timeout
    )
    found = {}
    for name, spec in (one.split("=", 1) for one in drafters):
        source, layout = spec.rsplit(":", 1)
        found[name] = run(name, Path(source), layout, loaded, interpreter, material)
    content = {"target": model_name(folder), "workload": prompts, "drafters": found}
    console().print_json(json.dumps(content))
    if not dry:
        console().print(f"written to {write_result('head-in-vllm-kinds', content, threads)}")
    if not all(one.get("is_within") for one in found.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    try:
        typer.run(main)
    except OutriderError as error:
        raise SystemExit(f"error: {error}") from error
