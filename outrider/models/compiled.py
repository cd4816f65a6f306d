"""The compiled programs of one model: where they are kept, which of them are missing, and the switch from its module to them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.models import compile as compiling
from outrider.models import native
from outrider.models.draft_loop import DraftLoop, compile_draft_loop
from outrider.models.helper import Helper, Job, share
from outrider.models.huge_pages import advise_huge_pages
from outrider.models.load import LoadedModel, use_native
from outrider.models.probe import check_compiled, find_signals, probe_logits
from outrider.models.program import CompiledPass, load_program

MAX_UNROLLED_PARAMETERS = 16_000_000  # above, a further call costs less than a twentieth of a token


def loop_programs(lengths: tuple[int, ...], num_parameters: int) -> tuple[int, ...]:
    """Which of these programs a draft model of so many parameters gets: a large one that of a single token alone, because each
    stores all weights anew and takes the longer to compile the longer it is."""
    return lengths if num_parameters <= MAX_UNROLLED_PARAMETERS or not lengths else (1,)


def why_uncompiled(other_threads: list[int]) -> str:
    """A note for a model whose programs are missing here; `other_threads`: numbers of threads for which there are some."""
    reason = compiling.cannot_compile()
    if other_threads:
        here, made = torch.get_num_threads(), " and ".join(map(str, other_threads))
        remedy = f"--threads {other_threads[-1]} uses them" + ("" if reason else f", --compile on makes some for {here}, once")
        threads = "thread" if other_threads == [1] else "threads"
        return f"running uncompiled: the compiled programs are for {made} {threads}, and this run has {here} ({remedy})"
    if reason is not None:
        return f"running uncompiled, which is slower: {reason}"
    return "running uncompiled; --compile on is faster (compiles once per model, a minute or two)"


@dataclass(frozen=True)
class CompiledModel:
    """One model and the programs that it runs on.

    `gives_hidden`: its pass gives all hidden states beside the logits. A target's always does, whichever drafter runs: a program
    without them fuses other operations and rounds differently, so greedy text would depend on the drafter.
    `loop_vocab`: it drafts over that vocabulary, in calls that make `loop_lengths` tokens. `can_help`: another process can load
    the same model by its name.
    """

    loaded: LoadedModel
    module: nn.Module
    gives_hidden: bool
    loop_lengths: tuple[int, ...]
    loop_vocab: int | None
    can_help: bool = False

    def missing(self) -> list[Path]:
        """Files that must be made before it can be used."""
        files = (self._native_path, self._pass_path, *self._loop_paths.values())
        return [path for path in files if path is not None and not path.exists()]

    def other_threads(self) -> list[int]:
        """Numbers of threads for which its pass was compiled, where that is not the number of this process."""
        others = set(range(1, compiling.MAX_THREADS + 1)) - {torch.get_num_threads()}
        return [count for count in sorted(others) if self._pass_files(count).exists()]

    def use(self) -> None:
        """Make what is missing and run on it from now on. Raises CapabilityError when torch cannot compile the model, or when
        its programs do not reproduce its logits."""
        lm, expected = self.loaded.lm, probe_logits(self.loaded.lm)
        self._make()
        shared = self._weights() if lm.native and self.loop_vocab is not None else {}
        if self.loop_vocab is not None:
            programs = {length: load_program(path, shared) for length, path in self._loop_paths.items()}
            self.loaded.draft_loop = DraftLoop(lm, programs)
        lm.run = CompiledPass(load_program(self._pass_path, shared), self._signals)
        advise_huge_pages()
        check_compiled(lm, self.loaded.name, expected)

    def make_loops(self, but: Collection[int] = ()) -> None:
        """Make the drafting programs that are missing, but for those of these lengths."""
        missing = [length for length, path in self._loop_paths.items() if not path.exists()]
        self._use_native()
        for length in missing:
            if length not in but and self.loop_vocab is not None:
                compile_draft_loop(self.loaded.lm, self.module, length, self.loop_vocab, self._loop_paths[length])

    def _make(self) -> None:
        """What is missing, with a helper where several programs are."""
        missing, lm = self.missing(), self.loaded.lm
        self._use_native()
        theirs = share([n for n, path in self._loop_paths.items() if path in missing]) if self.can_help else ()
        helper = Helper(self._job(theirs)) if theirs else None
        try:
            if self._pass_path in missing:
                compiling.compile_pass(lm, self.module, self._pass_path, self._signals)
            self.make_loops(but=theirs)
            if helper is not None:
                helper.wait()
        finally:
            if helper is not None:
                helper.stop()
        self.make_loops()

    def _job(self, lengths: tuple[int, ...]) -> Job:
        assert self.loop_vocab is not None
        dtype = str(self.loaded.lm.dtype).removeprefix("torch.")
        return Job(self.loaded.name, dtype, torch.get_num_threads(), self.loop_vocab, lengths)

    def _use_native(self) -> None:
        """Its files are named after the weights as they were loaded, so they must be known before."""
        if self._native_path is not None and not self.loaded.lm.native:
            use_native(self.loaded.lm, self.module, self._native_path)

    def _weights(self) -> dict[str, Tensor]:
        """The module's own tensors, as its programs name them."""
        named = chain(self.module.named_parameters(), self.module.named_buffers())
        return {f"module.{name}": tensor.detach() for name, tensor in named}

    @cached_property
    def _native_path(self) -> Path | None:
        lm = self.loaded.lm
        return compiling.native_path() if native.is_supported(lm.device, lm.dtype) else None

    @cached_property
    def _signals(self) -> tuple[int, ...]:
        return find_signals(self.loaded.lm) if self.gives_hidden else ()

    @cached_property
    def _pass_path(self) -> Path:  # its name holds a digest of the weights
        return self._pass_files(torch.get_num_threads())

    @cached_property
    def _pass_files(self) -> Callable[[int], Path]:
        return compiling.package_files(self.loaded.lm, self.module, "pass-hidden" if self._signals else "pass")

    @cached_property
    def _loop_paths(self) -> dict[int, Path]:
        lengths = () if self.loop_vocab is None else loop_programs(self.loop_lengths, self.loaded.lm.shape.num_parameters)
        return {length: compiling.package_path(self.loaded.lm, self.module, f"draft{length}") for length in lengths}
