"""`outrider deploy ENGINE --settings FILE`: what starts a server that drafts as `outrider tune` found best."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.typed import check_file, check_folder, memory
from outrider.cli.verbs import given, listed, option, refuse_unused, with_groups, written
from outrider.demo import demo_paths
from outrider.extras import check_lab

if TYPE_CHECKING:
    from outrider.deploy.deployment import Deployment
    from outrider.deploy.source import DraftSource
    from outrider.lab.tune.engine_advice import EngineAdvice

WHAT, WHERE, CONTAINERS, SEVERAL, KUBERNETES = "What is deployed", "Where it listens", "Containers", "Several", "Kubernetes"

Engine = Annotated[str, typer.Argument(help="vllm, sglang, ray, compose or k8s.", show_default=False)]
Settings = Annotated[
    Path, listed(WHAT, "What 'outrider tune' left: its --settings-out, or its --out.", metavar="FILE", show_default=False)
]
Out = Annotated[
    str | None,
    typer.Option(
        help="A file; a folder, existing or with / at its end, gets all files.", metavar="FILE|FOLDER/",
        show_default="standard output",
    ),
]  # fmt: skip


TAKEN_BY = {  # the other options mean something to every engine
    "head": ("vllm", "sglang", "ray"), "temperature": ("vllm", "sglang", "ray"), "host": ("vllm", "sglang", "ray", "compose"),
    "name": ("ray", "compose", "k8s"), "image": ("compose", "k8s"), "cpus": ("compose", "k8s"), "memory": ("compose", "k8s"),
    "gpus": ("compose", "k8s"), "replicas": ("ray", "k8s"), "max_replicas": ("ray", "k8s"),
    "queue": ("k8s",), "namespace": ("k8s",), "models_claim": ("k8s",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """What is deployed, where it listens, what it may use."""

    target: str | None = option(None, WHAT, "The target's name there.", show_default="the settings'")
    draft: str | None = option(None, WHAT, "The draft model's name there.", show_default="the settings'")
    head: str | None = option(None, WHAT, "vllm, sglang, ray: the folder that 'outrider export' wrote.")
    temperature: float | None = option(
        None, WHAT, "vllm, sglang, ray: temperature of requests; settings files have none.", min=0.0, show_default="0"
    )
    port: int = option(8000, WHERE, "Port.")
    served_model_name: str | None = option(None, WHERE, "What clients call the model.", show_default="the target")
    host: str = option("127.0.0.1", WHERE, "Address; 0.0.0.0 is all of them. Not for k8s.")
    name: str | None = option(None, CONTAINERS, "ray, compose, k8s: of the service.", show_default="outrider-TARGET")
    image: str | None = option(
        None, CONTAINERS, "compose, k8s: an image of deploy/Dockerfile.", show_default="outrider:cpu, or :cuda"
    )
    cpus: int = option(4, CONTAINERS, "compose, k8s: processors, and threads of the arithmetic.", min=1)
    memory: str = option("8GiB", CONTAINERS, "compose, k8s: memory limit, like 16GiB.")
    gpus: int = option(0, CONTAINERS, "compose, k8s: NVIDIA GPUs.", min=0, max=1)
    replicas: int = option(1, SEVERAL, "ray, k8s: at least so many.", min=1)
    max_replicas: int | None = option(None, SEVERAL, "ray, k8s: maximum.", min=1, show_default="4, or --replicas")
    queue: int = option(8, KUBERNETES, "Waiting requests of a replica from which on there is another one.", min=1)
    namespace: str | None = option(None, KUBERNETES, "Namespace.", show_default="kubectl's")
    models_claim: str = option("outrider-models", KUBERNETES, "Volume claim with models that are no hub ids.")

    def unused(self, engine: str) -> list[str]:
        """Options that were given and mean nothing to an engine, as they are typed."""
        return [written(name) for name, engines in TAKEN_BY.items() if engine not in engines and written(name) in given(self)]


@with_groups
def deploy(engine: Engine, settings: Settings, options: DeployOptions, out: Out = None) -> int:
    """Write what starts vLLM, SGLang, Ray, Compose or Kubernetes with tune's settings."""
    check_lab("deploy")
    from outrider.deploy import check_engine, files_for
    from outrider.deploy.source import read_source

    check_engine(engine)
    refuse_unused(options.unused(engine), f"for {engine}")
    path = None if out is None else Path(out)
    is_folder = path is not None and (path.is_dir() or str(out).endswith("/"))
    if path is not None:
        (check_folder if is_folder else check_file)(path)
    files = files_for(engine, _deployment(read_source(settings).named(options.target, options.draft), options))
    if path is None:
        sys.stdout.write(files.main)
        return 0
    for written_file in files.write(path, as_folder=is_folder):
        sys.stderr.write(f"written: {written_file}\n")
    return 0


def _deployment(source: DraftSource, options: DeployOptions) -> Deployment:
    """The deployment that the options describe. Raises ConfigError for values out of range."""
    from outrider.deploy.container_paths import is_local
    from outrider.deploy.deployment import Deployment, label_of

    target = source.settings.target
    return Deployment(
        source=source, advice=_advice(source, options),
        served_name=options.served_model_name or (Path(target).name if is_local(target) else target),
        name=options.name or label_of(target), host=options.host, port=options.port,
        image=options.image or ("outrider:cuda" if options.gpus else "outrider:cpu"), cpus=options.cpus,
        memory_bytes=memory("--memory", options.memory), gpus=options.gpus, replicas=options.replicas,
        max_replicas=options.max_replicas or max(4, options.replicas), queue=options.queue, namespace=options.namespace,
        models_claim=options.models_claim,
    )  # fmt: skip


def _advice(source: DraftSource, options: DeployOptions) -> EngineAdvice:
    """In other engines' words, with folders that they can read for the embedded pair."""
    from outrider import build
    from outrider.lab.tune.engine_advice import DRAFT_MODEL

    advice = source.advice(options.temperature)
    advice.target, advice.draft = source.settings.target, options.draft or advice.draft
    advice.exported = options.head or advice.exported
    if advice.target == build.DEMO:
        advice.target = str(demo_paths().target)
        advice.draft = str(demo_paths().draft) if advice.draft in (build.DEMO, DRAFT_MODEL) else advice.draft
    return advice
