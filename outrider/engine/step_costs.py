"""What steps take on this machine, kept from one start to the next: a control that knows need not find out at its user's expense.

One small JSON file for each combination of machine, model and drafter, in the cache folder. A file whose facts differ,
of another version or with anything strange in it is as good as none: then steps are timed anew, and the file is replaced.
Files are written whole or not at all, so processes that start together do no harm.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.build import Options
from outrider.cache import cache_folder, keep_json, kept_json
from outrider.machine import cores, cpu_name
from outrider.models.load import LoadedModel
from outrider.parts import Parts
from outrider.runtime import building
from outrider.version import __version__

log = logging.getLogger("outrider.engine")
VERSION = 2
MAX_FILES = 200  # the oldest go first
NO_SHAPE = ("_name_or_path", "transformers_version", "architectures")  # of a config: what does not make a model slower


@dataclass
class StepCosts:
    """`seconds`: by number of rows, then by nodes of the widest row."""

    facts: dict[str, Any]
    seconds: dict[int, dict[int, float]] = field(default_factory=dict)
    is_kept: bool = True  # for the next start

    @classmethod
    def of(cls, facts: dict[str, Any], *, keeps: bool) -> StepCosts:
        """`load`, but where steps take tomorrow something else than today (`Drafter.keeps_costs`), as new and never kept."""
        return cls.load(facts) if keeps else cls(facts, is_kept=False)

    @classmethod
    def load(cls, facts: dict[str, Any]) -> StepCosts:
        """What an earlier start has kept; empty where nothing was, or nothing that fits."""
        try:
            content = kept_json(_path(facts))
            if content["version"] != VERSION or content["facts"] != facts:
                return cls(facts)
            seconds = {int(rows): {int(n): float(s) for n, s in sizes.items()} for rows, sizes in content["seconds"].items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls(facts)
        values = [value for sizes in seconds.values() for value in sizes.values()]
        return cls(facts, seconds if all(value > 0 and math.isfinite(value) for value in values) else {})

    def add(self, rows: int, seconds: dict[int, float]) -> None:
        """What was timed just now, kept for the next start."""
        if seconds:
            self.seconds[rows] = seconds
            if self.is_kept:
                self.save()

    def save(self) -> None:
        """Keep the costs for the next start. A folder that cannot be written costs that start its time, nothing else."""
        content = {"version": VERSION, "facts": self.facts, "seconds": self.seconds}
        try:
            keep_json(_path(self.facts), content, max_files=MAX_FILES)
        except OSError as error:
            log.info("what steps take is not kept for the next start: %s", error)


def facts_of(options: Options, target: LoadedModel, draft: LoadedModel | None, parts: Parts) -> dict[str, Any]:
    """All that decides what a step takes, as JSON gives it back. `options`: resolved."""
    device = torch.device(options.device)
    facts = {
        "outrider": __version__,
        "kernels": (building.fingerprint(), torch.__version__),
        "loop_lengths": parts.loop_lengths,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cores": cores()["usable"],
        "threads": options.threads,
        "dtype": options.dtype,
        "quantise": options.quantise,
        "runtime": options.runtime,
        "target": _shape_of(target),
        "draft": _shape_of(draft) if draft is not None and parts.wants_draft else None,
        "drafter": parts.drafter_name,
        "drafter_options": asdict(parts.drafter_settings),
        "verifier": parts.verifier.name,
        "most": parts.length.most,
    }
    return json.loads(json.dumps(facts, default=str))


def _shape_of(model: LoadedModel) -> str:
    config = {name: value for name, value in model.config.to_dict().items() if name not in NO_SHAPE}
    return hashlib.blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def _path(facts: dict[str, Any]) -> Path:
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()
    return folder() / f"{digest}.json"


def folder() -> Path:
    """The folder of the files."""
    return cache_folder() / "step-costs"
