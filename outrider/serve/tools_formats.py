"""How models write tool calls. A format is known by what the model's chat template shows.

    hermes    <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>     Hermes, Qwen 2.5 and 3
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}]                  Mistral, with [ARGS] as well: f[ARGS]{...}
    llama3    {"name": "f", "parameters": {...}}                               Llama 3.1 to 3.3, in place of an answer
    pythonic  [f(a=1, b="x"), g()]                                             Llama 4 and others, in place of an answer
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass

from outrider.errors import CapabilityError, ConfigError, did_you_mean

LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls."""

    name: str
    opening: str  # text a call begins with; "": the whole answer is calls, or none
    closing: str = ""
    arguments: str = "arguments"  # the key
    id_length: int = 24  # Mistral's templates take nine letters and nothing else
    has_args: bool = False  # f[ARGS]{...}

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens."""
        found = {"mistral": ("[TOOL_CALLS]", "[ARGS]"), "llama3": ("<|python_tag|>",)}
        return found.get(self.name, tuple(text for text in (self.opening, self.closing) if text))

    def new_id(self) -> str:
        letters = "".join(secrets.choice(LETTERS) for _ in range(self.id_length))
        return letters if self.name == "mistral" else f"call_{letters}"


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", id_length=9)
MISTRAL_ARGS = ToolFormat("mistral", "[TOOL_CALLS]", id_length=9, has_args=True)
LLAMA3 = ToolFormat("llama3", "", arguments="parameters")
PYTHONIC = ToolFormat("pythonic", "")
FORMATS = {form.name: form for form in (HERMES, MISTRAL, LLAMA3, PYTHONIC)}


def format_of(template: str, name: str | None = None) -> ToolFormat:
    """The format called `name`, or the one a chat template shows. Raises ConfigError, CapabilityError."""
    if name is not None and name not in FORMATS:
        raise ConfigError(f"unknown tool format '{name}'.{did_you_mean(name, FORMATS)}")
    if name == "mistral" or (name is None and "[TOOL_CALLS]" in template):
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if name is not None:
        return FORMATS[name]
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "func_name1(" in template:
        return PYTHONIC
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return LLAMA3
    raise CapabilityError(
        "tools: this model's chat template shows none of the ways to write a call that are known here "
        f"({', '.join(FORMATS)}), so its calls could not be read back"
    )
