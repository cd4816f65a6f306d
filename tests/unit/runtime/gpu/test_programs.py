"""Programs in kernels: what they compute, against the modules they were made of, without a GPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from outrider.errors import CapabilityError
from outrider.models import graphs
from outrider.models.graphs import GraphedPass
from outrider.models.lm import LM
from outrider.models.loading.load import build_lm
from outrider.models.signals import AFTER_NORM
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.gpu.run import DeviceRun, device_states, use_device_run
from outrider.runtime.gpu.source import kernel_text
from outrider.runtime.gpu.value_offsets import ValueOffset, offsets_of, read_elsewhere
from outrider.runtime.gpu.writer import SPLIT, UNARY
from outrider.runtime.lower import lower
from outrider.runtime.ops import Code, Op, Program, Value, View
from outrider.runtime.schedule import Kind, schedule
from tests.contract.family_reference import Reference, begin, random_text, score
from tests.contract.own_cache_families import VOCAB
from tests.contract.own_cache_families import make as hybrid
from tests.unit.runtime.families import make
from tests.unit.runtime.gpu.fake_triton import fake_triton
from tests.unit.runtime.passes import differences, every_pass

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 8e-2}
# turned halves, norms of heads, experts, windows and soft caps, transposed weights, latent
# attention, groups, sinks
FAMILIES = (
    "llama", "qwen3_moe", "gemma2", "gpt2", "deepseek_v3", "apertus", "granite_swa", "gpt_oss",
)  # fmt: skip
# Delta rules with a decay for a head and for each number, Mamba 2, a convolution alone, Mamba 1,
# RG-LRU, lightning attention
HYBRIDS = ("qwen3_5_text", "kimi_linear", "falcon_h1", "lfm2", "mamba", "minimax")
REFERENCE = Reference(hybrid, tolerance=2e-4)


@pytest.fixture(autouse=True)
def _kernels_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("outrider.runtime.gpu.run.find_spec", lambda name: name)
    with fake_triton():
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in FAMILIES), ("llama", torch.bfloat16)],
    ids=str,
)
def test_kernels_compute_what_the_module_does(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a lost barrier, a part of a value that is read stale, a wrong offset in a joined
    product, a mask that is lost."""
    # here a prompt's take a minute
    monkeypatch.setattr("outrider.runtime.gpu.run.EXPERT_TOKENS", 16)
    module = make(family, dtype)
    lm = build_lm(module, family, dtype, CPU)
    capture = (AFTER_NORM, 0, 1, 2)
    expected = every_pass(lm, capture)
    lm.run = DeviceRun(lm, module, lower(module))
    worst = differences(every_pass(lm, capture), expected)
    assert max(worst.values()) < TOLERANCE[dtype], worst


