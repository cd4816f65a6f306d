"""Continuous batching: requests join and leave between steps of the one `Decoder`.

    submit -> waiting -> [prompt read in chunks] -> batch: one `Decoder.step` for all rows -> Finish
                 ^                                     |
                 +--------- preempted, keys parked ----+

    engine.py     what other threads see: requests and cancellations go in, `Update`s come out
    mailbox.py    where they meet the engine's thread: who is alive, what is to be done
    loop.py       that thread, which alone touches models, caches and rows: turn after turn
    scheduler.py  where requests stand, and how they move as memory allows

A request's text does not depend on what runs alongside it: rows do not know their neighbours
(`Decoder`), a preempted row comes back with the keys it left with, and a seeded sampled row is
drafter-invariant unless it asked not to be, so that a load-aware draft length cannot show. A
request that breaks a step is found and ended alone (`Batch.step`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from outrider.admission import bad_words, new_row, resume
from outrider.build import DEMO, Built, Needs, Options, choose, load_models, named_drafter
from outrider.engine.drafter_pool import DrafterPool, lossy_verifier
from outrider.engine.loop import EngineLoop
from outrider.engine.mailbox import Mailbox
from outrider.engine.observer import EngineSnapshot, Observer
from outrider.engine.request import ActiveRequest, EngineSettings, Listener, Request
from outrider.engine.scheduler import Scheduler
from outrider.engine.warmup import calibrate, facts_of
from outrider.errors import (
    CapabilityError,
    ConfigError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from outrider.kv.cache import BLOCK
from outrider.models.loading.generation_config import (
    SamplingDefaults,
    checked_choice,
    sampling_defaults,
)
from outrider.models.source import resolve
from outrider.parts import Parts, choose_parts
from outrider.runtime import checked
from outrider.sampling.params import SamplingParams


class Engine:
    """Continuous batching, as other threads see it. `make_engine` builds one from options."""

    def __init__(
        self,
        name: str,
        drafter_pool: DrafterPool,
        settings: EngineSettings,
        observer: Observer | None = None,
        sampling_defaults: SamplingDefaults | None = None,
    ) -> None:
        self.name = name
        # of requests that leave their sampling open
        self.sampling_defaults = sampling_defaults or SamplingDefaults()
        self._drafter_pool = drafter_pool
        self._settings = settings
        observer = observer or Observer()
        self._mailbox = Mailbox()
        self._scheduler = Scheduler(drafter_pool, settings, observer, self._mailbox.heartbeat)
        self._batch = self._scheduler.batch
        self._loop = EngineLoop(self._mailbox, self._scheduler, observer)
        self._arrivals = 0
        self._thread: threading.Thread | None = None

    @property
    def tokenizer(self) -> Any:
        return self._batch.built.target.tokenizer

    @property
    def context(self) -> int:
        """Tokens a request may hold, prompt and answer: the model's limit, or what there is memory
        for."""
        return min(self._batch.built.context, self._scheduler.longest)

    @property
    def vocab_size(self) -> int:
        return self._batch.built.target.lm.shape.vocab_size

    @property
    def num_parameters(self) -> int:
        """Weights of the target."""
        return self._batch.built.target.lm.shape.num_parameters

    @property
    def is_demo(self) -> bool:
        """Whether the target is the embedded one."""
        return self._batch.built.is_demo

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._batch.built.target.eos_token_ids

    @property
    def built(self) -> Built:
        """Models and parts, for those who look at them before the engine starts."""
        return self._batch.built

    @property
    def settings(self) -> EngineSettings:
        return self._settings

    @property
    def drafters(self) -> list[str]:
        """Names that `Speculation.drafter` may hold; the first is used where a request names
        none."""
        return self._drafter_pool.names

    @property
    def config(self) -> dict[str, Any]:
        return self._batch.built.config()

    @property
    def notes(self) -> list[str]:
        return [*self._batch.built.notes, *self.sampling_defaults.notes]

    @property
    def facts(self) -> dict[str, Any] | None:
        """All that decides how well and how fast it drafts, files of weights included; None where
        that may change unseen."""
        built = self._batch.built
        parts = list(self._drafter_pool.parts.values())
        models = [model for model in (built.target, built.draft) if model is not None]
        keys = [
            None
            if model.source is None
            else checked.key_of(model.source, model.card.commit, model.lm.dtype)
            for model in models
        ]
        if None in keys or not all(part.drafter.keeps_costs for part in parts):
            return None
        folders = [
            part.requirements.head_folder
            for part in parts
            if part.requirements.head_folder is not None
        ]
        heads = [checked.files_of(resolve(folder)) for folder in folders]
        steps = [facts_of(built.options, built.target, built.draft, part) for part in parts]
        return {
            "models": keys,
            "heads": heads,
            "steps": steps,
            "context": self.context,
            "settings": repr(self._settings),
        }

    @property
    def lossless(self) -> bool:
        """Whether requests that ask for nothing else keep the target's distribution."""
        return self._batch.built.promises(self._batch.decoder.verifier)

    def calibrate(self, status: Callable[[str], None] = lambda line: None) -> None:
        """Time steps of many kinds for a load-aware control, before `start`; a few seconds."""
        assert self._thread is None, "before the engine starts"
        rows = min(
            self._settings.max_num_seqs, max(1, self._scheduler.kv_budget.positions // BLOCK // 2)
        )
        calibrate(self._batch, self._drafter_pool, rows, status)

    def start(self) -> None:
        """Begin to work."""
        assert self._thread is None, "an engine starts once"
        self._thread = threading.Thread(
            target=self._loop.run, name=f"engine-{self.name}", daemon=True
        )
        self._thread.start()

    def check_room(self, count: int) -> None:
        """To be asked before this many requests are made that belong together. Raises RequestError
        for more than may ever wait, QueueFullError for more than may wait alongside those that do."""
        limit = self._settings.max_queue
        waiting = self._num_waiting()
        ran_s = self._loop.ran_s
        if count > limit:
            raise RequestError(
                f"{count} answers are asked for at once, and at most {limit} requests may wait "
                "here (--max-queue): "
                "ask for fewer, or in several requests"
            )
        if waiting + count > limit:
            seconds = sum(ran_s) / len(ran_s) * (waiting + count) / self._settings.max_num_seqs
            raise QueueFullError(
                f"{waiting} requests are waiting of {limit} that may, too many for {count} more; "
                "try again later",
                min(max(seconds, 1), 60),
            )

    def prepare(self, params: SamplingParams) -> None:
        """Find the tokens of bad words, which may take seconds, so that `submit` need not: from any
        thread.

        Raises ConfigError for words that this model's vocabulary cannot write.
        """
        bad_words(self._batch.built, params)

    def verifier_of(self, request: Request) -> str:
        """The name of the rule that verifies a request's drafts. Raises ConfigError or
        CapabilityError as `submit` does."""
        _, verifier = self._drafter_pool.rules_of(request)
        return (verifier or self._batch.decoder.verifier).name

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request. Raises RequestError, ConfigError or CapabilityError for one that cannot
        be honoured, QueueFullError when too many wait, UnavailableError when the engine ends; then
        `listener` is never called."""
        drafter, verifier = self._drafter_pool.rules_of(request)
        row = new_row(
            self._batch.built,
            0,
            request.prompt,
            request.params,
            with_text=True,
            context=self.context,
            constraint=request.constraint,
        )
        resume(row, request.committed, self.vocab_size)
        row.verifier = verifier
        self._drafter_pool.instruct(row, request, self.context)
        rule = verifier or self._batch.decoder.verifier
        reproducible = self._drafter_pool.is_reproducible(request, rule)
        with self._mailbox.lock:
            self._refuse(request)
            self._arrivals += 1
            row.request = self._arrivals
            active = ActiveRequest(
                request,
                listener,
                row,
                self._arrivals,
                drafter,
                self._batch.built.promises(rule),
                reproducible,
                shown=len(request.committed),
            )
            self._mailbox.enter(active)
            self._mailbox.put(lambda: self._loop.enqueue(active))

    def cancel(self, request_id: str) -> None:
        """End a request as "abort". Unknown or finished ones are left alone."""
        with self._mailbox.lock:
            active = self._mailbox.find(request_id)
            if active is not None:
                self._mailbox.put(lambda: self._loop.abort(active))

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what runs; False when time is up before that."""
        return self._mailbox.drain(timeout_s)

    def stop(self) -> None:
        """End everything that is alive as "abort", and the thread. What drafters learned is saved."""
        self._mailbox.stop()
        if self._thread is not None:
            self._thread.join()
        self._batch.decoder.drafter.close()

    def snapshot(self) -> EngineSnapshot:
        """The engine as it is now. Numbers may be one step old."""
        mailbox = self._mailbox
        scheduler = self._scheduler
        pool = self._scheduler.pool
        return EngineSnapshot(
            running=len(self._batch),
            waiting=self._num_waiting(),
            prefilling=len(scheduler.prefiller),
            kv_tokens=scheduler.kv_budget.used,
            kv_capacity=scheduler.kv_budget.positions,
            prefix_pages=pool.used,
            prefix_capacity=pool.num_pages,
            prefix_queries=pool.queries,
            prefix_hits=pool.hits,
            preemptions=scheduler.preemptions,
            steps=self._loop.steps,
            draining=mailbox.draining or mailbox.stopping,
            failed=mailbox.failed,
            turn_age_s=mailbox.heartbeat.age_s,
            control=self._loop.control,
            drafter=self._batch.decoder.drafter.counters,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when an idle engine holds anything: rows, prompts, pages that are
        nobody's."""
        assert not len(self._mailbox), f"{len(self._mailbox)} requests are alive: not idle"
        self._scheduler.check_integrity()

    def _refuse(self, request: Request) -> None:
        if self._mailbox.is_closed:
            raise UnavailableError(
                f"'{self.name}' takes no new requests: "
                f"{self._mailbox.failed or 'it is shutting down'}"
            )
        if self._mailbox.find(request.id) is not None:
            raise RequestError(
                f"a request with id '{request.id}' is running already; ids must be unique"
            )
        self.check_room(1)

    def _num_waiting(self) -> int:
        return max(0, len(self._mailbox) - self._scheduler.num_started)


def make_engine(
    options: Options,
    settings: EngineSettings | None = None,
    *,
    extra_drafters: Sequence[str] = (),
    allow_lossy: Sequence[str] = (),
    observer: Observer | None = None,
    name: str | None = None,
    generation_config: str = "auto",
    status: Callable[[str], None] = lambda line: None,
) -> Engine:
    """Load models and parts, and time steps where the draft length is chosen by load.

    `extra_drafters`: more that requests may name; `allow_lossy`: lossy verifiers they may ask for;
    `generation_config`: where sampling defaults come from.

    Raises what `outrider.build.build` raises.
    """
    settings = settings or EngineSettings()
    checked_choice(generation_config)
    options = replace(options, max_num_seqs=settings.max_num_seqs)
    options, main = choose(options)
    parts = {main.drafter_name: main}
    for extra in extra_drafters:
        drafter = named_drafter(
            replace(options, drafter=extra, drafter_options={}, draft=None), None
        ).drafter_options
        parts.setdefault(extra, choose_parts(extra, drafter, "auto", {}, None, lossy=False))
    _check_drafters(options, parts, allow_lossy)
    # alone it may have a longer loop
    needs = Needs.of(main) if len(parts) == 1 else Needs.of_all(list(parts.values()))
    models = load_models(options, needs, status)
    drafter_pool = DrafterPool(models, parts, allow_lossy)
    defaults = sampling_defaults(generation_config, models.target, models.context)
    engine = Engine(name or options.target, drafter_pool, settings, observer, defaults)
    engine.calibrate(status)
    return engine


def _check_drafters(
    options: Options, parts: Mapping[str, Parts], allow_lossy: Sequence[str]
) -> None:
    """Refuse, before any model is read, settings that cannot work. `parts`: the server's own
    drafter first. Raises ConfigError for a drafter that lacks an option only the first one can be
    given, CapabilityError where the verifier that was asked for does not take all."""
    for name in allow_lossy:
        lossy_verifier(name)
    (first, main), *others = parts.items()
    for name, part in others:
        lacks_draft = part.requirements.draft and options.draft is None and options.target != DEMO
        lacks_head = part.requirements.head and not (
            part.requirements.head_in_target or part.requirements.head_folder
        )
        if lacks_head or lacks_draft:
            what = "a draft model" if lacks_draft else "a trained head"
            raise ConfigError(
                f"extra drafter '{name}' needs {what}, which only a server's first drafter can be "
                "given: "
                f"--drafter {name} --draft FOLDER, with '{first}' as the extra one"
            )
        if part.requirements.trees and main.verifier.shape != "tree" and options.verifier != "auto":
            raise CapabilityError(
                f"verifier '{options.verifier}' takes chains, but extra drafter '{name}' drafts "
                "trees: leave one of them out"
            )
