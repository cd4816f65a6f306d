"""How long a pass takes at best, from sizes alone: the roofline (Williams et al. 2009, "Roofline: an insightful
visual performance model"), as everybody applies it to decoding.

    memory   (weight bytes + rows context KV bytes per token) / bandwidth         each pass reads all weights once
    compute  2 (parameters read) (rows query tokens) / FLOPS                      one multiplication, one addition
    seconds  the larger of the two

Left out: activations, the arithmetic of attention (it grows with the context), kernel launches, what a library falls short of the
roof, caches that hold a small model. So real passes are slower, a small draft's by much more than a large target's.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outrider.errors import CapabilityError
from outrider.lab.estimate.curves import CostPoints
from outrider.lab.result import Record

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "int8": 1.0, "int4": 0.5}
DtypeName = Literal["float32", "bfloat16", "float16", "float8", "int8", "int4"]


class ModelSize(Record):
    """What is to be read and kept of one model."""

    name: str
    num_params: int = Field(ge=0)
    params_per_pass: int = Field(
        ge=0
    )  # without the input embedding where it is a table of its own: of that, single rows are read
    dtype: DtypeName
    kv_bytes_per_token: int | None = None  # None: not known
    is_mixture: bool = False  # of experts: what a pass reads depends on its tokens
    bytes_per_param: float | None = None  # as its file stores them, blocks of a GGUF file; None: the dtype's

    @property
    def _width(self) -> float:
        return DTYPE_BYTES[self.dtype] if self.bytes_per_param is None else self.bytes_per_param

    @property
    def weights_bytes(self) -> float:
        return self.num_params * self._width

    @property
    def pass_bytes(self) -> float:
        """Weights that each pass reads."""
        return self.params_per_pass * self._width

    def kv_bytes(self, num_rows: int, context: int) -> int:
        """Keys and values of `num_rows` rows of `context` tokens; 0 where their size is not known."""
        return (self.kv_bytes_per_token or 0) * num_rows * context


class Machine(Record):
    """What passes run on."""

    bandwidth: float = Field(gt=0, allow_inf_nan=False)  # of memory, bytes/s
    flops: float | None = Field(
        default=None, gt=0, allow_inf_nan=False
    )  # in the dtype of the arithmetic; None: no limit


class DecodeLoad(Record):
    """How much is decoded at once."""

    num_rows: int = Field(default=1, ge=1)
    context: int = Field(default=4096, ge=0)  # cached tokens per row


def size_of(name: str, num_params: int, dtype: DtypeName) -> ModelSize:
    """A dense model of which nothing but the number of parameters is known."""
    return ModelSize(name=name, num_params=num_params, params_per_pass=num_params, dtype=dtype)


def memory_seconds(model: ModelSize, machine: Machine, load: DecodeLoad) -> float:
    """Reading weights, keys and values, whatever the number of query tokens. Raises CapabilityError for mixtures of experts."""
    if model.is_mixture:
        raise CapabilityError(
            f"'{model.name}' is a mixture of experts: what a pass reads depends on how many experts its tokens choose. "
            "Give measured times: --draft-ms and --target-ms, or --costs FILE."
        )
    return (model.pass_bytes + model.kv_bytes(load.num_rows, load.context)) / machine.bandwidth


def compute_seconds(model: ModelSize, num_tokens: int, machine: Machine, load: DecodeLoad) -> float:
    """Multiplying `num_tokens` query tokens per row with all weights; 0 where FLOPS are not known."""
    return 2 * model.params_per_pass * num_tokens * load.num_rows / machine.flops if machine.flops else 0.0


def pass_seconds(model: ModelSize, num_tokens: int, machine: Machine, load: DecodeLoad) -> float:
    """One pass over `num_tokens` query tokens per row."""
    return max(memory_seconds(model, machine, load), compute_seconds(model, num_tokens, machine, load))


def pass_curve(model: ModelSize, max_tokens: int, machine: Machine, load: DecodeLoad) -> CostPoints:
    """The roof as a cost curve, for 1 to `max_tokens` query tokens per row."""
    seconds = {count: pass_seconds(model, count, machine, load) for count in range(1, max_tokens + 1)}
    return CostPoints.of(seconds, context=load.context)


def free_tokens(model: ModelSize, machine: Machine, load: DecodeLoad) -> float | None:
    """Query tokens per row up to which a pass takes as long as over one: until arithmetic takes longer than reading. Below 1:
    not even plain decoding waits for memory. None without FLOPS.
    """
    one = compute_seconds(model, 1, machine, load)
    return memory_seconds(model, machine, load) / one if one else None


def free_rows(model: ModelSize, num_tokens: int, machine: Machine, load: DecodeLoad) -> float | None:
    """Rows up to which passes over `num_tokens` query tokens per row wait for memory. None: always (long contexts, where each
    further row brings more keys and values to read than arithmetic), or without FLOPS.
    """
    if machine.flops is None:
        return None
    one_row = DecodeLoad(num_rows=1, context=load.context)
    weights = model.pass_bytes / machine.bandwidth
    row = compute_seconds(model, num_tokens, machine, one_row) - model.kv_bytes(1, load.context) / machine.bandwidth
    return weights / row if row > 0 else None
