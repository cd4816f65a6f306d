"""Loads the models of a decoder: config, tokenizer, weights, probes, then their runtime; keeps what to tell the user of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from outrider import collector
from outrider.cache import cache_folder
from outrider.errors import CapabilityError, first_line
from outrider.models.gguf.names import gguf_in
from outrider.models.gguf.weights import gguf_notes
from outrider.models.graph_use import use_graphs
from outrider.models.loaded import LoadedModel, Tables
from outrider.models.loading import hub
from outrider.models.loading.adapter import merged_note
from outrider.models.loading.context import check_asked, configured_context, held_context
from outrider.models.loading.ends import eos_token_ids
from outrider.models.loading.generation_config import asked_of
from outrider.models.loading.load import build_lm, finish, load_config, load_module, load_tokenizer, resolve_dtype
from outrider.models.loading.memory import MemoryReport, estimate_memory, memory_report, model_memory
from outrider.models.loading.own_code import ignored_code
from outrider.models.loading.read_card import card_of
from outrider.models.loading.slow_paths import slow_paths_held
from outrider.models.model_memory import ModelMemory
from outrider.models.quantised.checkpoint import quantisation_of
from outrider.models.quantised.load import quantised_note
from outrider.models.quantised.on_loading import quantise_linears, rounded_bytes
from outrider.models.quantised.scheme import scheme_of
from outrider.models.stateful.lm import StateLM
from outrider.models.tokens.vocabulary import never_draft, tokens_of_one
from outrider.options import AUTO, EAGER, GRAPHS, NATIVE, Needs, Options, replaced
from outrider.runtime import checked, kept, library
from outrider.runtime.block_packing import pack
from outrider.runtime.gpu.run import DeviceRun, device_states, use_device_run
from outrider.runtime.layers import layer_kernels
from outrider.runtime.limits import find_native_limits
from outrider.runtime.own_states import native_states
from outrider.runtime.run import use_native_run

log = logging.getLogger("outrider.models")


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
        self._runtime = EAGER  # of the target
        self._kernels: DeviceRun | None = None  # of the model that was loaded last
        self._starts: dict[tuple[str, int | None], kept.Start | None] = {}  # that were looked for
        self._memories: dict[str, ModelMemory] = {}  # of models that were weighed
        self._folders: dict[str, str] = {}  # of models on the hub, in its cache
        self._refuse_elsewhere()

    def _names(self) -> list[str]:
        return [name for name in (self.options.target, self.options.draft) if name is not None]

    def _revision(self, name: str) -> str | None:
        return self.options.revision if self._is_target(name) else None

    def _kept(self, name: str, quantise: int | None) -> kept.Start | None:
        """What an earlier start kept of a model that is loaded in this way."""
        if (name, quantise) not in self._starts:
            self._starts[name, quantise] = kept.find(self._key(name, quantise))
        return self._starts[name, quantise]

    def _key(self, name: str, quantise: int | None) -> kept.Key | None:
        return None if self._may_differ() else kept.key_of(self._folder(name), self._labels[name], self.options.dtype, quantise)

    def _folder(self, name: str) -> str:
        """The folder with the files of a model on the hub, once they are here; of others the name."""
        if name not in self._folders:
            self._folders[name] = str(hub.snapshot_of(name, self._revision(name)) or name)
        return self._folders[name]

    def _is_target(self, name: str) -> bool:
        return name == self.options.target

    def weigh(self) -> MemoryReport:
        """Memory needed against available, before any weight of a model is read. Raises CapabilityError when it cannot fit,
        CheckpointError when a head was not made for this target."""
        options, labels = self.options, [self._labels[name] for name in self._names()]
        before = None if self.needs.heads else self._weighed_before()
        if before is not None:
            context, memories = before
            check_asked(options.max_model_len, context, labels[0])
            return memory_report(
                [replace(memory, name=label) for memory, label in zip(memories, labels, strict=True)], context,
                device=self.device, num_tokens=options.max_model_len, packed=self.device.type == "cpu",
            )  # fmt: skip
        configs = [load_config(name, options.trust_remote_code, self._revision(name)) for name in self._names()]
        check_asked(options.max_model_len, configured_context(configs[0]), labels[0])
        dtype = resolve_dtype(options.dtype, configs[0], self.device, rounded=options.quantise is not None)
        rounding = None
        if options.quantise is not None:
            self._refuse_rounding(configs[0], dtype)
            rounding = rounded_bytes(configs[0], dtype, options.quantise)
        report = estimate_memory(
            self._names(), configs, heads=[kind.weigh_head(head, configs[0], dtype) for kind, head in self.needs.heads],
            dtype=dtype, device=self.device, num_tokens=options.max_model_len, packed=self.device.type == "cpu",
            rounding=rounding, called=labels,
        )  # fmt: skip
        weighed = [report.target, *([] if report.draft is None else [report.draft])]
        self._memories = dict(zip(self._names(), weighed, strict=True))
        return report

    def _weighed_before(self) -> tuple[int, list[ModelMemory]] | None:
        """The target's context and what each model weighs, as earlier starts kept them; None where one of them is missing."""
        starts = [self._kept(name, self.options.quantise if self._is_target(name) else None) for name in self._names()]
        memories = [start.memory for start in starts if start is not None]
        if starts[0] is None or len(memories) < len(starts):
            return None
        self._memories = dict(zip(self._names(), memories, strict=True))
        return starts[0].card.context_length, memories

    def load(self, name: str, loop_vocab: int | None = None, *, quantise: int | None = None) -> LoadedModel:
        """Config, tokenizer, weights, probes, fast path. `loop_vocab`: also a drafting loop over that vocabulary; `quantise`:
        bits that its linear layers are rounded to."""
        with slow_paths_held() as held:
            if (started := self._as_kept(name, quantise)) is not None:
                return started
            with collector.collected():  # the module goes: the native runtime holds its own packed weights
                loaded, runtime = self._load(name, loop_vocab, quantise)
        if runtime != NATIVE:
            held.tell()
        return loaded

    def _load(self, name: str, loop_vocab: int | None, quantise: int | None) -> tuple[LoadedModel, str]:
        """The model, and the runtime that its passes are on."""
        options = self.options
        revision = self._revision(name)
        config = load_config(name, options.trust_remote_code, revision)
        tokenizer = load_tokenizer(name, options.trust_remote_code, revision)
        dtype = resolve_dtype(options.dtype, config, self.device, rounded=quantise is not None)
        self._say(name, str(dtype).removeprefix("torch."), quantise)
        module = load_module(name, config, dtype, self.device, options.trust_remote_code, revision, pack)
        num_notes = len(self.notes)
        rounded = None if quantise is None else quantise_linears(module, quantise, self._labels[name])
        self.notes += merged_note(self._labels[name], name)
        self.notes += ignored_code(config, module, options.trust_remote_code, self._labels[name])
        lacking = self._lacking(name, tokenizer)
        self._limit(module, lacking, self._labels[name])
        card = card_of(config)
        key = None if self._may_differ() else checked.key_of(self._folder(name), card.commit, dtype, quantise)
        known, kernels = checked.find(key), layer_kernels(self.device, dtype)
        with checked.one_thread(sum(parameter.numel() for parameter in module.parameters())):
            lm = build_lm(module, name, dtype, self.device, None if known is None else known.shape, kernels)
        asked = asked_of(getattr(module, "generation_config", None))
        ends = eos_token_ids(module, tokenizer, lm.shape.vocab_size)
        loaded = LoadedModel(
            name, lm, card, tokenizer, ends, config=config, generation_config=asked, revision=revision,
            called=self._labels[name],
        )  # fmt: skip
        runtime = self._put_on_runtime(loaded, module, loop_vocab, known)
        lm = loaded.lm
        if runtime == NATIVE and known is None:
            checked.keep(key, checked.Checked(lm.shape, lm.limits))
        if self._kernels is not None:
            lm.limits = self._kernels.find_limits(lm, options.max_num_seqs * (1 + self.needs.max_nodes))
        elif runtime != NATIVE:
            finish(lm, module, kernels=kernels)
        if isinstance(lm, StateLM):
            self.notes.append(lm.note(self._labels[name]))
        if (file := gguf_in(name)) is not None:
            self.notes += gguf_notes(file, module, self._labels[name])
        elif (scheme := scheme_of(config, self.device)) is not None:
            self.notes.append(quantised_note(module, scheme, self._labels[name]))
        if rounded is not None:
            self.notes.append(rounded.note(self._labels[name]))
        if runtime == NATIVE and not lacking and config.get_text_config() is config:
            memory = self._memories.get(name) or model_memory(name, config, dtype, self.device)
            found = kept.Found(card, tokenizer, ends, asked, self.notes[num_notes:], memory)
            with checked.one_thread(lm.shape.num_parameters):
                kept.keep(self._key(name, quantise), lm, module, self._folder(name), found)
        if self._is_target(name):
            self._tokenizer, self._runtime = tokenizer, runtime
        if self._is_target(name) and self.needs.module:
            loaded.module = module
        if self._is_target(name) and (self.needs.tables or runtime != NATIVE):  # eagerly they are there anyway
            loaded.tables = Tables.of(module)
        return loaded, runtime

    def _as_kept(self, name: str, quantise: int | None) -> LoadedModel | None:
        """The model as an earlier start left it; None where there was none, or more of it is needed than was kept."""
        start, key = self._kept(name, quantise), self._key(name, quantise)
        if start is None or key is None or (self._is_target(name) and (self.needs.module or self.needs.tables)):
            return None
        revision = self._revision(name)
        found = checked.find(checked.key_of(self._folder(name), start.card.commit, getattr(torch, start.dtype), quantise))
        tokenizer = kept.kept_tokenizer(start, partial(load_tokenizer, name, self.options.trust_remote_code, revision))
        if found is None or self._lacking(name, tokenizer):
            return None
        self._say(name, start.dtype, quantise)
        try:
            lm = kept.started_lm(start, key, self._folder(name), found)
        except Exception as error:  # noqa: BLE001  whatever it is, loading as the first time does without
            label, reason = self._labels[name], f"{type(error).__name__}: {first_line(error)}"
            log.warning("%s is loaded as the first time: what an earlier start kept cannot be read: %s", label, reason)
            return None
        if lm is None:
            return None
        self.notes += start.notes
        if self._is_target(name):
            self._tokenizer, self._runtime = tokenizer, NATIVE
        ends = frozenset(start.ends)
        return LoadedModel(
            name, lm, start.card, tokenizer, ends, generation_config=start.asked, revision=revision, called=self._labels[name]
        )

    def _say(self, name: str, dtype: str, quantise: int | None) -> None:
        bits = "" if quantise is None else f", rounded to {quantise} bits"
        self.status(f"loading {self._labels[name]} ({dtype}{bits}, {self.device})")

    def _lacking(self, name: str, tokenizer: Any) -> dict[int, str]:
        """Tokens that only one of a draft's tokenizer and the target's has; none where they differ in more than that."""
        if self._is_target(name) or self._tokenizer is None or tokenizer is None:
            return {}
        return tokens_of_one(self._tokenizer, tokenizer) or {}

    def _limit(self, module: Any, lacking: dict[int, str], label: str) -> None:
        """Keep a draft from tokens that its tokenizer or the target's lacks."""
        if not lacking or not hasattr(module.get_output_embeddings(), "bias"):
            return
        never_draft(module, lacking)
        few = ", ".join(repr(text) for text in list(lacking.values())[:3]) + (", ..." if len(lacking) > 3 else "")
        self.notes.append(f"the draft '{label}' and the target differ in {len(lacking)} tokens ({few}): these are never drafted")

    def _refuse_elsewhere(self) -> None:
        """Raises CapabilityError for a runtime that this device has not."""
        home = {NATIVE: "cpu", GRAPHS: "cuda"}.get(self.options.runtime, self.device.type)
        if home != self.device.type:
            where = "on a CPU" if home == "cpu" else "on a CUDA device"
            raise CapabilityError(
                f"runtime '{self.options.runtime}' runs {where}, and the device here is {self.device}. Use --set runtime=auto "
                f"or --device {home}."
            )

    def _refuse_rounding(self, config: Any, dtype: torch.dtype) -> None:
        """Raises CapabilityError where the target's weights cannot be rounded on loading, or no kernel multiplies them then."""
        if self.device.type != "cpu":
            raise CapabilityError(
                f"--set quantise rounds weights for the CPU's kernels, and the device here is {self.device}. Leave it out, or "
                "use --device cpu."
            )
        method = "GGUF" if gguf_in(self.options.target) is not None else quantisation_of(config)
        if method is not None:
            raise CapabilityError(
                f"'{self._labels[self.options.target]}' is quantised already ({method}). Leave --set quantise out, or give the "
                "checkpoint that it was made from."
            )
        if layer_kernels(self.device, dtype) is None:
            if dtype != torch.bfloat16 and self.options.dtype != AUTO:
                raise CapabilityError(
                    f"--set quantise multiplies in bfloat16, and --dtype {self.options.dtype} was asked for. Leave one out."
                )
            why = library.why_missing() or "they take a CPU with AVX2 or AVX-512"
            raise CapabilityError(f"--set quantise needs the native kernels, which do not serve here: {why}. Leave it out.")

    def _may_differ(self) -> bool:
        """Whether a model may differ from what its files state, or from what an earlier start has checked."""
        return self.options.trust_remote_code or self.device.type != "cpu" or self.options.runtime == EAGER

    def _put_on_runtime(
        self, loaded: LoadedModel, module: nn.Module, loop_vocab: int | None, known: checked.Checked | None
    ) -> str:
        """Run the model's passes, and its drafting loop, as was asked for; how they run now.

        'auto' falls back to eager passes, and a note says why. Raises CapabilityError where another runtime was insisted on."""
        self._kernels = None
        asked, fast = self.options.runtime, NATIVE if self.device.type == "cpu" else GRAPHS
        if asked == EAGER:
            return EAGER
        if isinstance(loaded.lm, StateLM) and (runtime := self._own_cache(loaded, loaded.lm, module)) is not None:
            return runtime
        has_states = bool(loaded.lm.shape.states)
        try:
            if fast == NATIVE:
                use_native_run(loaded.lm, module, cache_folder(), is_checked=known is not None)
                with checked.one_thread(loaded.lm.shape.num_parameters):
                    loaded.lm.limits = find_native_limits(loaded.lm) if known is None else known.limits
            else:
                if not has_states:
                    self._use_own_kernels(loaded, module)
                use_graphs(loaded, module, () if has_states else self.needs.loop_lengths, None if has_states else loop_vocab)
        except CapabilityError as error:
            label, reason = self._labels[loaded.name], str(error).rstrip(".")
            if asked != AUTO:
                raise CapabilityError(f"{label} does not run on runtime '{asked}': {reason}. Use --set runtime=eager.") from error
            self.notes.append(f"{label} runs eagerly, which is slower: {reason}")
            return EAGER
        return fast

    def _use_own_kernels(self, loaded: LoadedModel, module: nn.Module) -> None:
        """Run passes as few kernels; where the model cannot be lowered its own code runs, and a note says so."""
        try:
            self._kernels = use_device_run(loaded.lm, module)
        except CapabilityError as error:
            reason = str(error).rstrip(".")
            self.notes.append(f"{self._labels[loaded.name]} runs by its own code, which takes more and slower kernels: {reason}")

    def _own_cache(self, loaded: LoadedModel, lm: StateLM, module: nn.Module) -> str | None:
        """Move a model from transformers' cache to our runtime and states, where these know all of its layers; how it runs now.

        None: by kernels on a CUDA device, whose passes may be recorded yet. Raises CapabilityError where a runtime was insisted
        on that does not run it."""
        label, asked = self._labels[loaded.name], self.options.runtime
        try:
            if self.device.type == "cpu":
                made = native_states(lm, module, cache_folder())
                with checked.one_thread(lm.shape.num_parameters):
                    made.limits = find_native_limits(made)
                loaded.lm = made
                return NATIVE
            made = device_states(lm, module)
            assert isinstance(made.run, DeviceRun)
            loaded.lm, self._kernels = made, made.run
            return None
        except CapabilityError as error:
            reason = str(error).rstrip(".")
        if asked not in (AUTO, EAGER):
            raise CapabilityError(
                f"{label} does not run on runtime '{asked}' ({reason}): {lm.why_own_cache}. Use --set runtime=eager."
            )
        lm.why_own_cache = f"{lm.why_own_cache}; our runtime does not run it: {reason}"
        return EAGER

    def context(self, target: LoadedModel) -> int:
        """Tokens a row may have, prompt and answer. Raises ConfigError where more were asked for than the target holds."""
        label = self._labels[target.name]
        return held_context(self.options.max_model_len, target.lm.shape.context_length, target.card, label, self.notes)

    def resolved(self, target: LoadedModel, context: int) -> Options:
        """The options with every "auto" of models and machine replaced by what was chosen."""
        return replaced(
            self.options,
            dtype=str(target.lm.dtype).removeprefix("torch."),
            device=str(self.device),
            threads=torch.get_num_threads(),
            runtime=self._runtime,
            max_model_len=context,
        )