def test_a_lost_barrier_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation of the test above: what it runs on sees reads that a device would answer now one
    way, now another."""
    import outrider.runtime.gpu.steps as steps

    without = steps.compiled
    monkeypatch.setattr(
        steps, "compiled", lambda text: without(text.replace("tl.debug_barrier()", "pass"))
    )
    module = make("llama")
    lm = build_lm(module, "llama", torch.float32, CPU)
    lm.run = DeviceRun(lm, module, lower(module))
    with pytest.raises(AssertionError, match="without a barrier"):
        every_pass(lm)


def test_a_layer_of_a_llama_takes_few_kernels() -> None:
    """Catches operations that fell apart into kernels of their own: launches are what a small model
    waits for."""
    kinds = [phase.kind for phase in schedule(lower(make("llama"))).phases]
    layers = 2
    # two norms, the turned heads, the gate; the first norm, and the head
    assert kinds.count(Kind.TOKENWISE) == 4 * layers + 2
    assert kinds.count(Kind.ATTENTIONS) == layers


def test_layers_share_their_kernels() -> None:
    program = lower(make("llama"))
    phases = schedule(program).phases
    offsets = offsets_of(program, phases)
    wanted = read_elsewhere(program, phases)
    made = [
        kernel_text(phase.ops, program, offsets, own)
        for phase, own in zip(phases, wanted, strict=True)
        if phase.kind == Kind.TOKENWISE
    ]
    assert len({one.text for one in made}) == 5 < len(made)


def test_products_of_one_input_are_one() -> None:
    """Queries, keys and values lie side by side, and the module's weights become views of the
    joined one."""
    module = make("llama")
    lm = build_lm(module, "llama", torch.float32, CPU)
    layer = module.model.layers[0].self_attn
    before = layer.k_proj.weight.clone()
    DeviceRun(lm, module, lower(module))
    assert torch.equal(layer.k_proj.weight, before)
    assert (
        layer.k_proj.weight.untyped_storage().data_ptr()
        == layer.q_proj.weight.untyped_storage().data_ptr()
    )


def test_wide_elementwise_phases_are_divided() -> None:
    program = Program()
    size = 5 * SPLIT
    program.values = [Value(size, torch.float32) for _ in range(3)]
    first, second, last = (View(value, 1, size, 0, size) for value in range(3))
    program.body = [Op(Code.SILU, (first,), second), Op(Code.MUL, (second, first), last)]
    program.logits = last
    made = kernel_text(
        program.body, program, {value: ValueOffset(value, size) for value in range(3)}, {2}
    )
    assert made.columns == size
    assert made.stored == {2}  # what only this phase reads stays in registers


def test_an_operation_without_a_kernel_is_named() -> None:
    program = Program(values=[Value(4, torch.float32)])
    op = Op(Code.ATTENTION, (View(0, 1, 4),), View(0, 1, 4))
    with pytest.raises(NotLoweredError, match="operation attention on a CUDA device"):
        kernel_text([op], program, {0: ValueOffset(0, 4)}, set())


def test_attention_without_a_kernel_is_refused() -> None:
    """Catches slopes that are dropped: in bf16 the logits of a short text may stay within what a
    load allows."""
    module = make("bloom")
    lm = build_lm(module, "bloom", torch.float32, CPU)
    with pytest.raises(NotLoweredError, match="slopes"):
        use_device_run(lm, module)


def test_a_refused_model_keeps_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches short slots that stay behind for torch's kernels, which sum in another order there."""
    module = make("mistral")
    lm = build_lm(module, "mistral", torch.float32, CPU)
    before = lm.run
    layers = lm.shape.layers
    monkeypatch.delitem(UNARY, Code.SILU)  # its kernels cannot be written
    with pytest.raises(CapabilityError, match="kernels do not run here"):
        use_device_run(lm, module)
    assert lm.run is before
    assert lm.shape.layers == layers


def test_a_wrong_kernel_is_found_when_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make("llama")
    lm = build_lm(module, "llama", torch.float32, CPU)
    before = lm.run
    monkeypatch.setitem(UNARY, Code.SILU, "{0}")
    with pytest.raises(CapabilityError, match="differ from the plain ones"):
        use_device_run(lm, module)
    assert lm.run is before


