"""What routers choose, and the experts that are chosen: the executor against torch where nothing
may differ, and in odd cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.kv import KVCache, LayerShape
from outrider.models.plan import plan_pass
from outrider.models.probes.sum_order import same_bits
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.lower import lower
from outrider.runtime.ops import Code, Op, Program, Value, View
from outrider.runtime.run import Executor
from tests.unit.runtime.families import make

SHAPE = LayerShape(1, 2, 2)  # of a cache that nobody reads
COUNT = 37
EXPERTS = 5
EACH = 2
INPUTS = 64
OUTPUTS = 70


def run(
    values: list[Value],
    body: list[Op],
    tables: dict[str, Tensor],
    path: Path,
    ids: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The last value of a small program for each of these tokens (T,)."""
    last = len(values) - 1
    out = values[-1].size
    values.append(Value(out, values[-1].dtype))
    head = [Op(Code.GATHER, (View(last, 1, out, 0, out),), View(last + 1, 1, out, 0, out))]
    program = Program(values=values, body=body, head=head, logits=View(last + 1, 1, out, 0, out))
    kv = KVCache([SHAPE], dtype, "cpu")
    kv.add_row()
    plan, positions = plan_pass(kv, 1, len(ids), last_position=1 << 20)
    executor = Executor(program, tables, [SHAPE], dtype, path)
    return executor.run(ids[None], positions, plan, torch.arange(len(ids)))[0][0]


def chosen(scores: Tensor, wanted: int, path: Path) -> Tensor:
    """Indices of the largest of each row's numbers."""
    size = scores.shape[1]
    body = [
        Op(Code.EMBED, (), View(0, 1, size, 0, size), weight="x"),
        Op(Code.TOP, (View(0, 1, size, 0, size),), View(1, 1, wanted, 0, wanted), (float(size),)),
    ]
    values = [Value(size, torch.float32), Value(wanted, torch.float32)]
    return run(values, body, {"x": scores}, path, torch.arange(len(scores)), torch.float32).long()


@pytest.mark.parametrize("wanted", [1, 2, 7, 21])
def test_the_largest_numbers_are_found_and_of_equals_the_first(
    wanted: int, library_path: Path
) -> None:
    """Catches ties that are broken otherwise than everywhere else (lowest id), and a list that is
    cut before it is full."""
    scores = torch.randint(0, 9, (50, 21), generator=torch.Generator().manual_seed(0)).float()
    expected = torch.sort(scores, dim=1, descending=True, stable=True)[1][:, :wanted]
    assert torch.equal(chosen(scores, wanted, library_path), expected)


def test_a_score_that_is_no_number_is_an_index_still(library_path: Path) -> None:
    """Catches an expert that does not exist, whose weights would be read from somewhere."""
    scores = torch.tensor([[1.0, torch.nan, 3.0], [torch.nan] * 3, [-torch.inf] * 3])
    assert chosen(scores, 2, library_path).tolist() == [[1, 2], [0, 1], [0, 1]]


def experts_program(dtype: torch.dtype, *, own_rows: bool) -> tuple[list[Value], list[Op]]:
    size = INPUTS * (EACH if own_rows else 1)
    x = View(0, EACH, INPUTS, 0, INPUTS if own_rows else 0)
    body = [
        Op(Code.EMBED, (), View(0, 1, size, 0, size), weight="x"),
        Op(Code.EMBED, (), View(1, 1, EACH, 0, EACH), weight="index"),
        Op(
            Code.EXPERTS,
            (x, View(1, 1, EACH, 0, EACH)),
            View(2, EACH, OUTPUTS, 0, OUTPUTS),
            weight="w",
            bias="b",
        ),
    ]
    return [Value(size, dtype), Value(EACH, torch.float32), Value(EACH * OUTPUTS, dtype)], body


@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_token_multiplies_with_the_experts_that_it_names(
    dtype: torch.dtype, own_rows: bool, library_path: Path
) -> None:
    """Catches rows that are put back elsewhere, a bias of another expert, and bits that depend on
    who shares an expert."""
    generator = torch.Generator().manual_seed(0)
    size = INPUTS * (EACH if own_rows else 1)
    tables = {
        "x": torch.randn(COUNT, size, generator=generator).to(dtype),
        "index": torch.stack(
            [torch.randperm(EXPERTS, generator=generator)[:EACH] for _ in range(COUNT)]
        ).float(),
        "w": torch.randn(EXPERTS, OUTPUTS, INPUTS, generator=generator).to(dtype),
        "b": torch.randn(EXPERTS, OUTPUTS, generator=generator).to(dtype),
    }

    def passes(width: int) -> Tensor:
        parts = torch.arange(COUNT).split(width)
        done = [
            run(*experts_program(dtype, own_rows=own_rows), tables, library_path, ids, dtype)
            for ids in parts
        ]
        return torch.cat(done)

    found = {width: passes(width) for width in (1, 2, 3, 8, COUNT)}
    assert same_bits(found, list(found))
    rows = tables["x"].view(COUNT, -1, INPUTS).expand(-1, EACH, -1)
    for token, named in enumerate(tables["index"].long().tolist()):
        for index, expert in enumerate(named):
            wanted = F.linear(
                rows[token, index].float(), tables["w"][expert].float(), tables["b"][expert].float()
            )
            own = found[COUNT][token].view(EACH, OUTPUTS)[index]
            torch.testing.assert_close(
                own, wanted, rtol=1e-2, atol=1e-4 if dtype == torch.float32 else 0.1
            )


class Careless(nn.Module):
    """A final norm that writes over a tensor and then looks at it by way of an older view."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(x)
        view = out.view(*out.shape[:-1], 2, -1)
        out.mul_(2)
        return view.flatten(-2)


def test_memory_that_is_written_by_way_of_another_tensor_is_refused() -> None:
    """Catches a view that is lowered to what lay there before."""
    module = make("llama")
    module.model.norm = Careless(module.model.norm)
    with pytest.raises(NotLoweredError, match="written by way of another"):
        lower(module)
