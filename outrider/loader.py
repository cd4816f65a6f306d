"""Loads the models of a decoder: config, tokenizer, weights, probes, then their runtime; keeps what
to tell the user of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from outrider import collector
from outrider.cache import cache_folder
from outrider.errors import CapabilityError, ConfigError, first_line
from outrider.models.card import ModelCard
from outrider.models.gguf.weights import gguf_notes
from outrider.models.graph_use import use_graphs
from outrider.models.lm import LM
from outrider.models.loaded import LoadedModel, ModelMemory, Tables
from outrider.models.loading.context import check_asked, configured_context, held_context
from outrider.models.loading.generation_config import asked_of, eos_token_ids
from outrider.models.loading.load import (
    build_lm,
    finish,
    load_config,
    load_module,
    load_tokenizer,
    resolve_dtype,
)
from outrider.models.loading.memory import (
    PACKED_COPIES,
    MemoryReport,
    estimate_memory,
    memory_report,
    model_memory,
)
from outrider.models.loading.older_code import slow_paths_held
from outrider.models.loading.read_card import card_of
from outrider.models.loading.unsupported import ignored_code
from outrider.models.quantised.checkpoint import quantisation_of
from outrider.models.quantised.load import quantised_note
from outrider.models.quantised.on_loading import quantise_linears, rounded_bytes
from outrider.models.quantised.scheme import scheme_of
from outrider.models.source import ModelSource
from outrider.models.stateful.lm import StateLM
from outrider.models.tokens.model_tokenizer import ModelTokenizer
from outrider.models.tokens.vocabulary import never_draft, tokens_of_one
from outrider.options import AUTO, EAGER, GRAPHS, NATIVE, Needs, Options
from outrider.runtime import checked, kept, library
from outrider.runtime.block_packing import pack
from outrider.runtime.first_start import FirstStart, first_start
from outrider.runtime.gpu.run import DeviceRun, device_states, use_device_run
from outrider.runtime.layers import layer_kernels, refuse_rounding
from outrider.runtime.limits import find_native_limits
from outrider.runtime.own_states import native_states
from outrider.runtime.run import use_native_run

log = logging.getLogger("outrider.models")


@dataclass(frozen=True, eq=False)
class ToLoad:
    """A model that is to be loaded."""

    source: ModelSource
    label: str  # what the user calls it
    is_target: bool = True
    quantise: int | None = None  # bits that its linear layers are rounded to


@dataclass
class _Reading:
    """The parts of a model that are read before its weights."""

    config: Any  # transformers'
    card: ModelCard
    tokenizer: Any
    dtype: torch.dtype
    lacking: dict[int, str]  # tokens that only one of a draft's tokenizer and the target's has
    notes: list[str]  # what the next start has to say, too


class ModelLoader:
    """Loads models one way, remembering what to tell the user."""

    def __init__(
        self,
        options: Options,
        needs: Needs,
        device: torch.device,
        status: Callable[[str], None],
        models: Sequence[ToLoad],
    ) -> None:
        """`models`: the target and its draft, or the draft alone where the target is elsewhere."""
        self.options = options
        self.needs = needs
        self.device = device
        self.status = status
        self.models = models
        self.notes: list[str] = []
        self._tokenizer: Any = None  # the target's, once it is loaded
        self._runtime = EAGER  # of the target
        self._kernels: DeviceRun | None = None  # of the model that was loaded last
        self._starts: dict[ToLoad, kept.Start | None] = {}  # that were looked for
        self._firsts: dict[ToLoad, FirstStart] = {}  # those of them that ship
        self._memories: dict[ToLoad, ModelMemory] = {}  # of models that were weighed
        self._refuse_elsewhere()

    def weigh(self) -> MemoryReport:
        """Memory needed against available, before any weight of a model is read. Raises
        CapabilityError when it cannot fit, CheckpointError when a head was not made for this
        target."""
        options = self.options
        target = self.models[0]
        before = None if self.needs.heads else self._weighed_before()
        if before is not None:
            context, memories, copies = before
            check_asked(options.max_model_len, context, target.label)
            return memory_report(
                memories,
                context,
                device=self.device,
                num_tokens=options.max_model_len,
                copies=copies,
            )
        configs = [load_config(model.source, options.trust_remote_code) for model in self.models]
        check_asked(options.max_model_len, configured_context(configs[0]), target.label)
        dtype = resolve_dtype(
            options.dtype, configs[0], self.device, rounded=target.quantise is not None
        )
        rounding = None
        if target.quantise is not None:
            method = "GGUF" if target.source.gguf is not None else quantisation_of(configs[0])
            refuse_rounding(target.label, method, self.device, dtype, options.dtype)
            rounding = rounded_bytes(configs[0], dtype, target.quantise)
        report = estimate_memory(
            [model.source for model in self.models],
            configs,
            heads=[kind.weigh_head(head, configs[0], dtype) for kind, head in self.needs.heads],
            dtype=dtype,
            device=self.device,
            num_tokens=options.max_model_len,
            packed=self.device.type == "cpu",
            rounding=rounding,
            called=[model.label for model in self.models],
        )
        weighed = [report.target, *([] if report.draft is None else [report.draft])]
        self._memories = dict(zip(self.models, weighed, strict=True))
        return report

    def _weighed_before(self) -> tuple[int, list[ModelMemory], float] | None:
        """What earlier starts kept: the target's context, the weight of each model, and how many
        times plain weights will be in memory. None where one of them is missing."""
        starts = [self._kept(model) for model in self.models]
        memories = [start.memory for start in starts if start is not None]
        if starts[0] is None or len(memories) < len(starts):
            return None
        memories = [
            replace(memory, name=model.label)
            for memory, model in zip(memories, self.models, strict=True)
        ]
        self._memories = dict(zip(self.models, memories, strict=True))
        copies = [
            start.copies(model.source)
            for start, model in zip(starts, self.models, strict=True)
            if start is not None
        ]
        as_first = self.needs.module or self.needs.tables
        return starts[0].card.context_length, memories, PACKED_COPIES if as_first else max(copies)

    def load(self, model: ToLoad, loop_vocab: int | None = None) -> LoadedModel:
        """Card, weights, runtime, check; or all of it as an earlier start kept it. `loop_vocab`:
        also a drafting loop over that vocabulary."""
        with slow_paths_held() as held:
            started = self._as_kept(model)
            if started is not None:
                return started
            # the module goes: the native runtime holds its own packed weights
            with collector.collected():
                reading = self._read(model)
                module = self._weights(model, reading)
                loaded, results = self._checked(model, reading, module)
                runtime = self._put_on_runtime(model, loaded, module, loop_vocab, results)
                self._finish(model, reading, module, loaded, runtime, results)
        if runtime != NATIVE:
            held.tell()
        return loaded

    def _read(self, model: ToLoad) -> _Reading:
        """Config, card and tokenizer."""
        trusts = self.options.trust_remote_code
        config = load_config(model.source, trusts)
        whole = load_tokenizer(model.source, trusts)
        tokenizer = ModelTokenizer.of(whole) or whole
        dtype = resolve_dtype(
            self.options.dtype, config, self.device, rounded=model.quantise is not None
        )
        self._say(model, str(dtype).removeprefix("torch."))
        return _Reading(
            config, card_of(config), tokenizer, dtype, self._lacking(model, tokenizer), []
        )

    def _weights(self, model: ToLoad, reading: _Reading) -> nn.Module:
        """transformers' module with the weights, changed as was asked for."""
        source = model.source
        label = model.label
        config = reading.config
        module = load_module(
            source, config, reading.dtype, self.device, self.options.trust_remote_code, pack
        )
        rounded = (
            None if model.quantise is None else quantise_linears(module, model.quantise, label)
        )
        if source.adapter is not None:
            reading.notes.append(source.adapter.note(label))
        reading.notes += ignored_code(config, module, self.options.trust_remote_code, label)
        reading.notes += self._limit(module, reading.lacking, label)
        if rounded is not None:
            reading.notes.append(rounded.note(label))
        return module

    def _weight_notes(self, model: ToLoad, config: Any, module: nn.Module) -> list[str]:
        """How weights that are stored in fewer bits run, on the kernels that the module has by now."""
        scheme = scheme_of(config, self.device)
        if model.source.gguf is not None:
            return gguf_notes(model.source.gguf, module, model.label)
        return [] if scheme is None else [quantised_note(module, scheme, model.label)]

    def _checked(
        self, model: ToLoad, reading: _Reading, module: nn.Module
    ) -> tuple[LoadedModel, checked.Checked | None]:
        """The model, its logits those of the plain module, and what an earlier start found when it
        checked that."""
        results = checked.find(self._checked_key(model, reading.card, reading.dtype))
        kernels = layer_kernels(self.device, reading.dtype)
        shape = None if results is None else results.shape
        with checked.one_thread(sum(parameter.numel() for parameter in module.parameters())):
            lm = build_lm(module, model.source.name, reading.dtype, self.device, shape, kernels)
        ends = eos_token_ids(module, reading.tokenizer, lm.shape.vocab_size)
        asked = asked_of(getattr(module, "generation_config", None))
        loaded = self._loaded(model, lm, reading.card, reading.tokenizer, ends, asked)
        loaded.config = reading.config
        return loaded, results

    def _finish(
        self,
        model: ToLoad,
        reading: _Reading,
        module: nn.Module,
        loaded: LoadedModel,
        runtime: str,
        results: checked.Checked | None,
    ) -> None:
        """The pass limits, and what the next start needs of this one."""
        lm = loaded.lm
        eager = runtime != NATIVE
        # tokens that are never drafted give the logits a bias, and with it another kernel
        changed = eager and reading.lacking
        key = (
            None if changed else self._checked_key(model, reading.card, reading.dtype, eager=eager)
        )
        if self._kernels is not None:
            lm.limits = self._kernels.find_limits(
                lm, self.options.max_num_seqs * (1 + self.needs.max_nodes)
            )
        elif eager:
            results = checked.find(key)
            kernels = layer_kernels(self.device, reading.dtype)
            finish(lm, module, kernels=kernels, limits=None if results is None else results.limits)
        if isinstance(lm, StateLM):
            reading.notes.append(lm.note(model.label))
        reading.notes += self._weight_notes(model, reading.config, module)
        self.notes += reading.notes
        if results is None:
            checked.keep(key, checked.Checked(lm.shape, lm.limits))
        if (
            runtime == NATIVE
            and not reading.lacking
            and reading.config.get_text_config() is reading.config
        ):
            memory = self._memories.get(model) or model_memory(
                model.source, reading.config, reading.dtype, self.device
            )
            facts = kept.Found(
                reading.card,
                reading.tokenizer,
                loaded.eos_token_ids,
                loaded.generation_config,
                reading.notes,
                memory,
            )
            with checked.one_thread(lm.shape.num_parameters):
                kept.keep(self._key(model), lm, module, model.source, facts)
        if not model.is_target:
            return
        self._tokenizer = reading.tokenizer
        self._runtime = runtime
        if self.needs.module:
            loaded.module = module
        if self.needs.tables or runtime != NATIVE:  # eagerly they are there anyway
            loaded.tables = Tables.of(module)

    def _as_kept(self, model: ToLoad) -> LoadedModel | None:
        """The model as an earlier start left it; None where there was none, or more of it is needed
        than was kept."""
        start = self._kept(model)
        key = self._key(model)
        if (
            start is None
            or key is None
            or (model.is_target and (self.needs.module or self.needs.tables))
        ):
            return None
        first = self._firsts.get(model)
        checked_key = self._checked_key(model, start.card, getattr(torch, start.dtype))
        results = checked.find(checked_key) if first is None else first.checked
        whole = partial(load_tokenizer, model.source, self.options.trust_remote_code)
        tokenizer = kept.started_tokenizer(start, whole) if first is None else first.tokenizer
        if results is None or self._lacking(model, tokenizer):
            return None
        self._say(model, start.dtype)
        try:
            lm = kept.started_lm(start, key, model.source, results)
        except ConfigError:  # the environment says something that is none
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, loading as the first time does without
            reason = f"{type(error).__name__}: {first_line(error)}"
            log.warning(
                "%s is loaded as the first time: what an earlier start kept cannot be read: %s",
                model.label,
                reason,
            )
            return None
        if lm is None:
            return None
        if first is not None:
            first.finish(lm, key, checked_key)
        self.notes += start.notes
        if model.is_target:
            self._tokenizer = tokenizer
            self._runtime = NATIVE
        return self._loaded(model, lm, start.card, tokenizer, frozenset(start.ends), start.asked)

    def _loaded(
        self,
        model: ToLoad,
        lm: LM,
        card: ModelCard,
        tokenizer: Any,
        ends: frozenset[int],
        asked: Any,
    ) -> LoadedModel:
        return LoadedModel(
            model.source.name,
            lm,
            card,
            tokenizer,
            ends,
            generation_config=asked,
            source=model.source,
            called=model.label,
        )

    def _kept(self, model: ToLoad) -> kept.Start | None:
        """The record that an earlier start kept of a model that is loaded in this way, or the one
        that ships."""
        if model not in self._starts:
            key = self._key(model)
            self._starts[model] = kept.find(key)
            if key is not None and self._starts[model] is None and self._may_ship(model):
                first = first_start(model.source, model.label)
                if first is not None:
                    self._firsts[model] = first
                    self._starts[model] = first.start
        return self._starts[model]

    def _may_ship(self, model: ToLoad) -> bool:
        """Whether a model is loaded in the way of the starts that ship, on our library."""
        needs_module = self.needs.module or self.needs.tables or model.quantise is not None
        in_bf16 = self.options.dtype in (AUTO, "bfloat16")
        return in_bf16 and not needs_module and library.why_missing() is None

    def _key(self, model: ToLoad) -> kept.Key | None:
        if self._may_differ() or self.options.runtime == EAGER:
            return None
        return kept.key_of(model.source, model.label, self.options.dtype, model.quantise)

    def _checked_key(
        self, model: ToLoad, card: ModelCard, dtype: torch.dtype, *, eager: bool = False
    ) -> str | None:
        if self._may_differ() or (self.options.runtime == EAGER and not eager):
            return None
        return checked.key_of(model.source, card.commit, dtype, model.quantise, eager=eager)

    def _say(self, model: ToLoad, dtype: str) -> None:
        bits = "" if model.quantise is None else f", rounded to {model.quantise} bits"
        self.status(f"loading {model.label} ({dtype}{bits}, {self.device})")

    def _lacking(self, model: ToLoad, tokenizer: Any) -> dict[int, str]:
        """Tokens that only one of a draft's tokenizer and the target's has; none where they differ
        in more than that."""
        if model.is_target or self._tokenizer is None or tokenizer is None:
            return {}
        return tokens_of_one(self._tokenizer, tokenizer) or {}

    def _limit(self, module: Any, lacking: dict[int, str], label: str) -> list[str]:
        """Keep a draft from tokens that its tokenizer or the target's lacks, and say so."""
        if not lacking or not hasattr(module.get_output_embeddings(), "bias"):
            return []
        never_draft(module, lacking)
        few = ", ".join(repr(text) for text in list(lacking.values())[:3]) + (
            ", ..." if len(lacking) > 3 else ""
        )
        return [
            f"the draft '{label}' and the target differ in {len(lacking)} tokens ({few}): these are never drafted"
        ]

    def _refuse_elsewhere(self) -> None:
        """Raises CapabilityError for a runtime that this device has not."""
        home = {NATIVE: "cpu", GRAPHS: "cuda"}.get(self.options.runtime, self.device.type)
        if home != self.device.type:
            where = "on a CPU" if home == "cpu" else "on a CUDA device"
            raise CapabilityError(
                f"runtime '{self.options.runtime}' runs {where}, and the device here is "
                f"{self.device}. Use --runtime auto "
                f"or --device {home}."
            )

    def _may_differ(self) -> bool:
        """Whether a model may differ from what its files state, or from what an earlier start has
        checked."""
        return self.options.trust_remote_code or self.device.type != "cpu"

    def _put_on_runtime(
        self,
        model: ToLoad,
        loaded: LoadedModel,
        module: nn.Module,
        loop_vocab: int | None,
        results: checked.Checked | None,
    ) -> str:
        """Run the model's passes, and its drafting loop, as was asked for; how they run now.

        'auto' falls back to eager passes, and a note says why. Raises CapabilityError where another
        runtime was insisted on."""
        self._kernels = None
        asked = self.options.runtime
        fast = NATIVE if self.device.type == "cpu" else GRAPHS
        if asked == EAGER:
            return EAGER
        if (
            isinstance(loaded.lm, StateLM)
            and (runtime := self._own_cache(loaded, loaded.lm, module)) is not None
        ):
            return runtime
        has_states = bool(loaded.lm.shape.states)
        try:
            if fast == NATIVE:
                use_native_run(loaded.lm, module, cache_folder(), is_checked=results is not None)
                with checked.one_thread(loaded.lm.shape.num_parameters):
                    loaded.lm.limits = (
                        find_native_limits(loaded.lm) if results is None else results.limits
                    )
            else:
                if not has_states:
                    self._use_own_kernels(loaded, module)
                use_graphs(
                    loaded,
                    module,
                    () if has_states else self.needs.loop_lengths,
                    None if has_states else loop_vocab,
                )
        except CapabilityError as error:
            label = model.label
            reason = str(error).rstrip(".")
            if asked != AUTO:
                raise CapabilityError(
                    f"{label} does not run on runtime '{asked}': {reason}. Use --runtime eager."
                ) from error
            self.notes.append(f"{label} runs eagerly, which is slower: {reason}")
            return EAGER
        return fast

    def _use_own_kernels(self, loaded: LoadedModel, module: nn.Module) -> None:
        """Run passes as few kernels; where the model cannot be lowered its own code runs, and a
        note says so."""
        try:
            self._kernels = use_device_run(loaded.lm, module)
        except CapabilityError as error:
            reason = str(error).rstrip(".")
            self.notes.append(
                f"{loaded.label} runs by its own code, which takes more and slower kernels: "
                f"{reason}"
            )

    def _own_cache(self, loaded: LoadedModel, lm: StateLM, module: nn.Module) -> str | None:
        """Move a model from transformers' cache to our runtime and states, where these know all of
        its layers; how it runs now.

        None: by kernels on a CUDA device, whose passes may be recorded yet. Raises CapabilityError
        where a runtime was insisted on that does not run it."""
        label = loaded.label
        asked = self.options.runtime
        try:
            if self.device.type == "cpu":
                states = native_states(lm, module, cache_folder())
                with checked.one_thread(lm.shape.num_parameters):
                    states.limits = find_native_limits(states)
                loaded.lm = states
                return NATIVE
            states = device_states(lm, module)
            assert isinstance(states.run, DeviceRun)
            loaded.lm = states
            self._kernels = states.run
            return None
        except CapabilityError as error:
            reason = str(error).rstrip(".")
        if asked not in (AUTO, EAGER):
            raise CapabilityError(
                f"{label} does not run on runtime '{asked}' ({reason}): {lm.why_own_cache}. Use "
                "--runtime eager."
            )
        lm.why_own_cache = f"{lm.why_own_cache}; our runtime does not run it: {reason}"
        return EAGER

    def context(self, target: LoadedModel) -> int:
        """Tokens a row may have, prompt and answer. Raises ConfigError where more were asked for
        than the target holds."""
        return held_context(
            self.options.max_model_len,
            target.lm.shape.context_length,
            target.card,
            target.label,
            self.notes,
        )

    def resolved(self, target: LoadedModel, context: int) -> Options:
        """The options with every "auto" of models and machine replaced by what was chosen."""
        return replace(
            self.options,
            dtype=str(target.lm.dtype).removeprefix("torch."),
            device=str(self.device),
            threads=torch.get_num_threads(),
            runtime=self._runtime,
            max_model_len=context,
        )
