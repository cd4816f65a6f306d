"""One way to decode, as a user would say it: drafter, draft length, options, verifier. The text form has one word for each:

    none
    draft-model
    draft-model k=5
    suffix k=auto:12 max_depth=32
    draft-model k=8 tree=sequoia verifier=multi-round
    composite parts=draft-model+suffix verifier=traversal verifier.NAME=VALUE

First the drafter, then NAME=VALUE: `k` is --num-draft-tokens, `verifier` is --verifier, `verifier.NAME` one of its options,
everything else an option of the drafter. A list of configurations has commas between; a + stands for a comma inside a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.errors import ConfigError
from outrider.parts import Parts, choose_parts

PLAIN = "none"  # the drafter of plain decoding


@dataclass(frozen=True)
class Configuration:
    """What stands behind --drafter, --num-draft-tokens, --drafter-option, --verifier and --verifier-option."""

    drafter: str = PLAIN
    num_draft_tokens: int | str | None = None
    drafter_options: dict[str, Any] = field(default_factory=dict)
    verifier: str = "auto"
    verifier_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """From the text form. Raises ConfigError; names are checked by `parts`."""
        drafter, *words = text.split() or [""]
        if not drafter or "=" in drafter:
            raise ConfigError(f"a configuration begins with a drafter's name, like 'draft-model k=5'; got '{text.strip()}'")
        values: dict[str, Any] = {"drafter": drafter, "drafter_options": {}, "verifier_options": {}}
        for word in words:
            name, equals, value = word.partition("=")
            if not (name and equals and value):
                raise ConfigError(f"'{word}' in '{text.strip()}' is not NAME=VALUE")
            value = value.replace("+", ",")
            if name == "k":
                values["num_draft_tokens"] = int(value) if value.isdigit() else value
            elif name == "verifier":
                values["verifier"] = value
            elif name.startswith("verifier."):
                values["verifier_options"][name.removeprefix("verifier.")] = value
            else:
                values["drafter_options"][name] = value
        if drafter == PLAIN and "num_draft_tokens" in values:
            raise ConfigError(f"plain decoding drafts nothing: leave k out of '{text.strip()}'")
        return cls(**values)

    @property
    def is_plain(self) -> bool:
        return self.drafter == PLAIN

    @property
    def is_automatic(self) -> bool:
        """Whether its draft length follows measured times."""
        return str(self.num_draft_tokens).startswith("auto")

    @property
    def label(self) -> str:
        """The text form: `parse(label)` is this configuration again, up to the types of values."""
        words = [self.drafter]
        if self.num_draft_tokens is not None:
            words.append(f"k={_word(self.num_draft_tokens)}")
        words += [f"{name}={_word(value)}" for name, value in self.drafter_options.items()]
        if self.verifier != "auto":
            words.append(f"verifier={self.verifier}")
        words += [f"verifier.{name}={_word(value)}" for name, value in self.verifier_options.items()]
        return " ".join(words)

    def parts(self, *, lossy: bool = False) -> Parts:
        """What it means. Raises ConfigError for unknown names or values, CapabilityError where parts do not fit."""
        return choose_parts(
            self.drafter, self.drafter_options, self.verifier, self.verifier_options, self.num_draft_tokens, lossy=lossy
        )

    def as_dict(self) -> dict[str, Any]:
        """Keyword arguments of `outrider.LLM`, as plain JSON."""
        return asdict(self)

    def options(self, draft: str | None) -> dict[str, Any]:
        """The keyword arguments that say something: what a settings file holds. `draft`: the draft model, if it needs one."""
        options = {name: value for name, value in self.as_dict().items() if value not in (None, {})}
        if self.parts().requirements.draft and draft is not None:
            options["draft"] = draft
        return options


def parse_configurations(texts: Sequence[str]) -> list[Configuration]:
    """The configurations in comma-separated texts, without duplicates. Raises ConfigError."""
    found = [Configuration.parse(part) for text in texts for part in text.split(",")]
    return [one for index, one in enumerate(found) if one not in found[:index]]


def _word(value: Any) -> str:
    return str(value).replace(",", "+")
