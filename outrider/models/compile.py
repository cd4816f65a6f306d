"""The same module as one compiled program: torch.export, then AOTInductor, kept on disk.

Eager PyTorch spends 4-5 microseconds of Python and dispatch on each of a model's hundreds of small operations: more than
the arithmetic itself for a small draft. The compiled program fuses them, packs the weights for oneDNN ("freezing"),
joins projections that read the same input, and is entered once per pass. It is made once per model and machine (tens of
seconds, C++ compiler needed), stored as one file, and loaded in well under a second afterwards. Rows, tokens, cache size
and key range stay symbolic, so one program serves every pass.

Where the native kernels serve (`native/`, bf16 on AVX-512 or AVX2), the program calls those for linears and attention.

The eager module remains the reference: `tests/unit/models/test_compile.py` compares them, and `pass_limits.find_pass_limits`
measures row invariance on the compiled program just as on the eager one. Both never run in the same decode.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from outrider import cache
from outrider.errors import CapabilityError
from outrider.models import native
from outrider.models.lm import LM
from outrider.models.ops import C_SHIMS

MAX_COMPILED_BYTES = 2 << 30  # a package embeds a packed copy of the weights; beyond this `auto` stays eager
# How inductor compiles: weights packed for oneDNN and projections of one input joined (neither touches native linears).
OPTIONS = {"freezing": True, "cpp.enable_concat_linear": True, "aot_inductor.custom_ops_to_c_shims": C_SHIMS}
ONE_THREAD = {"cpp.threads": 1}  # for programs whose kernels are shorter than a fork and join
MAX_THREADS = 256  # numbers of threads for which programs are looked for
MAX_CACHE_BYTES = 8 << 30  # least recently used packages are dropped beyond this
# Files whose code is compiled in, seen from this folder.
MODEL_SOURCES = (
    "attention.py", "compile.py", "draft_loop.py", "layout.py", "lm.py", "ops.py", "panel.py", "picking.py", "signals.py",
    "vocabulary.py", "gguf/linear.py", "gguf/formats.py", "../sampling/draft_filters.py",
)  # fmt: skip
HEAD_SOURCES = ("workshop.py", "quantised_linear.py", "truncate.py")  # of the programs of `workshop.py`, beside heads/


def cannot_compile() -> str | None:
    """None when compilation works here, else the reason in a few words."""
    if native.compiler() is None:
        return "no C++ compiler found (install g++)"
    return None


def cache_folder() -> Path:
    """Where compiled programs live."""
    return cache.cache_folder() / "compiled"


def package_path(lm: LM, module: Any, purpose: str = "pass") -> Path:
    """The file of a program of this model. Any change of weights, code, versions or threads is another file."""
    return package_files(lm, module, purpose)(torch.get_num_threads())


def package_files(lm: LM, module: Any, purpose: str) -> Callable[[int], Path]:
    """The file of a program of this model for each number of threads. Reads the weights once for all."""
    facts = (lm.dtype, lm.device, module.config.to_json_string(), _source_fingerprint(MODEL_SOURCES))
    return _stored(f"{module.config.model_type}-{purpose}", facts, module.state_dict())


def program_path(purpose: str, facts: tuple[object, ...], tensors: Mapping[str, Tensor]) -> Path:
    """The file of a program of a head, or of another part with these weights. The code of all such parts counts for each."""
    return _stored(purpose, (*facts, fingerprint()), tensors)(torch.get_num_threads())


def fingerprint() -> str:
    """Changes whenever the code that is compiled into any program does."""
    heads = (f"heads/{source.name}" for source in sorted((Path(__file__).parent / "heads").glob("*.py")))
    return _source_fingerprint((*MODEL_SOURCES, *HEAD_SOURCES, *heads))


def _stored(stem: str, facts: tuple[object, ...], tensors: Mapping[str, Tensor]) -> Callable[[int], Path]:
    """The file of a program for each number of threads."""
    digest = hashlib.blake2b(digest_size=12)
    here = (torch.__version__, transformers.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability())
    digest.update(repr((stem, here, facts)).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)

    def file(num_threads: int) -> Path:
        complete = digest.copy()
        complete.update(f"{num_threads} threads".encode())
        return cache_folder() / f"{stem}-{complete.hexdigest()}.pt2"

    return file


def compile_program(
    program: nn.Module, inputs: tuple, dynamic: tuple, path: Path, options: dict[str, Any] | None = None
) -> None:
    """Export, compile (`options` on top of `OPTIONS`), store. Raises CapabilityError naming the cause when that is impossible."""
    if (reason := cannot_compile()) is not None:
        raise CapabilityError(f"cannot compile: {reason}. Use --runtime eager.")
    from torch._inductor.cpu_vec_isa import pick_vec_isa  # seconds, and only who compiles needs it
    from torch._inductor.utils import fresh_cache

    path.parent.mkdir(parents=True, exist_ok=True)
    pick_vec_isa()  # tries the compiler, ten seconds, and keeps what it found: not in the fresh cache below
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch, torch.no_grad(), _quiet():
        try:
            exported = torch.export.export(program, inputs, dynamic_shapes=dynamic, strict=False)
            # what inductor would leave in the temporary folder, some hundred megabytes a model, is never looked at again
            with fresh_cache(dir=scratch), torch._inductor.config.patch(OPTIONS | (options or {})):
                made = torch._inductor.aoti_compile_and_package(exported, package_path=f"{scratch}/program.pt2")
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CapabilityError(f"torch could not compile this model ({first}). Use --runtime eager.") from error
        os.replace(made, path)  # atomic: a reader sees the whole file or none
    drop_old(path.parent)


def drop_old(folder: Path, limit_bytes: int = MAX_CACHE_BYTES) -> None:
    """Delete the least recently used programs until the folder is within its limit."""
    files = sorted(folder.glob("*.pt2"), key=lambda f: f.stat().st_mtime)
    total = sum(f.stat().st_size for f in files)
    while total > limit_bytes and len(files) > 1:
        oldest = files.pop(0)
        total -= oldest.stat().st_size
        oldest.unlink(missing_ok=True)


def _source_fingerprint(names: tuple[str, ...]) -> str:
    """Changes whenever the code that is compiled in does."""
    here = Path(__file__).parent
    content = b"".join((here / name).read_bytes() for name in names) + native.fingerprint(of_programs=True).encode()
    return hashlib.blake2b(content).hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.export warns about things that are none of the user's business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
