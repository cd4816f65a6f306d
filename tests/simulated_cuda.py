"""Two CUDA devices on a machine that has none: tensors that say they are on `cuda:0` or `cuda:1`
and are computed on the CPU.

What it shows without a GPU: that no operation mixes host and device, or two devices (what CUDA
refuses is refused here), how often a step waits for the device (`syncs`), and that a recorded graph
replays what it should. A recorded graph is the list of its operations with the very tensors they
ran on, as a CUDA graph is: what Python computed while recording is frozen, what is not copied into
the graph's own inputs is stale. Only what the recording thread does on the recording's stream and
device enters. As in torch, the current device and its streams are a thread's own; waiting for the
whole device breaks what any thread is recording; and a broken recording leaves its thread on its
stream, and its memory useless for others. What it cannot show: that CUDA's kernels exist for these
operations, their bits, and any speed.

    with SimulatedCuda() as cuda:
        llm = LLM(folder, device="cuda", ...)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NUM_DEVICES = 2
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
# one kernel on CUDA, whatever it is made of here
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
# Operations after which the host knows something of the device's numbers: it has waited for them.
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}
# Operations that CUDA lets read host tensors beside device ones: copies, and indexing by host
# positions (which are copied).
MAY_MIX = {"copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_"}


class DeviceTensor(Tensor):
    """Numbers on the simulated device. To C++ it is a CPU tensor without memory of its own: a real
    CUDA device would make it call the driver. To Python, and so to all code under test, it is on
    CUDA."""

    inner: Tensor  # the same numbers on the CPU; views share memory as they would on a device
    own_device: torch.device

    @staticmethod
    def __new__(cls: type[DeviceTensor], inner: Tensor, device: torch.device) -> DeviceTensor:
        with torch.inference_mode(False):  # an ordinary tensor, whatever mode it is used in
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device="cpu",
            )
        made.inner = inner
        made.own_device = device
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.own_device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        return _on_host(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                f"can't convert {self.own_device} device type tensor to numpy. Use Tensor.cpu() "
                "first."
            )
        return _on_host(self).numpy()

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return _on_host(self)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """C++ believes the tensor is on the CPU already, and outside of inference mode nobody asks
        further."""
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu":
            dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
            return _on_host(self).to(dtype=dtype or self.dtype)
        return super().to(*args, **kwargs)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"cuda({self.inner!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # C++ would ask `other` for its device
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], DeviceTensor):
            args = (args[0], args[1].own_device, args[1].dtype, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a simulated tensor outside of SimulatedCuda")


class SimulatedGraph:
    """`torch.cuda.CUDAGraph`: what ran while it was recorded, to be run again on the same memory."""

    def __init__(self) -> None:
        # operation, arguments, keyword arguments, results: all on the CPU
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, results in self.steps:
            again = func(*args, **kwargs)
            if any(r.alias_info is not None for r in func._schema.returns):
                continue  # a view, or written in place: the memory is the recorded one
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)


class SimulatedStream:
    """`torch.cuda.Stream`. One after the other is how everything runs here."""

    def __init__(self, device: torch.device, wait: Callable[[str], None]) -> None:
        self.device = device
        self._wait = wait

    def wait_stream(self, other: SimulatedStream) -> None:
        """Nothing is ever under way."""

    def synchronize(self) -> None:
        self._wait("synchronize")


@dataclass(eq=False)
class _Recording:
    """A graph that is being recorded."""

    graph: SimulatedGraph
    stream: SimulatedStream
    thread: int
    is_broken: bool = False


class _Thread(threading.local):
    """The state of one thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.device = 0
        self.streams: dict[int, SimulatedStream] = {}
        # devices of the operations made of others that it is in
        self.composite: list[torch.device] = []


