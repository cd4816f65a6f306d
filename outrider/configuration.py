"""One way to decode, as a user would say it: drafter, draft length, options, verifier. The text
form has one word for each:

    none
    draft-model
    draft-model k=5
    suffix k=auto:12 max_depth=32
    draft-model k=8 tree=sequoia verifier=multi-round
    composite parts=draft-model+suffix verifier=traversal verifier.NAME=VALUE

First the drafter, then NAME=VALUE: `k` is --num-draft-tokens, `verifier` is --verifier,
`verifier.NAME` one of its options, everything else an option of the drafter. Quotes keep a value
with spaces together. A list of configurations has commas between; a + stands for a comma inside a
value, but for paths (with a /). `--drafter`, `LLM(drafter=...)`, settings files, `bench --drafters`
and reports have this form.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.errors import ConfigError
from outrider.parts import Parts, choose_parts

PLAIN = "none"  # the drafter of plain decoding


@dataclass(frozen=True)
class Configuration:
    """The arguments of `LLM` that choose drafting: drafter, num_draft_tokens, drafter_options,
    verifier and verifier_options."""

    drafter: str = PLAIN
    num_draft_tokens: int | str | None = None
    drafter_options: dict[str, Any] = field(default_factory=dict)
    verifier: str = "auto"
    verifier_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """From the text form. Raises ConfigError; names are checked by `parts`."""
        drafter, given = name_and_options(
            text, "a configuration begins with a drafter's name, like 'draft-model k=5'"
        )
        values: dict[str, Any] = {"drafter": drafter, "drafter_options": {}, "verifier_options": {}}
        for name, word in given.items():
            value = word if "/" in word else word.replace("+", ",")
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

    def with_more(
        self,
        num_draft_tokens: int | str | None,
        drafter_options: Mapping[str, Any],
        verifier: str,
        verifier_options: Mapping[str, Any],
    ) -> Configuration:
        """With what was given besides the text form. Raises ConfigError where both say the same
        thing."""
        twice = sorted({*self.drafter_options} & {*drafter_options})
        twice += sorted(
            f"verifier.{name}" for name in {*self.verifier_options} & {*verifier_options}
        )
        if self.num_draft_tokens is not None and num_draft_tokens is not None:
            twice.append("k (num_draft_tokens)")
        if self.verifier != "auto" and verifier != "auto":
            twice.append("verifier")
        if twice:
            raise ConfigError(
                f"given twice, in drafter '{self.label}' and besides: {', '.join(twice)}; leave "
                "one out"
            )
        return Configuration(
            self.drafter,
            self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens,
            {**self.drafter_options, **drafter_options},
            self.verifier if verifier == "auto" else verifier,
            {**self.verifier_options, **verifier_options},
        )

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
        words += [
            f"verifier.{name}={_word(value)}" for name, value in self.verifier_options.items()
        ]
        return " ".join(words)

    def parts(self, *, lossy: bool = False) -> Parts:
        """The configuration that the text means. Raises ConfigError for unknown names or values,
        CapabilityError where parts do not fit."""
        return choose_parts(
            self.drafter,
            self.drafter_options,
            self.verifier,
            self.verifier_options,
            self.num_draft_tokens,
            lossy=lossy,
        )

    def as_dict(self) -> dict[str, Any]:
        """Keyword arguments of `outrider.LLM`, as plain JSON."""
        return asdict(self)

    def options(self, draft: str | None) -> dict[str, Any]:
        """The keyword arguments that say something: what a settings file holds. `draft`: the draft
        model, if it needs one."""
        options = {name: value for name, value in self.as_dict().items() if value not in (None, {})}
        if self.parts().requirements.draft and draft is not None:
            options["draft"] = draft
        return options


def spelled_out(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `outrider.LLM`, what `drafter` says in one text under their own names. Raises
    ConfigError."""
    if "drafter" not in options:
        return dict(options)
    configuration = Configuration.parse(str(options["drafter"])).with_more(
        options.get("num_draft_tokens"),
        options.get("drafter_options", {}),
        options.get("verifier", "auto"),
        options.get("verifier_options", {}),
    )
    return {**options, **configuration.as_dict()}


def name_and_options(text: str, begins: str) -> tuple[str, dict[str, str]]:
    """A name, then NAME=VALUE words. Raises ConfigError; `begins` says what a text begins with."""
    try:
        name, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise ConfigError(f"'{text.strip()}' has quotes that do not close: {error}") from error
    if not name or "=" in name:
        raise ConfigError(f"{begins}; got '{text.strip()}'")
    options: dict[str, str] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if not (option and equals and value):
            raise ConfigError(f"'{word}' in '{text.strip()}' is not NAME=VALUE")
        if option in options:
            raise ConfigError(f"'{text.strip()}' has two values for '{option}': leave one out")
        options[option] = value
    return name, options


def parse_configurations(texts: Sequence[str]) -> list[Configuration]:
    """The configurations in comma-separated texts, without duplicates. Raises ConfigError."""
    configurations = [Configuration.parse(part) for text in texts for part in text.split(",")]
    return [
        configuration
        for index, configuration in enumerate(configurations)
        if configuration not in configurations[:index]
    ]


def _word(value: Any) -> str:
    text = str(value)
    return shlex.quote(text if "/" in text else text.replace(",", "+"))
