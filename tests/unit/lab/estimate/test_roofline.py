"""The roof, by hand and against its own passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import CapabilityError
from outrider.lab.estimate.roofline import (
    DTYPE_BYTES,
    DecodeLoad,
    Machine,
    ModelSize,
    compute_seconds,
    free_rows,
    free_tokens,
    memory_seconds,
    pass_curve,
    pass_seconds,
    size_of,
)

EIGHT = size_of("8B", 8 * 10**9, "bfloat16")
WITH_KV = EIGHT.model_copy(update={"kv_bytes_per_token": 131072})
MACHINE = Machine(bandwidth=1e12, flops=200e12)
machines = st.builds(Machine, bandwidth=st.floats(1e10, 1e13), flops=st.floats(1e12, 1e15))
loads = st.builds(DecodeLoad, num_rows=st.integers(1, 64), context=st.integers(0, 8192))


def test_by_hand() -> None:
    """16 GB at 1 TB/s is 16 ms; 2 x 8e9 x 10 operations at 200 TFLOPS 0.8 ms; 32 rows x 1000 tokens of 128 KiB 4.2 ms."""
    load = DecodeLoad(num_rows=1, context=0)
    assert memory_seconds(EIGHT, MACHINE, load) == pytest.approx(0.016)
    assert compute_seconds(EIGHT, 10, MACHINE, load) == pytest.approx(0.0008)
    assert memory_seconds(WITH_KV, MACHINE, DecodeLoad(num_rows=32, context=1000)) == pytest.approx(
        0.016 + 32 * 1000 * 131072 / 1e12
    )
    assert compute_seconds(EIGHT, 10, MACHINE, DecodeLoad(num_rows=32)) == pytest.approx(0.0256)
    assert pass_seconds(EIGHT, 10, MACHINE, DecodeLoad(num_rows=32)) == pytest.approx(0.0256)
    assert pass_seconds(EIGHT, 1, MACHINE, DecodeLoad(num_rows=32)) == pytest.approx(0.016)


def test_input_embeddings_are_kept_but_not_read() -> None:
    model = EIGHT.model_copy(update={"params_per_pass": 7 * 10**9})
    assert model.weights_bytes == 16e9
    assert memory_seconds(model, MACHINE, DecodeLoad(context=0)) == pytest.approx(0.014)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 32e9), ("bfloat16", 16e9), ("int8", 8e9), ("int4", 4e9)])
def test_bytes_per_parameter(dtype: str, size: float) -> None:
    assert size_of("8B", 8 * 10**9, dtype).weights_bytes == size  # type: ignore[arg-type]
    assert set(DTYPE_BYTES) == {"float32", "bfloat16", "float16", "float8", "int8", "int4"}


@given(machine=machines, load=loads)
def test_free_tokens_are_where_passes_begin_to_cost(machine: Machine, load: DecodeLoad) -> None:
    free = free_tokens(WITH_KV, machine, load)
    assert free is not None
    one = memory_seconds(WITH_KV, machine, load)
    if free >= 1:
        assert pass_seconds(WITH_KV, int(free), machine, load) == pytest.approx(one)
    assert pass_seconds(WITH_KV, int(free) + 2, machine, load) > one


@given(machine=machines, context=st.integers(0, 8192), count=st.integers(1, 12))
def test_free_rows_are_where_batches_begin_to_cost(machine: Machine, context: int, count: int) -> None:
    rows = free_rows(WITH_KV, count, machine, DecodeLoad(num_rows=7, context=context))  # whatever the rows of the load

    def waits(num_rows: int) -> bool:
        load = DecodeLoad(num_rows=num_rows, context=context)
        return memory_seconds(WITH_KV, machine, load) >= compute_seconds(WITH_KV, count, machine, load)

    if rows is None:
        assert waits(10_000)
    else:
        assert rows < 1.001 or waits(max(1, int(rows * 0.999)))
        assert not waits(int(rows * 1.001) + 1)


def test_without_flops_nothing_is_bound_by_them() -> None:
    machine = Machine(bandwidth=1e12)
    assert free_tokens(EIGHT, machine, DecodeLoad()) is None
    assert free_rows(EIGHT, 5, machine, DecodeLoad()) is None
    assert pass_curve(EIGHT, 9, machine, DecodeLoad()).seconds(9)[0] == pytest.approx(0.016)


def test_the_curve_is_the_passes() -> None:
    load = DecodeLoad(num_rows=16)
    curve = pass_curve(EIGHT, 20, MACHINE, load)
    for count in range(1, 21):
        assert curve.seconds(count) == (pytest.approx(pass_seconds(EIGHT, count, MACHINE, load)), False)


def test_mixtures_of_experts_are_refused() -> None:
    """All weights at every pass would be wrong by a factor."""
    mixture = ModelSize(name="moe", num_params=10, params_per_pass=10, dtype="int8", is_mixture=True)
    with pytest.raises(CapabilityError, match="mixture of experts"):
        pass_seconds(mixture, 1, MACHINE, DecodeLoad())
