"""How much work, memory and text a grammar may take. A body of a hundred bytes can ask for any
amount of each."""

from __future__ import annotations

# of one grammar: a hundred tools with their schemas have about a fifth of that
MAX_CHARACTERS = 512 << 10
# compiled grammars a server remembers, because clients send the same schema again and again
MAX_KEPT = 64
MAX_KEPT_CHARACTERS = 16 << 20  # of all of them
PARSER = {  # llguidance's own limits
    # each takes about 400 bytes; a row whose text needs more begins a new lexer (compiled.py)
    "max_lexer_states": 32_000,
    # what a lexer may cost before the first token: expressions built
    "initial_lexer_fuel": 300_000,
    "max_grammar_size": 100_000,  # symbols
}
COMPILE_S = 2.0  # of one processor
COMPILE_MIB = 512
STACK_MIB = 2  # the compiler is recursive: about 700 rules deep
# of one processor, for all new lexers of one row: they are built in the engine's thread
REBUILD_S = 0.5
