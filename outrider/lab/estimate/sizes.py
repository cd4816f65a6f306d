"""The size of a model in a local folder or GGUF file, from its config: no weight is read, none needs to be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.errors import CapabilityError, CheckpointError, first_line
from outrider.lab.estimate.roofline import DTYPE_BYTES, DtypeName, ModelSize
from outrider.lazy import transformers
from outrider.models.gguf.weights import gguf_bytes
from outrider.models.loading.load import load_config
from outrider.models.loading.memory import kv_bytes_per_token
from outrider.models.quantised.scheme import EXPERTS
from outrider.models.source import resolve


def size_of_folder(folder: Path, dtype: DtypeName, name: str | None = None) -> ModelSize:
    """Parameters counted on a model without storage, keys and values from the config. Raises CheckpointError where there is no
    config.json, CapabilityError where transformers cannot build the model. Keys and values of a model that is quantised below
    16 bits are taken to have 16. A GGUF file says itself how wide its weights are; `dtype` is then that of the arithmetic.
    """
    source = resolve(str(folder.absolute()))
    file = source.gguf
    if file is None and not folder.is_dir():
        raise CheckpointError(
            f"no model folder at '{folder}': a local folder with config.json is needed, or a size like --target-params 8B."
        )
    config = load_config(source)
    module = _without_storage(config, folder)
    num_params = sum(parameter.numel() for parameter in module.parameters())
    stored = None if file is None else sum(gguf_bytes(file, config, config.dtype))
    kv_dtype = torch.float32 if DTYPE_BYTES[dtype] == 4 else torch.bfloat16
    return ModelSize(
        name=name or folder.name,
        num_params=num_params,
        params_per_pass=num_params - _looked_up(module),
        dtype=dtype,
        kv_bytes_per_token=kv_bytes_per_token(config, kv_dtype),
        bytes_per_param=None if stored is None else stored / num_params,
        is_mixture=any((getattr(config.get_text_config(), name, None) or 1) > 1 for name in EXPERTS),
    )


def _without_storage(config: Any, folder: Path) -> Any:
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise CapabilityError(
            f"the size of '{folder.name}' cannot be read from its config.json: {first_line(error)}. Give its parameters instead."
        ) from error


def _looked_up(module: Any) -> int:
    """Parameters of which a pass reads single rows: the input embedding, unless it is the output layer too."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if embedding is None or (head is not None and head.weight is embedding.weight):
        return 0
    return int(embedding.weight.numel())
