"""What a helper does (`helper.py`): python -m outrider.models.compile_loops JOB"""

from __future__ import annotations

import json
import sys

import torch

from outrider.models.compiled import CompiledModel
from outrider.models.helper import Job
from outrider.models.load import DTYPES, LoadedModel, build_lm, load_config, load_module


def make(job: Job) -> None:
    """Load the model and make the programs."""
    torch.set_num_threads(job.threads)  # which programs are made for, and their files named after
    device, dtype = torch.device("cpu"), DTYPES[job.dtype]
    config = load_config(job.name)
    module = load_module(job.name, config, dtype, device)
    loaded = LoadedModel(job.name, build_lm(module, job.name, dtype, device), config, None, frozenset())
    CompiledModel(loaded, module, False, job.lengths, job.loop_vocab).make_loops()


if __name__ == "__main__":
    make(Job(**json.loads(sys.argv[1])))
