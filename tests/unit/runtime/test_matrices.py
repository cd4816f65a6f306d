"""Weights kept in integers on the executor: products and rows of every format, and models that have
them."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig

from outrider.errors import CapabilityError
from outrider.kv import KVCache, LayerShape
from outrider.models.derived.derive import with_replaced
from outrider.models.derived.quantised_linear import QuantisedPanels
from outrider.models.gguf.formats import FORMS, panels_of
from outrider.models.lm import PassLimits
from outrider.models.loading.load import build_lm, load_config, load_module
from outrider.models.plan import plan_pass
from outrider.models.quantised.floats import fp8, mxfp4
from outrider.models.quantised.layers import panels_of as panels_of_floats
from outrider.models.source import resolve
from outrider.runtime import library, run
from outrider.runtime.limits import find_native_limits
from outrider.runtime.lower import lower
from outrider.runtime.matrices import Matrix, matrix_of
from outrider.runtime.ops import Code, Op, Program, Value, View
from outrider.runtime.run import Executor, NativeRun
from tests.gguf_files import Kind, random_blocks, write_model
from tests.helpers import in_bytes
from tests.reference_run import ReferenceRun
from tests.unit.models.gguf.test_loading import made
from tests.unit.runtime.families import make
from tests.unit.runtime.passes import differences, every_pass

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32)
ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 2**-22}  # of a result, relative
OWN = [(4, 32), (4, 128), (8, 0)]


def matrix(name: str, outputs: int, inputs: int) -> Matrix:
    """Random weights in a format of GGUF, in ours ("4, 128": bits, inputs that share a scale),
    mxfp4, or fp8 ("fp8, 128")."""
    if name == "mxfp4" or name.startswith("fp8"):
        return small_floats(name, outputs, inputs)
    if name in FORMS:
        panels = panels_of(torch.from_numpy(random_blocks(Kind[name], outputs, inputs)), Kind[name])
        return Matrix(panels, FORMS[name], outputs, inputs)
    bits, group = map(int, name.split(", "))
    layer = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
    return matrix_of(QuantisedPanels(layer, bits, group))


def small_floats(name: str, outputs: int, inputs: int) -> Matrix:
    """Every code there is, numbers below the normal ones among them."""
    if name == "mxfp4":
        bytes_ = torch.randint(0, 256, (outputs, inputs // 32, 16), dtype=torch.uint8)
        found = mxfp4(bytes_, torch.randint(117, 125, (outputs, inputs // 32), dtype=torch.uint8))
    else:
        codes = torch.randint(0, 254, (outputs, inputs), dtype=torch.uint8)
        codes = torch.where((codes & 0x7F) == 0x7F, codes & 7, codes).view(torch.float8_e4m3fn)
        group = int(name.split(", ")[1]) or inputs
        scales = torch.rand(-(-outputs // 32), -(-inputs // group)) / 1000
        found = fp8({"weight": codes, "s": scales}, "s", (32, group))
    made = panels_of_floats(found)
    assert made is not None
    own = Matrix(*made, outputs, inputs)
    assert torch.equal(own.values(), found.values())
    return own


EVERY = [*FORMS, *(f"{bits}, {group}" for bits, group in OWN), "mxfp4"]
FP8 = ("fp8, 128", "fp8, 32", "fp8, 0")
every_format = pytest.mark.parametrize("name", EVERY)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Layer:
    """One linear layer, or one table, as a program."""

    def __init__(
        self, weights: Matrix, bias: Tensor | None, x: Tensor, path: Path, *, is_table: bool = False
    ) -> None:
        size = weights.inputs if is_table else weights.outputs
        dtype = x.dtype
        row = View(0, 1, weights.inputs, 0, weights.inputs)
        out = View(1, 1, size, 0, size)
        work = [
            Op(Code.EMBED, (), row, weight="x"),
            Op(Code.LINEAR, (row,), out, weight="w", bias="" if bias is None else "b"),
        ]
        program = Program(
            values=[Value(weights.inputs, dtype), Value(size, dtype), Value(size, dtype)],
            body=[Op(Code.EMBED, (), out, weight="w")] if is_table else work,
            head=[Op(Code.GATHER, (out,), View(2, 1, size, 0, size))],
            logits=View(2, 1, size, 0, size),
        )
        unit = LayerShape(1, 2, 2)
        tensors = {"x": x, "w": weights, **({} if bias is None else {"b": bias})}
        self._executor = Executor(program, tensors, [unit], dtype, path)
        self._kv = KVCache([unit], dtype, "cpu")
        self._kv.add_row()

    def rows(self, ids: Tensor) -> Tensor:
        """(count, size) of one pass over these tokens."""
        plan, positions = plan_pass(self._kv, 1, len(ids), last_position=1 << 20)
        return self._executor.run(ids[None], positions, plan, torch.arange(len(ids)))[0][0]


@every_dtype
@every_format
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 256), (45, 512), (300, 1024)])
def test_products_are_those_of_the_values(
    name: str, outputs: int, inputs: int, dtype: torch.dtype, library_path: Path
) -> None:
    """Exact but for the last rounding, given activations in 8 bits for each 32: catches a code or
    factor at a wrong position."""
    torch.manual_seed(0)
    weights = matrix(name, outputs, inputs)
    for bias in (torch.randn(outputs).to(dtype), None):
        x = torch.randn(70, inputs).to(dtype)
        layer = Layer(weights, bias, x, library_path)
        exact = in_bytes(x) @ weights.values().double().t() + (0 if bias is None else bias.double())
        for width in (1, 9, 70):
            error = (layer.rows(torch.arange(width)).double() - exact[:width]).abs()
            assert (error <= ROUNDING[dtype] * exact[:width].abs() + 1e-5 * exact.abs().max()).all()


@pytest.mark.parametrize(
    ("bits", "group", "inputs"), [(4, 64, 100), (8, 0, 90), (4, 128, 34), (8, 0, 160), (8, 0, 192)]
)
def test_a_last_group_that_is_not_full(
    bits: int, group: int, inputs: int, library_path: Path
) -> None:
    """Catches inputs or blocks behind the last whole group that are lost, or added twice."""
    weights = matrix(f"{bits}, {group}", 70, inputs)
    x = torch.randn(37, inputs).bfloat16()
    exact = in_bytes(x) @ weights.values().double().t()
    found = Layer(weights, None, x, library_path).rows(torch.arange(37)).double()
    assert ((found - exact).abs() <= 2**-8 * exact.abs() + 1e-5 * exact.abs().max()).all()
    table = Layer(weights, None, x, library_path, is_table=True).rows(torch.arange(70))
    assert torch.equal(table, weights.values().bfloat16().float())


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 256), (45, 512), (300, 1056), (33, 164)])
def test_products_of_fp8_are_those_of_the_values(
    name: str, outputs: int, inputs: int, library_path: Path
) -> None:
    """No activation is rounded: exact but for the last rounding. Catches a code or scale at the
    wrong position."""
    torch.manual_seed(0)
    weights = matrix(name, outputs, inputs)
    bias = torch.randn(outputs).bfloat16()
    x = torch.randn(70, inputs).bfloat16()
    layer = Layer(weights, bias, x, library_path)
    exact = x.double() @ weights.values().double().t() + bias.double()
    size = x.double().abs() @ weights.values().double().abs().t()
    for width in (1, 9, 70):
        error = (layer.rows(torch.arange(width)).double() - exact[:width]).abs()
        assert (error <= 2**-8 * exact[:width].abs() + 1e-6 * size[:width]).all()


@pytest.mark.parametrize("beside", [0, 0x38], ids=["zeros", "ones"])
def test_all_numbers_of_fp8_are_widened_exactly(beside: int, library_path: Path) -> None:
    """All 254 codes. Those below 2^-6 have no leading bit: products of bf16 would take them for 0.
    What has none of them is widened in another way."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    weight = torch.full((len(codes), 32), beside, dtype=torch.uint8)
    weight[torch.arange(len(codes)), torch.arange(len(codes)) % 32] = codes
    values = weight.view(torch.float8_e4m3fn)
    layer = Layer(
        Matrix(
            *panels_of_floats(fp8({"weight": values, "s": torch.ones(1)}, "s", None)),
            len(codes),
            32,
        ),
        None,
        torch.eye(32).bfloat16(),
        library_path,
    )
    for width in (1, 16, 32):
        assert torch.equal(layer.rows(torch.arange(width)), values.float().t()[:width])


