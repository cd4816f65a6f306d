"""The served models: engines with their texts, and the state of the whole server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.admission import detokenizer_for
from outrider.engine.request import Request
from outrider.errors import ConfigError, did_you_mean
from outrider.grammar import Grammars
from outrider.serve.api.reasoning import Reasoning
from outrider.serve.api.reasoning_formats import AUTO
from outrider.serve.api.response_store import ResponseStore
from outrider.serve.api.texts import SharedTokenizer
from outrider.serve.headers import IgnoredLog
from outrider.serve.observability.metrics import ServerMetrics
from outrider.serve.observability.selftest import SelfTest
from outrider.serve.rules import Rule
from outrider.serve.schema.answers import ModelKind
from outrider.serve.serves import Serves
from outrider.serve.settings import ServerSettings
from outrider.text import Detokenizer

SMALL = 500_000_000  # parameters, below which a chat model is good for short, plain tasks only


@dataclass(frozen=True)
class Served:
    """One model."""

    engine: Serves
    texts: SharedTokenizer
    grammars: Grammars
    created: int  # seconds since 1970
    reasoning: Reasoning | None = None  # how it thinks; None: thoughts are not separated

    @classmethod
    def of(
        cls, engine: Serves, created: int, reasoning_parser: str = AUTO, *, spells: bool = False
    ) -> Served:
        """How a model is served. `spells`: special tokens in texts of clients are spelled as text.

        Raises ConfigError for a parser that does not fit the model, and for a tokenizer that cannot
        spell.
        """
        texts = SharedTokenizer(engine.tokenizer, engine.name, spells=spells)
        grammars = Grammars(
            texts.tokenizer, engine.vocab_size, engine.eos_token_ids, of_strangers=True
        )
        return cls(engine, texts, grammars, created, Reasoning.of(texts, reasoning_parser))

    def answer_text(self, request: Request) -> Detokenizer:
        """The text of a request's answer, at its beginning, as the engine releases it."""
        eos = frozenset() if request.params.ignore_eos else self.engine.eos_token_ids
        ends = eos.union(request.params.stop_token_ids)
        return detokenizer_for(self.texts.tokenizer, request.prompt, request.params, ends)

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def kind(self) -> ModelKind:
        """The kind of things it can be asked for, by which the playground chooses its examples."""
        if not self.texts.chat_template:
            return "text"
        if self.engine.is_demo:
            return "demo"
        return "small-chat" if self.engine.num_parameters < SMALL else "chat"

    @property
    def num_spec_tokens(self) -> int | None:
        """Draft tokens per step where that is a fixed number."""
        number = self.engine.config.get("num_draft_tokens")
        return number if isinstance(number, int) else None


@dataclass
class ServerState:
    """Shared by all endpoints. Changed by the event loop's thread only."""

    settings: ServerSettings
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    models: dict[str, Served] = field(default_factory=dict)
    # by model, of those that were made
    self_tests: dict[str, SelfTest] = field(default_factory=dict)
    loading: bool = True
    draining: bool = False
    ignored: IgnoredLog = field(init=False)
    responses: ResponseStore = field(init=False)

    def __post_init__(self) -> None:
        self.ignored = IgnoredLog(is_strict=self.settings.strict)
        self.responses = ResponseStore(self.settings.max_stored_responses)

    def serve(self, engines: Sequence[Serves], created: int) -> None:
        """Loaded: answer from now on. Raises ConfigError for a route that asks for a drafter its
        model does not have, for a reasoning parser that does not fit one, and for a tokenizer that
        cannot spell special tokens."""
        parsers = {model.name: model.reasoning_parser for model in self.settings.models}
        spells = self.settings.spell_special_tokens
        models = {
            engine.name: Served.of(engine, created, parsers.get(engine.name, AUTO), spells=spells)
            for engine in engines
        }
        for rule in self.settings.rules:
            _check_drafter(rule, models)
        self.models = models
        self.loading = False

    @property
    def names(self) -> list[str]:
        """The names that a client may ask for: models, and names that only routes know."""
        models = list(self.models)
        return models + list(
            dict.fromkeys(
                r.model
                for r in self.settings.rules
                if r.model is not None and r.model not in models
            )
        )

    def failures(self) -> dict[str, str]:
        """Model -> why its engine is dead."""
        snapshots = {name: served.engine.snapshot() for name, served in self.models.items()}
        return {
            name: snapshot.failed
            for name, snapshot in snapshots.items()
            if snapshot.failed is not None
        }

    def hung(self) -> dict[str, float]:
        """Model -> seconds since its engine's loop came round, where they are more than they may
        be."""
        limit = self.settings.hang_timeout_s
        ages = {name: served.engine.snapshot().turn_age_s for name, served in self.models.items()}
        return {name: age for name, age in ages.items() if 0 < limit < age}


def _check_drafter(rule: Rule, models: Mapping[str, Served]) -> None:
    targets = [rule.to or rule.model] if (rule.to or rule.model) else list(models)
    for name in targets:
        drafters = models[name].engine.drafters if name is not None else []
        if rule.drafter is not None and rule.drafter not in drafters:
            hint = did_you_mean(rule.drafter, drafters)
            raise ConfigError(
                f"a route drafts with '{rule.drafter}', which the model '{name}' has not "
                f"loaded.{hint}"
            )