def test_experts_of_long_passes_run_by_the_module() -> None:
    """Catches a recorded pass that the module makes without the mask that it needs."""
    module = make("qwen3_moe")
    lm = build_lm(module, "qwen3_moe", torch.float32, CPU)
    run = use_device_run(lm, module)
    graphed = GraphedPass(run)
    assert run.sees_chains(8)
    assert not run.sees_chains(100)
    assert not graphed._sees_chains(100)
    tokens = torch.arange(90)[None] % 97
    lm.kv.add_row()
    expected = run._plain
    own = lm.forward(tokens).logits
    lm.run = expected
    assert (lm.forward(tokens).logits - own).abs().max() == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_states_are_what_the_module_has(family: str) -> None:
    """Catches states of rejected tokens, of other rows or branches, and records that another
    program writes meanwhile."""
    module = hybrid(family)
    lm = device_states(build_lm(module, family, torch.float32, CPU), module)  # type: ignore[arg-type]
    texts = [random_text(VOCAB, length, seed=length) for length in (3, 8)]
    parents = torch.tensor([[-1, -1, 0, 2, 1], [-1, 0, 1, 1, -1]])
    paths = ([0, 1, 3, 4], [0, 1, 2, 4])
    begin(lm, *texts)
    for step, kept in enumerate((4, 1, 2, 3)):
        drafts = [
            [text[-1], *random_text(VOCAB, 5, seed=10 * step + row)]
            for row, text in enumerate(texts)
        ]
        in_tree = step % 2 == 0
        with torch.inference_mode():
            logits = lm.forward(torch.tensor(drafts), parents if in_tree else None).logits
        for row, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            path = paths[row] if in_tree else [0, 1, 2, 3, 4, 5]
            REFERENCE.compare(
                family, logits[row, path], [*text, *(draft[column] for column in path[1:])]
            )
            lm.kv.keep(row, path[:kept])
            text += [*(draft[column] for column in path[1:kept]), 7 + row]
        lm.kv.check_integrity()
        for row, alone in enumerate(score(lm, *[[text[-1]] for text in texts])):
            REFERENCE.compare(family, alone, texts[row])
            lm.kv.keep(row, [0])
            texts[row].append(30 + step)


def test_a_lost_barrier_between_branches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import outrider.runtime.gpu.state_kernels as state_kernels

    module = hybrid("mamba")
    lm = device_states(build_lm(module, "mamba", torch.float32, CPU), module)  # type: ignore[arg-type]
    begin(lm, [5])
    monkeypatch.setattr(state_kernels.tl, "debug_barrier", lambda: None)
    with pytest.raises(AssertionError, match="without a barrier"):
        lm.forward(torch.tensor([[5, 6, 7]]), torch.tensor([[-1, -1]]))


def steps_of(lm: LM, text: list[int], run: Callable[[], Any]) -> torch.Tensor:
    """Logits (tokens, V) of a text that is passed token by token, each by a new run, and rejected
    when it comes first."""
    begin(lm, text[:1])
    found = []
    for token in text:
        lm.run = run()
        score(lm, [token])
        found.append(score(lm, [token])[0, 0])
        lm.kv.advance(0, 1)
    return torch.stack(found)


@pytest.mark.slow
def test_recordings_of_states_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a state that takes in a token again while a pass is warmed up and recorded."""
    module = hybrid("lfm2")
    lm = device_states(build_lm(module, "lfm2", torch.float32, CPU), module)  # type: ignore[arg-type]
    own = lm.run
    text = random_text(VOCAB, 9)
    expected = steps_of(lm, text, lambda: own)

    class OnThisDevice(graphs._Recording):
        """Made as on CUDA, and replayed by making it again."""

        def __init__(self, call: Any, inputs: Any, pool: Any, stream: Any) -> None:
            self._inputs = [tensor.clone() for tensor in inputs]
            self._call = call
            for _ in range(graphs.WARM_UPS + 1):
                call(*self._inputs)

        def replay(self, inputs: Any) -> Any:
            return self._call(*inputs)

    class Everything(OrderedDict[Any, None]):
        """Shapes that have come once: all, so that each is recorded at once."""

        def __contains__(self, key: object) -> bool:
            return True

        def __delitem__(self, key: object) -> None:
            pass

    def recording() -> GraphedPass:
        run = GraphedPass(own)
        run.graphs._seen = Everything()
        return run

    monkeypatch.setattr(
        graphs.Graphs, "_made", lambda self, call, inputs: OnThisDevice(call, inputs, None, None)
    )
    assert torch.equal(steps_of(lm, text, recording), expected)
    assert isinstance(lm.run, GraphedPass)
    assert len(lm.run.graphs) == 1