class SimulatedCuda(TorchDispatchMode):
    """The devices, for as long as the block lasts. `syncs` counts, by operation, how often the host
    waited; `launches` kernels. Another thread enters the same object."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: Counter[str] = Counter()
        self.launches = 0
        self.graphs: list[SimulatedGraph] = []
        self._recording: _Recording | None = None
        self._own = _Thread()
        # of recordings that name none, as in torch
        self._default_stream: SimulatedStream | None = None
        self._broken_pools: list[object] = []
        self._depth = 0
        self._undo = ExitStack()

    def __enter__(self) -> SimulatedCuda:
        if self._depth == 0:
            self._replace_torch_cuda()
        self._depth += 1
        if self._own.depth == 0:  # torch.tensor(..., device="cuda"): made on the host, then copied
            torch._C._set_only_lift_cpu_tensors(True)
        self._own.depth += 1
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._own.depth -= 1
        if self._own.depth == 0:
            torch._C._set_only_lift_cpu_tensors(False)
        self._depth -= 1
        if self._depth == 0:
            self._undo.close()

    def _replace_torch_cuda(self) -> None:
        replaced = {
            "is_available": lambda: True,
            "_lazy_init": lambda: None,
            "device_count": lambda: NUM_DEVICES,
            "current_device": lambda: self._own.device,
            "device": self._on,
            "synchronize": self._synchronize,
            "mem_get_info": lambda device=None: (64 << 30, 80 << 30),
            "get_device_name": lambda device=None: "simulated",
            "Stream": self._new_stream,
            "current_stream": self._current_stream,
            "stream": self._using,
            "CUDAGraph": SimulatedGraph,
            "graph": self._graph,
            "graph_pool_handle": object,
            "is_current_stream_capturing": lambda: self._is_recording(self._full("cuda")),
        }
        patch = self._undo.enter_context(pytest.MonkeyPatch.context())
        for name, value in replaced.items():
            patch.setattr(torch.cuda, name, value)
        # module.to: new parameters, instead of device memory put into the old ones
        future = torch.__future__
        self._undo.callback(
            future.set_overwrite_module_params_on_conversion,
            future.get_overwrite_module_params_on_conversion(),
        )
        future.set_overwrite_module_params_on_conversion(True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        wanted = kwargs.get("device")
        if wanted is not None:
            wanted = self._full(wanted)
            if self._own.composite:  # C++ asks for the device it believes its arguments to be on
                wanted = kwargs["device"] = self._own.composite[-1]
        if not here and (wanted is None or wanted.type != "cuda"):
            return func(*args, **kwargs)
        if func._schema.name == "aten::to":  # its own C++ asks the driver for the device
            return self._to(func, args, kwargs)
        # made of others: look at those
        if func.has_kernel_for_dispatch_key(COMPOSITE) and func is not ATTENTION:
            return self._decomposed(func, args, kwargs, here[0].own_device if here else wanted)
        self._check(func, here, tensors, wanted)
        args, kwargs = tree_map(_bare, (args, kwargs))
        if wanted is not None and wanted.type == "cuda":
            kwargs["device"] = torch.device("cpu")
        with torch.inference_mode(False), torch.no_grad():
            result = func(*args, **kwargs)
        self.launches += 1
        device = wanted if wanted is not None and wanted.type == "cuda" else here[0].own_device
        if self._recording is not None and self._is_recording(device):
            self._recording.graph.steps.append((func, args, kwargs, result))
        if here and wanted is not None and wanted.type == "cpu":
            return result
        return tree_map(lambda leaf: self._on_device(leaf, here, device), result)

    def _decomposed(
        self, func: Any, args: Any, kwargs: dict[str, Any], device: torch.device
    ) -> Any:
        self._own.composite.append(device)
        try:
            with self:
                return func.decompose(*args, **kwargs)
        finally:
            self._own.composite.pop()

    def _to(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """`Tensor.to`: the tensor itself where nothing changes, else a copy."""
        named = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
        source = named["self"]
        other = named.get("other")
        device, dtype = (
            (other.device, other.dtype)
            if other is not None
            else (named.get("device"), named.get("dtype"))
        )
        device = source.device if device is None else self._full(device)
        dtype = source.dtype if dtype is None else dtype
        if device == source.device and dtype == source.dtype and not named.get("copy"):
            return source
        with self:
            return torch.ops.aten._to_copy.default(source, dtype=dtype, device=device)

    def _check(
        self,
        func: Any,
        here: list[DeviceTensor],
        tensors: list[Tensor],
        wanted: torch.device | None,
    ) -> None:
        """Operations that CUDA would refuse, and those that it would wait for."""
        name = func._schema.name.removeprefix("aten::")
        host = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
        if here and name not in MAY_MIX and any(tensor.dim() for tensor in host):
            shapes = [tuple(tensor.shape) for tensor in host]
            where = here[0].own_device
            raise RuntimeError(
                f"Expected all tensors to be on the same device: {name} got {shapes} on cpu "
                f"beside {where}"
            )
        devices = {tensor.own_device for tensor in here}
        if len(devices) > 1 and name not in ("copy_", "_to_copy"):
            raise RuntimeError(
                f"Expected all tensors to be on the same device: {name} got {devices}"
            )
        if name == "copy_" and not isinstance(tensors[0], DeviceTensor) and here:
            self._wait(f"{name} to cpu")
        elif name in MAY_MIX and (host or not here):
            # from pageable memory: the host waits until it has been read
            self._wait(f"{name} from cpu")
        elif name == "_to_copy" and wanted is not None and wanted.type == "cpu":
            self._wait("to cpu")
        elif name in WAITS:
            self._wait(name)

    def _wait(self, what: str, *, for_all: bool = False) -> None:
        """For what this thread asked the device for, or for all threads'."""
        recording = self._recording
        if recording is not None and (for_all or recording.thread == threading.get_ident()):
            recording.is_broken = True
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.syncs[what] += 1

    def _synchronize(self, device: Any = None) -> None:
        self._wait("synchronize", for_all=True)

    # ---------------------------------------------------------------- devices, streams, recordings

    def _full(self, device: Any) -> torch.device:
        """With its number: what names none means the thread's own."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return (
            torch.device("cuda", self._own.device)
            if device.type == "cuda" and device.index is None
            else device
        )

    @contextmanager
    def _on(self, device: Any) -> Iterator[None]:
        before = self._own.device
        self._own.device = before if device is None else self._full(device).index
        try:
            yield
        finally:
            self._own.device = before

    def _new_stream(self, device: Any = None) -> SimulatedStream:
        return SimulatedStream(self._full("cuda" if device is None else device), self._wait)

    def _current_stream(self, device: Any = None) -> SimulatedStream:
        device = self._full("cuda" if device is None else device)
        return self._own.streams.setdefault(device.index, self._new_stream(device))

    @contextmanager
    def _using(self, stream: SimulatedStream) -> Iterator[None]:
        """A thread that uses a stream is on that stream's device."""
        with self._on(stream.device):
            before = self._current_stream()
            self._own.streams[stream.device.index] = stream
            try:
                yield
            finally:
                self._own.streams[stream.device.index] = before

    def _is_recording(self, device: torch.device) -> bool:
        """Whether what this thread does on the device is recorded."""
        recording = self._recording
        if recording is None or recording.thread != threading.get_ident():
            return False
        return self._current_stream(device) is recording.stream

    @contextmanager
    def _graph(
        self,
        graph: SimulatedGraph,
        pool: object = None,
        stream: SimulatedStream | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        if stream is None:
            self._default_stream = stream = self._default_stream or self._new_stream()
        self._synchronize()
        if pool is not None and pool in self._broken_pools:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        used = self._own.streams
        device = stream.device.index
        before = self._current_stream(stream.device)
        used[device] = stream
        recording = self._recording = _Recording(graph, stream, threading.get_ident())
        self.graphs.append(graph)
        try:
            yield
        finally:
            self._recording = None
            if recording.is_broken:
                self._broken_pools.append(pool)
                raise RuntimeError("operation failed due to a previous error during capture")
            used[device] = before

    @staticmethod
    def _on_device(leaf: Any, here: list[DeviceTensor], device: torch.device) -> Any:
        """The result as a device tensor; an argument written in place is the same object again."""
        if not isinstance(leaf, Tensor):
            return leaf
        same = [tensor for tensor in here if tensor.inner is leaf]
        return same[0] if same else DeviceTensor(leaf, device)


def _on_host(tensor: DeviceTensor) -> Tensor:
    return torch.ops.aten._to_copy.default(tensor, device=torch.device("cpu"))


def _bare(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, DeviceTensor) else leaf