def test_fp8_is_refused_beside_fp32(library_path: Path) -> None:
    with pytest.raises(CapabilityError, match="another type than bfloat16"):
        Layer(matrix("fp8, 32", 45, 64), None, torch.randn(3, 64), library_path)


@pytest.mark.parametrize("name", [*EVERY, *FP8])
def test_a_row_has_the_same_bits_in_every_company(
    name: str, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a sum whose order depends on a pass's width or on threads. 28,000 numbers a
    comparison: dozens would change."""
    weights = matrix(name, 400, 512)
    x = torch.randn(70, 512).bfloat16()
    layer = Layer(weights, None, x, library_path)
    alone = torch.cat([layer.rows(torch.tensor([i])) for i in range(70)])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    for each in (layer, Layer(weights, None, x, library_path)):
        assert all(
            torch.equal(each.rows(torch.arange(width)), alone[:width])
            for width in (2, 3, 7, 8, 9, 16, 17, 64, 65, 70)
        )


@every_dtype
@every_format
def test_rows_of_a_table_are_its_values(name: str, dtype: torch.dtype, library_path: Path) -> None:
    weights = matrix(name, 45, 512)
    table = Layer(weights, None, torch.zeros(1, 512, dtype=dtype), library_path, is_table=True)
    tokens = torch.tensor([0, 44, 31, 32, 7, 44])
    expected = weights.values()[tokens].to(dtype).float()
    assert torch.equal(table.rows(tokens), expected)
    if name in FORMS:
        assert torch.equal(
            weights.values(),
            torch.from_numpy(gguf.dequantize(random_blocks(Kind[name], 45, 512), Kind[name])),
        )


MODELS = {
    "llama": lambda: made(hidden_size=256, intermediate_size=256, attention_bias=True),
    "tied": lambda: made(
        LlamaConfig, hidden_size=256, intermediate_size=256, tie_word_embeddings=True
    ),
    "gpt2": lambda: made(
        GPT2Config, n_embd=256, n_layer=2, n_head=4, n_positions=512, tie_word_embeddings=True
    ),
}


def in_blocks(kind: str, model: str, path: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model of a GGUF file, matrices in this format."""
    file = write_model(
        path / "m.gguf",
        MODELS[model](),
        "gpt2" if model == "gpt2" else "llama",
        kind=Kind[kind],
        changes={"gpt2.context_length": 512} if model == "gpt2" else {},
    )
    return load_module(resolve(str(file)), load_config(resolve(str(file))), dtype, CPU)


def quantised(bits: int, dtype: torch.dtype) -> nn.Module:
    """A model whose linear layers are ours in 4 or 8 bits."""
    return with_replaced(
        make("llama", dtype),
        lambda part: QuantisedPanels(part, bits, 32) if type(part) is nn.Linear else None,
    )


def assert_equal_but_for_edges(worst: dict[str, float]) -> None:
    """Passes whose activations lie on no edge between two codes agree in fp32; a code that flips is
    a step of 8 bits."""
    assert min(worst.values()) < 1e-6
    assert max(worst.values()) < 3e-2


CASES = [("Q4_1", "llama"), ("Q8_0", "tied"), ("Q4_0", "gpt2"), ("Q5_1", "tied")]


@pytest.mark.parametrize(("kind", "model"), CASES)
def test_a_model_in_blocks_is_its_widened_one(
    kind: str, model: str, tmp_path: Path, library_path: Path
) -> None:
    """Lowered, run by torch: the module's own logits. On the executor: those with activations
    rounded to 8 bits, in fp32, so that nothing but a code on the edge may differ. Catches a layer,
    table or bias that is another's."""
    module = in_blocks(kind, model, tmp_path, torch.float32)
    lm = build_lm(module, model, torch.float32, CPU)
    lm.limits = PassLimits(granularity=1)
    expected = every_pass(lm)
    program = lower(module)
    assert all(
        op.weight in program.matrices
        for op in (*program.body, *program.head)
        if op.code == Code.LINEAR
    )
    lm.run = ReferenceRun(module, program)
    assert max(differences(every_pass(lm), expected).values()) < 1e-4
    lm.run = ReferenceRun(module, program, rounds=True)
    rounded = every_pass(lm)
    lm.run = NativeRun(lm, module, program, library_path)
    assert_equal_but_for_edges(differences(every_pass(lm), rounded))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_model_is_its_widened_one(bits: int, library_path: Path) -> None:
    module = quantised(bits, torch.float32)
    program = lower(module)
    lm = build_lm(make("llama"), "llama", torch.float32, CPU)
    lm.run = ReferenceRun(module, program, rounds=True)
    rounded = every_pass(lm)
    lm.run = NativeRun(lm, module, program, library_path)
    assert_equal_but_for_edges(differences(every_pass(lm), rounded))


@pytest.mark.parametrize(("kind", "model"), CASES[:2])
def test_no_pass_has_limits(kind: str, model: str, tmp_path: Path, library_path: Path) -> None:
    """In bf16, as models in blocks run: the check at load finds that no pass need be padded or
    split."""
    module = in_blocks(kind, model, tmp_path)
    lm = build_lm(module, model, torch.bfloat16, CPU)
    lm.run = NativeRun(lm, module, lower(module), library_path)
    assert find_native_limits(lm) == PassLimits(granularity=1)


def test_weights_are_shared_not_copied(tmp_path: Path) -> None:
    """Catches a second copy of a model's blocks in memory; a tied table and output have one."""
    module = in_blocks("Q8_0", "tied", tmp_path)
    matrices = lower(module).matrices
    assert matrices["lm_head"].panels.data_ptr() == matrices["model.embed_tokens"].panels.data_ptr()
    assert matrices["lm_head"].panels.data_ptr() == module.lm_head.panels.data_ptr()


def test_fp32_is_refused(
    tmp_path: Path, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks for fp32 gets the widened weights, not activations in 8 bits."""
    module = in_blocks("Q8_0", "tied", tmp_path, torch.float32)
    lm = build_lm(module, "tied", torch.float32, CPU)
    monkeypatch.setattr(library, "find", lambda cache: library_path)
    with pytest.raises(CapabilityError, match="bfloat16"):
        run.use_native_run(lm, module, tmp_path)
