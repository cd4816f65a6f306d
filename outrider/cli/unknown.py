"""What to say about an option that a verb does not have: what other engines call by that name, or the nearest name."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.foreign import meant


def unknown_option(given: str, known: Iterable[str]) -> str:
    """What to say about an option that a verb does not have, among the options and arguments `known` that it has."""
    forms = {_bare(name): _form(name) for name in known}
    asked = _bare(given)
    if asked in forms:
        return f"'{given}' is written {forms[asked]}"
    why, close = meant(asked, forms)
    hint = f": {why}" if why else f". Did you mean '{forms[close]}'?" if close else ""
    return f"unknown option '{given}'{hint}"


def _form(name: str) -> str:
    """How a name is typed; an argument, which has none on the command line, in capitals."""
    if name.startswith("--set "):
        return f"{name}=VALUE"
    return name if name.startswith("-") else f"{name.upper()} without a name in front"


def _bare(name: str) -> str:
    return name.removeprefix("--set ").lstrip("-").replace("_", "-")
