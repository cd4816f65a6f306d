"""matplotlib's SVG, made fit to stand inside a page: no style attributes, no style sheet, no metadata, no fixed colours.

A strict content security policy forbids style attributes, and a style sheet inside an SVG would reach the whole page: styles
become presentation attributes. Placeholder colours become `currentColor` and CSS variables; ids get a prefix, because a page
has several plots; points get their numbers as titles, shown on hover.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from xml.etree import ElementTree as ET

INK, FAINT, PAPER = "#010203", "#040506", "#070809"  # placeholders, colours that nothing else has
COLOURS = ("#0b6bcb", "#c2410c", "#15803d", "#9333ea", "#b4860b", "#0e7490", "#be185d", "#57534e")  # on white; page.css: on dark
_NAMESPACE = re.compile(r"^\{[^}]*\}")
_URL = re.compile(r"url\(#([^)]*)\)")
_SIZE = re.compile(r"([\d.]+)px")
_LONG = re.compile(r"\d+\.\d{3,}")
DROPPED = ("metadata", "style")
UNUSED = ("font", "font-family", "width", "height", "version")  # the page's font; the page's width


def series_colour(number: int) -> str:
    """The placeholder of a series' colour."""
    return f"#a0a0{number % len(COLOURS):02x}"


def _variables() -> dict[str, str]:
    found = {INK: "currentColor", FAINT: "var(--faint,#8a8f98)", PAPER: "var(--paper,#ffffff)", "#000000": "currentColor"}
    return found | {series_colour(i): f"var(--series-{i + 1},{colour})" for i, colour in enumerate(COLOURS)}


VARIABLES = _variables()


def adapted(svg: str, *, title: str, prefix: str, hovers: Mapping[str, Sequence[str]]) -> str:
    """`hovers`: of the group with this id, what to say at each of its points."""
    root = ET.fromstring(svg)
    for element in root.iter():
        for child in [child for child in element if _local(child.tag) in DROPPED]:
            element.remove(child)
    for identity, lines in hovers.items():
        _say(root, identity, lines)
    used = _used(root)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = dict(_attributes(element, used, prefix))
        if element.text and not element.text.strip() and element.tag != "text":
            element.text = None
        element.tail = None
    root.attrib = {
        "xmlns": "http://www.w3.org/2000/svg", "class": "plot", "role": "img", "viewBox": root.attrib["viewBox"],
    }  # fmt: skip
    root.insert(0, _title(title))
    return ET.tostring(root, encoding="unicode")


def _local(tag: str) -> str:
    return _NAMESPACE.sub("", tag)


def _say(root: ET.Element, identity: str, lines: Sequence[str]) -> None:
    """A title for every marker of a line, or for a bar."""
    group = next((element for element in root.iter() if element.get("id") == identity), None)
    if group is None:
        return
    marks = [element for element in group.iter() if _local(element.tag) == "use"] or [group]
    for mark, line in zip(marks, lines, strict=False):
        mark.insert(0, _title(line))


def _title(text: str) -> ET.Element:
    element = ET.Element("title")
    element.text = text
    return element


def _used(root: ET.Element) -> set[str]:
    """Ids that something refers to."""
    found: set[str] = set()
    for element in root.iter():
        for name, value in element.attrib.items():
            found.update(_URL.findall(value))
            if _local(name) == "href":
                found.add(value.removeprefix("#"))
    return found


def _attributes(element: ET.Element, used: set[str], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in element.attrib.items():
        name = _local(name)
        if name == "style":
            yield from _styles(value, prefix)
        elif name == "id":
            if value in used:
                yield name, f"{prefix}-{value}"
        elif name == "href":
            yield name, f"#{prefix}-{value.removeprefix('#')}"
        elif (name not in UNUSED or element.tag in ("rect", "pattern")) and not value.startswith("rotate(-0 "):
            yield name, _value(value, prefix)


def _styles(style: str, prefix: str) -> Iterator[tuple[str, str]]:
    for part in filter(str.strip, style.split(";")):
        name, _, value = (piece.strip() for piece in part.partition(":"))
        if name == "font" and (size := _SIZE.search(value)):
            yield "font-size", size[1]
        elif name not in UNUSED:
            yield name, _value(value, prefix)


def _value(value: str, prefix: str) -> str:
    """With our colours and ids, and no more digits than a screen shows."""
    if value.lower() in VARIABLES:
        return VARIABLES[value.lower()]
    if "url(" in value:
        return _URL.sub(rf"url(#{prefix}-\1)", value)
    return _LONG.sub(lambda digits: f"{float(digits[0]):.2f}", value)
