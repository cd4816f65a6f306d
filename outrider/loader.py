"""Loads the models of a decoder: config, tokenizer, weights, probes, then the fast path; keeps what to tell the user of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from outrider.errors import CapabilityError
from outrider.models import native
from outrider.models.adapter import merged_note
from outrider.models.compile import cache_folder
from outrider.models.compiled import CompiledModel, why_uncompiled
from outrider.models.context import check_asked, held_context
from outrider.models.gguf.linear import block_layers
from outrider.models.gguf.names import gguf_in
from outrider.models.gguf.weights import gguf_notes
from outrider.models.graphs import use_graphs
from outrider.models.load import (
    LoadedModel,
    Tables,
    build_lm,
    eos_token_ids,
    finish,
    load_config,
    load_module,
    load_tokenizer,
    resolve_dtype,
)
from outrider.models.memory import MemoryReport, estimate_memory
from outrider.models.own_code import ignored_code
from outrider.models.vocabulary import never_draft, tokens_of_one
from outrider.models.workshop import Workshop
from outrider.options import NATIVE, Needs, Options, replaced
from outrider.runtime.limits import find_native_limits
from outrider.runtime.run import use_native_run


class ModelLoader:
    """Loads models one way, remembering what to tell the user."""

    def __init__(
        self, options: Options, needs: Needs, device: torch.device, status: Callable[[str], None],
        labels: dict[str | None, str],
    ) -> None:  # fmt: skip
        self.options, self.needs, self.device, self.status = options, needs, device, status
        self._labels: dict[str | None, str] = labels  # what the user called each model
        self.notes: list[str] = []
        self._tokenizer: Any = None  # the target's, once it is loaded
        self._compiled = device.type == "cpu" and options.compile != NATIVE
        self._native = False  # the target's passes run on the native runtime
        self._recorded = False  # CUDA graphs

    def _names(self) -> list[str]:
        return [name for name in (self.options.target, self.options.draft) if name is not None]

    def _config(self, name: str) -> Any:
        return load_config(name, self.options.trust_remote_code, self.options.revision if self._is_target(name) else None)

    def _is_target(self, name: str) -> bool:
        return name == self.options.target

    def weigh(self) -> MemoryReport:
        """Memory needed against available, before any weight of a model is read. Raises CapabilityError when it cannot fit,
        CheckpointError when a head was not made for this target."""
        configs = [self._config(name) for name in self._names()]
        check_asked(self.options.max_model_len, configs[0], self._labels[self.options.target])
        dtype = resolve_dtype(self.options.dtype, configs[0], self.device)
        heads = [kind.weigh_head(head, configs[0], dtype) for kind, head in self.needs.heads]
        return estimate_memory(
            self._names(), configs, heads=heads, dtype=dtype, device=self.device,
            num_rows=1, num_tokens=self.options.max_model_len, packed=self.device.type == "cpu",
        )  # fmt: skip

    def workshop(self) -> Workshop | None:
        """Keeper of the heads' compiled programs; None where the target, which must be loaded, runs uncompiled."""
        mode: Literal["on", "auto"] = "on" if self.options.compile == "on" else "auto"
        return Workshop(mode, self.status, self.notes) if self._compiled else None

    def load(self, name: str, loop_vocab: int | None = None) -> LoadedModel:
        """Config, tokenizer, weights, probes, fast path. `loop_vocab`: also a drafting loop over that vocabulary."""
        options = self.options
        revision = options.revision if self._is_target(name) else None
        config = self._config(name)
        tokenizer = load_tokenizer(name, options.trust_remote_code, revision)
        dtype = resolve_dtype(options.dtype, config, self.device)
        self.status(f"loading {self._labels[name]} ({str(dtype).removeprefix('torch.')}, {self.device})")
        module = load_module(name, config, dtype, self.device, options.trust_remote_code, revision)
        self.notes += merged_note(self._labels[name], name)
        self.notes += ignored_code(config, module, options.trust_remote_code, self._labels[name])
        is_whole = self._is_target(name) or self._limit(module, tokenizer, self._labels[name])
        lm = build_lm(module, name, dtype, self.device)
        generation_config = getattr(module, "generation_config", None)
        ends = eos_token_ids(module, tokenizer, lm.shape.vocab_size)
        loaded = LoadedModel(name, lm, config, tokenizer, ends, generation_config=generation_config)
        can_help = is_whole and not options.trust_remote_code
        compiled = not self._record(loaded, module, loop_vocab) and self._compile(loaded, module, loop_vocab, can_help)
        if not self._use_native(loaded, module):
            finish(lm, module, pack=not compiled)
        if (file := gguf_in(name)) is not None:
            self.notes += gguf_notes(file, module, self._labels[name])
        if self._is_target(name):
            self._tokenizer = tokenizer
        if self._is_target(name) and self.needs.module:
            loaded.module = module
        if self._is_target(name) and (self.needs.tables or not compiled):  # uncompiled they are there anyway
            loaded.tables = Tables.of(module)
        del module
        gc.collect()  # a compiled program holds its own packed weights
        return loaded

    def _limit(self, module: Any, tokenizer: Any, label: str) -> bool:
        """Keep a draft from tokens that its tokenizer or the target's lacks. False where it was changed."""
        if self._tokenizer is None or tokenizer is None or not (lacking := tokens_of_one(self._tokenizer, tokenizer)):
            return True
        if not hasattr(module.get_output_embeddings(), "bias"):
            return True
        never_draft(module, lacking)
        few = ", ".join(repr(text) for text in list(lacking.values())[:3]) + (", ..." if len(lacking) > 3 else "")
        self.notes.append(f"the draft '{label}' and the target differ in {len(lacking)} tokens ({few}): these are never drafted")
        return False

    def _compile(self, loaded: LoadedModel, module: nn.Module, loop_vocab: int | None, can_help: bool) -> bool:
        """Switch the model to its compiled programs when asked for (on) or already there (auto)."""
        self._compiled = self._compiled and self.options.compile != "off"
        if not self._compiled:
            return False
        if any(True for _ in block_layers(module)) and not native.is_supported(loaded.lm.device, loaded.lm.dtype):
            self._compiled = False  # a program would hold the weights widened
            if self.options.compile == "on":
                raise CapabilityError(
                    f"'{self._labels[loaded.name]}' has its weights in blocks, which compile in bfloat16 alone, on the native "
                    "kernels (AVX2 or AVX-512). Use --dtype bfloat16 or --compile off."
                )
            return False
        model = CompiledModel(loaded, module, self._is_target(loaded.name), self.needs.loop_lengths, loop_vocab, can_help)
        if model.missing():
            if self.options.compile == "auto":
                self._compiled = False
                self.notes.append(why_uncompiled(model.other_threads()))
                return False
            self.status(f"compiling {self._labels[loaded.name]}: once per model and machine, a minute or so")
        model.use()
        return True

    def _use_native(self, loaded: LoadedModel, module: nn.Module) -> bool:
        """Run the model's passes on the native runtime where that was asked for; whether they do. A note says why they do not."""
        if self.options.compile != NATIVE:
            return False
        try:
            use_native_run(loaded.lm, module, loaded.name, cache_folder())
        except CapabilityError as error:
            self.notes.append(f"{self._labels[loaded.name]} runs without the native runtime: {error}")
            return False
        loaded.lm.limits = find_native_limits(loaded.lm)
        self._native = self._native or self._is_target(loaded.name)
        return True

    def _record(self, loaded: LoadedModel, module: nn.Module, loop_vocab: int | None) -> bool:
        """Replay passes and the drafting loop as CUDA graphs where that is possible and wanted; whether it is done."""
        if self.device.type != "cuda" or self.options.compile in ("off", NATIVE):
            return False
        try:
            use_graphs(loaded, module, self.needs.loop_lengths, loop_vocab)
        except CapabilityError as error:
            if self.options.compile == "on":
                raise
            self.notes.append(f"running without CUDA graphs: {error}")
            return False
        self._recorded = True
        return True

    def context(self, target: LoadedModel) -> int:
        """Tokens a row may have, prompt and answer. Raises ConfigError where more were asked for than the target holds."""
        label = self._labels[target.name]
        return held_context(self.options.max_model_len, target.lm.shape.context_length, target.config, label, self.notes)

    def resolved(self, target: LoadedModel, context: int) -> Options:
        """The options with every "auto" of models and machine replaced by what was chosen."""
        return replaced(
            self.options,
            dtype=str(target.lm.dtype).removeprefix("torch."),
            device=str(self.device),
            threads=torch.get_num_threads(),
            compile=NATIVE if self._native else "on" if self._compiled or self._recorded else "off",
            max_model_len=context,
        )
