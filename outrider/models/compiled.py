"""The compiled programs of one model: where they are kept, which of them are missing, and the switch from its module to them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import nn

from outrider.models import compile as compiling
from outrider.models import native
from outrider.models.draft_loop import DraftLoop, compile_draft_loop
from outrider.models.huge_pages import advise_huge_pages
from outrider.models.load import LoadedModel, use_native
from outrider.models.probe import check_compiled, probe_logits
from outrider.models.program import CompiledPass, load_program


@dataclass(frozen=True)
class CompiledModel:
    """`signals`: hidden states that its passes must give. `loop_vocab`: it drafts, `loop_tokens` a call, over that vocabulary."""

    loaded: LoadedModel
    module: nn.Module
    signals: tuple[int, ...]
    loop_tokens: int
    loop_vocab: int | None

    def missing(self) -> list[Path]:
        """Files that must be made before it can be used."""
        files = (self._native_path, self._pass_path, self._loop_path)
        return [path for path in files if path is not None and not path.exists()]

    def use(self) -> None:
        """Make what is missing and run on it from now on. Raises CapabilityError when torch cannot compile the model, or when
        its programs do not reproduce its logits."""
        lm, module, missing = self.loaded.lm, self.module, self.missing()
        native_path, pass_path, loop_path = self._native_path, self._pass_path, self._loop_path
        expected = probe_logits(lm)
        if native_path is not None:
            use_native(lm, module, native_path)
        if pass_path in missing:
            compiling.compile_pass(lm, module, pass_path, self.signals)
        if loop_path is not None and self.loop_vocab is not None:
            if loop_path in missing:
                compile_draft_loop(lm, module, self.loop_tokens, self.loop_vocab, loop_path)
            self.loaded.draft_loop = DraftLoop(lm, load_program(loop_path), self.loop_tokens)
        lm.run = CompiledPass(load_program(pass_path), self.signals)
        advise_huge_pages()
        check_compiled(lm, self.loaded.name, expected)

    @cached_property
    def _native_path(self) -> Path | None:
        lm = self.loaded.lm
        return compiling.native_path() if native.is_supported(lm.device, lm.dtype) else None

    @cached_property
    def _pass_path(self) -> Path:  # its name holds a digest of the weights
        return compiling.package_path(self.loaded.lm, self.module, compiling.pass_purpose(self.signals))

    @cached_property
    def _loop_path(self) -> Path | None:
        if self.loop_vocab is None:
            return None
        return compiling.package_path(self.loaded.lm, self.module, f"draft{self.loop_tokens}")
