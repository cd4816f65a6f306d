"""The form that answers must have: a JSON schema, a pattern, one of some texts, or a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cli.options import SAMPLING
from outrider.cli.verbs import option, written
from outrider.errors import ConfigError
from outrider.wellformed import read_json, read_text

if TYPE_CHECKING:
    from outrider.grammar import Spec
    from outrider.sampling.structured import StructuredOutputsParams


@dataclass(frozen=True, kw_only=True)
class FormOptions:
    """Structured outputs; at most one of these."""

    json_schema: Path | None = option(None, SAMPLING, "Answers of the JSON schema in this file.", metavar="FILE")
    regex: str | None = option(None, SAMPLING, "Answers that match this pattern as a whole.")
    choice: list[str] | None = option(
        None, SAMPLING, "Answers that are this text, or another that is given so.", metavar="<str>"
    )
    grammar: Path | None = option(None, SAMPLING, "Answers of the grammar in this file: GBNF or Lark.", metavar="FILE")

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """For `SamplingParams`. Raises ConfigError for two forms or an unreadable file, RequestError for a form that is wrong,
        before a model is loaded."""
        found = self._found()
        return None if found is None else found[1]

    def spec(self) -> Spec | None:
        """The grammar. Raises as `structured_outputs`."""
        found = self._found()
        return None if found is None else found[0]

    def _found(self) -> tuple[Spec, StructuredOutputsParams] | None:
        given = [name for name in ("json_schema", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if not given:
            return None
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(map(written, given))}: an answer has one form; give one of them")
        from outrider.grammar import form_of, refuse_wrong
        from outrider.sampling.structured import StructuredOutputsParams

        name = written(given[0])
        if self.json_schema is not None:
            wanted = StructuredOutputsParams(json=read_json(self.json_schema, f"{name}={self.json_schema}"))
        elif self.grammar is not None:
            wanted = StructuredOutputsParams(grammar=read_text(self.grammar, f"{name}={self.grammar}"))
        else:
            wanted = StructuredOutputsParams(regex=self.regex, choice=self.choice)
        spec = form_of(wanted, name)
        refuse_wrong(spec)
        return spec, wanted
