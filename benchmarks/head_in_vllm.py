"""Does a drafter trained here do in vLLM what it does in Outrider? `outrider export --check` for several of them: the same
weights, prompts, texts and draft length in both, acceptance from vLLM's own counters against ours, greedy.

    python benchmarks/head_in_vllm.py demo eagle3=outrider/demo/models/heads/eagle3:raw medusa=runs/medusa/drafter:vllm

Each drafter is NAME=FOLDER:LAYOUT. vLLM lies in `.peers/vllm` (benchmarks/setup_peers.sh); the code is outrider/train/vllm.
Results of `outrider export --check --vllm` that are there already are gathered with --from NAME=EXPORT.JSON.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from workload import PEERS, console, model_name, write_result

from outrider.demo import demo_paths
from outrider.lab.result import read_result
from outrider.lab.workload.load import load_workload
from outrider.train.export import Target, export
from outrider.train.export_result import Acceptance, Compared, ExportResult
from outrider.train.vllm.compare import Comparing, compare, method_for, prompt_tokens
from outrider.train.vllm.process import Interpreter, VllmError


def engine(one: Acceptance) -> dict[str, Any]:
    """One engine's numbers, as earlier results have them."""
    return {
        "tau": one.tau, "draft_utilisation": one.accepted / max(one.drafted, 1), "per_position": one.per_position,
        "drafted": one.drafted, "accepted": one.accepted,
    }  # fmt: skip


def entry(kind: str, layout: str, found: Compared | None, why_not: str) -> dict[str, Any]:
    """What is stored about one drafter."""
    if found is None:
        return {"kind": kind, "layout": layout, "not_compared": why_not}
    return {
        "kind": kind, "layout": layout, "method": found.method, "prompts": found.num_prompts,
        "max_new_tokens": found.max_new_tokens, "num_draft_tokens": found.num_draft_tokens, "dtype": found.dtype,
        "outrider": engine(found.outrider), "vllm": {**engine(found.vllm), "versions": found.versions},
        "departures": found.departures, "same_texts": found.same_texts, "tau_ratio": found.tau_ratio,
    }  # fmt: skip


@dataclass(frozen=True)
class Prompts:
    """What all drafters draft for."""

    tokens: list[list[int]]
    max_new_tokens: int
    threads: int


def run(name: str, folder: Path, layout: str, target: Target, python: Path, prompts: Prompts) -> dict[str, Any]:
    """Export and compare one."""
    interpreter = Interpreter.find(str(python))
    assert interpreter is not None, "a named Python is found, or an error says why not"
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "head"
        kind = export(folder, layout, out, target)
        try:
            how = Comparing(prompts.tokens, method_for(kind, folder, target, None), prompts.max_new_tokens, prompts.threads)
            found = compare(interpreter, kind, folder, out, target, how, PEERS / f"head-vllm-{name}.log", console().print)
        except VllmError as error:
            return entry(kind, layout, None, error.reason)
    return entry(kind, layout, found, "")


def stored(path: Path) -> dict[str, Any]:
    """From an export.json."""
    result = read_result(path)
    if not isinstance(result, ExportResult):
        raise typer.BadParameter(f"{path} is no result of 'outrider export'")
    return {**entry(result.drafter, result.layout, result.compared, result.not_compared), "command": result.command}


def main(
    target: Annotated[str, typer.Argument(help="'demo' or a folder.")],
    drafters: Annotated[list[str] | None, typer.Argument(help="NAME=FOLDER:LAYOUT, several.")] = None,
    there: Annotated[list[str] | None, typer.Option("--from", help="NAME=EXPORT.JSON, several.")] = None,
    workload: Annotated[str, typer.Option()] = "demo",
    prompts: Annotated[int, typer.Option()] = 24,
    tokens: Annotated[int, typer.Option(help="Per answer.")] = 64,
    threads: Annotated[int, typer.Option()] = 2,
    python: Annotated[Path, typer.Option(help="One that has vLLM.")] = PEERS / "vllm" / "bin" / "python",
) -> None:
    """Drafters in two engines."""
    folder = Path(demo_paths().target) if target == "demo" else Path(target)
    found = {name: stored(Path(path)) for name, path in (one.split("=", 1) for one in there or [])}
    if drafters:
        loaded = Target.load(str(folder), target)
        material = Prompts(prompt_tokens(load_workload(workload, limit=prompts), loaded, tokens), tokens, threads)
        for name, place in (one.split("=", 1) for one in drafters):
            source, layout = place.rsplit(":", 1)
            found[name] = run(name, Path(source), layout, loaded, python, material)
    content = {"target": model_name(folder), "workload": workload, "drafters": found}
    console().print_json(json.dumps(content))
    console().print(f"written to {write_result('head-in-vllm-kinds', content, threads)}")


if __name__ == "__main__":
    typer.run(main)
