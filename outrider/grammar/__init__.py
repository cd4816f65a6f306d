"""Answers of a given form: JSON schema, regular expression, choice, context-free grammar. The one
user of `llguidance`.

    grammars = Grammars(tokenizer, vocab_size, eos_token_ids)             # once per model: it indexes the vocabulary
    row.constraint = grammars.constraint(json_schema({"type": "object"}))    # one per row, fresh

Why llguidance and not xgrammar: it needs no torch and no compile step (a mask is computed when
asked for, microseconds), it rolls back any number of tokens, which is what draft paths ask for, and
it refuses what it cannot honour of a JSON schema instead of ignoring it. It is one wheel without
dependencies, the engine behind OpenAI's structured outputs and in vLLM.
"""

from outrider.grammar.grammars import Grammars, refuse_wrong
from outrider.grammar.specs import (
    Spec,
    choice,
    ebnf,
    form_of,
    json_object,
    json_schema,
    lark,
    regex,
    schema_form,
)

__all__ = [
    "Grammars", "Spec", "choice", "ebnf", "form_of", "json_object", "json_schema", "lark", "refuse_wrong", "regex", "schema_form",
]  # fmt: skip
