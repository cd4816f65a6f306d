"""Grammars over one model's vocabulary: from a `Spec` to the constraint of one row, or to an error that names the path."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterator
from typing import Any

from outrider.errors import CapabilityError, RequestError, install_hint
from outrider.grammar.compiled import Compiled
from outrider.grammar.matcher import Matcher
from outrider.grammar.numbers import refuse_inexact, schemas_in
from outrider.grammar.specs import Spec
from outrider.grammar.vocabulary import index_vocabulary

MAX_KEPT = 256  # compiled grammars a server remembers: clients send the same schema again and again
MAX_CHARACTERS = 16 << 20  # of all of them
# By itself llguidance allows one token where the text is forced, the tokenizer's own spelling, which may be a special token's
ALL_SPELLINGS = '\n%llguidance {"no_forcing": true}\n'


class Grammars:
    """All grammars of one model. Thread-safe. The vocabulary is indexed at the first use (about a second per 100k tokens)."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`vocab_size`: width of the logits. Ends with any of `eos_token_ids`, or with the tokenizer's own if there are none."""
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._index: Any = None
        self._checked: dict[Spec, Compiled] = {}
        self._lock = threading.Lock()

    def constraint(self, spec: Spec) -> Matcher:
        """A fresh one, for one row. Raises RequestError when the grammar is wrong or takes too much work, CapabilityError when
        the library is missing or cannot read this tokenizer."""
        with self._lock:
            library = _library()
            if self._index is None:
                self._index = index_vocabulary(self._tokenizer, self.vocab_size, self._eos)
            known = self._checked.get(spec)
            if known is None or known.is_spent:
                known = self._remember(spec, self._compile(library, spec))
            return Matcher(known, frozenset(self._index.eos_tokens), self.vocab_size, spec)

    def _remember(self, spec: Spec, compiled: Compiled) -> Compiled:
        self._checked.pop(spec, None)
        self._checked[spec] = compiled
        while len(self._checked) > MAX_KEPT or sum(len(one.text) for one in self._checked) > MAX_CHARACTERS:
            self._checked.pop(next(iter(self._checked)))  # the oldest
        return compiled

    def _compile(self, library: Any, spec: Spec) -> Compiled:
        """The grammar that a request asks for, compiled. Raises RequestError."""
        text = _checked(library, spec, self._index)
        if spec.form == "json_schema":
            text = "start: %json " + spec.text
        elif spec.form == "regex":  # Lark in JSON
            text = json.loads(text)["grammars"][0]["lark_grammar"]
        return Compiled(spec.name, lambda: library.LLMatcher(self._index, text + ALL_SPELLINGS, log_level=0))


def refuse_wrong(spec: Spec) -> None:
    """Refuse what can be refused without a vocabulary, so before a model is loaded. Raises RequestError, or CapabilityError when
    the library is missing."""
    _checked(_library(), spec, None)


def _checked(library: Any, spec: Spec, index: Any) -> Any:
    """The grammar in the library's form. Raises RequestError that names the path of what is wrong."""
    if spec.form in ("ebnf", "lark") and spec.text.lstrip().startswith("{"):  # which llguidance would read in its own form
        raise RequestError(f"{spec.name} must be a grammar (root ::= ... or start: ...), got JSON: use the field for schemas")
    try:
        text = library.grammar_from(spec.form, spec.text)
    except ValueError as error:
        raise RequestError(f"{spec.name} is no grammar: {error}") from error
    for schema in [json.loads(spec.text)] if spec.form == "json_schema" else schemas_in(text):
        refuse_inexact(schema, spec.name)
    problem = library.LLMatcher.validate_grammar(text, index)
    if problem and spec.form == "json_schema":
        path = "".join(f".{step}" for step in _path(library, json.loads(spec.text), problem))
        raise RequestError(f"{spec.name}{path}: {problem}")
    if problem:
        raise RequestError(f"{spec.name} is not usable: {problem}")
    return text


def _path(library: Any, schema: Any, problem: str) -> list[str]:
    """The path into a schema to the smallest part that has the same problem by itself."""
    for steps, part in _parts(schema):
        text = library.grammar_from("json_schema", json.dumps(part))
        if library.LLMatcher.validate_grammar(text) == problem:
            return [*steps, *_path(library, part, problem)]
    return []


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


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise CapabilityError(f"grammars need the llguidance package: {install_hint('serve')}") from error
    return llguidance
