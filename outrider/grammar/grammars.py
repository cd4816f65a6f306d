"""Grammars over one model's vocabulary: from a `Spec` to the constraint of one row, or to an error
that names the path."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from functools import cache
from importlib.metadata import version
from typing import Any

from outrider.errors import CapabilityError, RequestError
from outrider.grammar.compiled import Compiled
from outrider.grammar.limits import COMPILE_S, MAX_CHARACTERS, MAX_KEPT, MAX_KEPT_CHARACTERS, PARSER
from outrider.grammar.matcher import Matcher
from outrider.grammar.numbers import refuse_inexact, schemas_in
from outrider.grammar.specs import Spec
from outrider.grammar.trial import Trial
from outrider.grammar.vocabulary import index_vocabulary

# By itself llguidance allows one token where the text is forced, the tokenizer's own spelling,
# which may be a special token's
LLGUIDANCE = (1, 9)  # the first version that keeps white space to a pattern
ALL_SPELLINGS = '\n%llguidance {"no_forcing": true}\n'

Problem = Callable[[str], str]  # what llguidance has to say against a grammar


class Grammars:
    """All grammars of one model. Thread-safe: one that takes long to compile keeps no other
    waiting.

    The vocabulary is indexed at the first use (about a second per 100k tokens)."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        of_strangers: bool = False,
    ) -> None:
        """`vocab_size`: width of the logits. Ends with any of `eos_token_ids`, or with the
        tokenizer's own if there are none. `of_strangers`: grammars are tried in another process
        first (trial.py)."""
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._of_strangers = of_strangers
        self._index: Any = None
        self._trial: Trial | None = None
        self._kept: dict[Spec, Future[Compiled]] = {}  # the one used last stands last
        self._lock = threading.Lock()

    def constraint(self, spec: Spec) -> Matcher:
        """A fresh one, for one row. Raises RequestError when the grammar is wrong or takes too much
        work, CapabilityError when the library is missing or cannot read this tokenizer."""
        library = _library()
        with self._lock:
            self._read_vocabulary()
            future = self._kept.pop(spec, None)
            is_new = future is None or _is_spent(future)
            if future is None or is_new:
                future = Future()
            self._kept[spec] = future
            self._forget()
        if is_new:
            self._compile(library, spec, future)
        return Matcher(future.result(), frozenset(self._index.eos_tokens), self.vocab_size, spec)

    def has(self, spec: Spec) -> bool:
        """Whether `constraint` answers at once."""
        future = self._kept.get(spec)
        return future is not None and future.done() and not _is_spent(future)

    def _read_vocabulary(self) -> None:
        if self._index is None:
            self._index = index_vocabulary(self._tokenizer, self.vocab_size, self._eos)
            self._trial = Trial(self._index) if self._of_strangers else None

    def _forget(self) -> None:
        """Drop grammars whose lexer is used up, and then the one that was used longest ago, until
        there is room for the rest."""
        for spec in [spec for spec, future in self._kept.items() if _is_spent(future)]:
            del self._kept[spec]
        while (
            len(self._kept) > MAX_KEPT
            or sum(len(spec.text) for spec in self._kept) > MAX_KEPT_CHARACTERS
        ):
            del self._kept[next(iter(self._kept))]

    def _compile(self, library: Any, spec: Spec, future: Future[Compiled]) -> None:
        """Let all who wait for a grammar have it, or the error."""
        try:
            future.set_result(self._compiled(library, spec))
        except BaseException as error:  # noqa: BLE001  it is raised for all who wait
            with self._lock:
                if self._kept.get(spec) is future:
                    del self._kept[spec]
            future.set_exception(error)

    def _compiled(self, library: Any, spec: Spec) -> Compiled:
        text = _translated(library, spec)
        compiled = _compiled_form(spec, text) + ALL_SPELLINGS
        limits = library.LLParserLimits(**PARSER)
        trial = self._trial
        if trial is None:
            _refuse(
                library,
                spec,
                text,
                lambda part: library.LLMatcher.validate_grammar(part, self._index, limits=limits),
            )
        else:
            problem = trial.problem(text, compiled, spec.name)
            _refuse(
                library,
                spec,
                text,
                lambda part: problem if part is text else trial.problem(part, "", spec.name),
            )
        return Compiled(
            spec.name,
            lambda: library.LLMatcher(self._index, compiled, log_level=0, limits=limits),
            self._index,
        )


def _is_spent(future: Future[Compiled]) -> bool:
    return future.done() and future.exception() is None and future.result().is_spent


def refuse_wrong(spec: Spec) -> None:
    """Refuse what can be refused without a vocabulary, so before a model is loaded. Raises
    RequestError, or CapabilityError when the library is missing."""
    library = _library()
    text = _translated(library, spec)
    _refuse(library, spec, text, library.LLMatcher.validate_grammar)


def _translated(library: Any, spec: Spec) -> str:
    """The grammar as llguidance reads it. Raises RequestError for what is none."""
    if len(spec.text) > MAX_CHARACTERS:
        raise RequestError(
            f"{spec.name} has {len(spec.text):,} characters as a grammar; at most "
            f"{MAX_CHARACTERS:,} are compiled"
        )
    # which llguidance would read in its own form
    if spec.form in ("ebnf", "lark") and spec.text.lstrip().startswith("{"):
        raise RequestError(
            f"{spec.name} must be a grammar (root ::= ... or start: ...), got JSON: use the field "
            "for schemas"
        )
    # one terminal: as alternatives of a rule, more than 2000 would be too many for the parser
    if spec.form == "choice":
        return "start: CHOICE\nCHOICE: " + " | ".join(
            json.dumps(option) for option in json.loads(spec.text)
        )
    try:
        text = str(library.grammar_from(spec.form, spec.text))
    except ValueError as error:
        raise RequestError(f"{spec.name} is no grammar: {error}") from error
    for schema in [json.loads(spec.text)] if spec.form == "json_schema" else schemas_in(text):
        refuse_inexact(schema, spec.name)
    return text


def _compiled_form(spec: Spec, text: str) -> str:
    """A grammar in Lark, to which options can be added."""
    if spec.form == "json_schema":
        return "start: %json " + spec.text
    if spec.form == "regex":  # Lark in JSON
        return str(json.loads(text)["grammars"][0]["lark_grammar"])
    return text


def _refuse(library: Any, spec: Spec, text: str, problem_of: Problem) -> None:
    """Raise RequestError that names the path of what is wrong, if anything is."""
    problem = problem_of(text)
    if problem and spec.form == "json_schema":
        path = "".join(
            f".{step}" for step in _path(library, json.loads(spec.text), problem, problem_of)
        )
        raise RequestError(f"{spec.name}{path}: {problem}")
    if problem:
        raise RequestError(f"{spec.name} is not usable: {problem}")


def _path(library: Any, schema: Any, problem: str, problem_of: Problem) -> list[str]:
    """The path into a schema to the smallest part that has the same problem by itself. Ends early
    where that takes long."""
    path: list[str] = []
    end = time.monotonic() + COMPILE_S
    while time.monotonic() < end:
        for steps, part in _parts(schema):
            if problem_of(library.grammar_from("json_schema", json.dumps(part))) == problem:
                path += steps
                schema = part
                break
            if time.monotonic() >= end:
                return path
        else:
            return path
    return path


def _parts(schema: Any) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The schemas inside a schema, one level down."""
    if not isinstance(schema, dict):
        return
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        named = schema.get(key)
        for name, part in named.items() if isinstance(named, dict) else ():
            if isinstance(part, dict):
                yield [key, name], part
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield [key], schema[key]
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        listed = schema.get(key)
        for number, part in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(part, dict):
                yield [key, str(number)], part


@cache
def _library() -> Any:
    """llguidance. Raises CapabilityError for a version that ignores the rule for white space, under
    which a model may write blanks to the end."""
    import llguidance

    installed = version("llguidance")
    if tuple(map(int, installed.split(".")[:2])) < LLGUIDANCE:
        wanted = ".".join(map(str, LLGUIDANCE))
        raise CapabilityError(
            f"grammars need llguidance {wanted} or later, got {installed}: pip install "
            f"'llguidance>={wanted}'"
        )
    return llguidance
