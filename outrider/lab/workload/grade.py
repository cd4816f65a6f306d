"""`grade`: whether a text answers a request rightly, where that can be decided without a judge.

docs/workloads.md, "Right answers", has the rules. The exact match is after the normalisation of SQuAD (Rajpurkar et al.,
1606.05250), the normal form of other answers in the manner of Hendrycks et al. (2103.03874): spacing and cosmetic commands do
not count.
"""

from __future__ import annotations

import re
import string
from fractions import Fraction

from outrider.lab.workload.types import WorkloadRequest

UNGRADED = ("code", "chat", "translation", "summarization")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
MAX_CHARACTERS = 400  # of a number
_NEXT_QUESTION = re.compile(r"\n\s*(?:Question|Problem|Q)\s*:")
_MARKED = re.compile(r"####([^\n]*)")
_STATED = re.compile(r"\banswer\W{0,4}(?:\s+is\b|:|=)([^\n]*)", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(\w))")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_IN_PROSE = re.compile(rf"(?>{_DIGITS})(?:\s?/\s?\d+)?|\\[dt]?frac\{{\d+\}}\{{\d+\}}")
_MINUS = re.compile(r"(?<![\w)}\]%])-\\?\$?$")
_UNIT = r"(?:\s+[A-Za-z]{2,}(?:[\s/]+[A-Za-z]+)*(?:\s*\^\{?[23]\}?)?)?"
_RATIO = re.compile(rf"([-+]?)\s*(?:(\d+)\s+)?(-?\d+)\s*/\s*(\d+){_UNIT}")
_DECIMAL = re.compile(rf"([-+]?)\s*(\d+\.?\d*|\.\d+){_UNIT}")
_LEADING = re.compile(r"[-+]?(?>\d+(?:\.\d+)?(?:/\d+)?)(?![\w\\^*/+=-])")
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_COSMETIC = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[!,;: ]|\\?[$%]|\^\{?\\circ\}?|°")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))")
_PLAIN_FRACTION = re.compile(r"\\frac\{\s*(-?\d+)\s*\}\{\s*(\d+)\s*\}")
_ROOT = re.compile(r"\\sqrt\s*(\w)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_MARKS = " *`\"'"  # around an answer
_NAMED = re.compile(r"^[a-zA-Z]\s*=\s*")


def grade(request: WorkloadRequest, text: str) -> bool | None:
    """True or False; None where the request has no reference or its task has no one right answer."""
    if request.reference is None or not request.reference.strip() or request.task in UNGRADED:
        return None
    if request.task == "reasoning" or number(request.reference) is not None:
        return is_right(text, request.reference)
    return _normal(finished(text)) == _normal(request.reference)


def _normal(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def is_right(text: str, reference: str) -> bool:
    """Whether the final answer of a worked solution is the reference."""
    text, wanted = finished(text), number(reference)
    if marked := _MARKED.search(text):
        answer = marked.group(1)
        lead = _LEADING.match(clean(answer)) if wanted is not None and number(answer) is None else None
        return same(lead.group() if lead else answer, reference)
    if (inside := boxed(text)) is not None:
        return same(inside, reference)
    stated = _STATED.findall(text)
    if wanted is None:
        return bool(stated) and same(stated[-1], reference)
    behind = numbers_in(stated[-1].rpartition("=")[2]) if stated else []
    found = behind[:1] or numbers_in(text)[-1:]
    return bool(found) and found[0] == wanted


def finished(text: str) -> str:
    """A text without its thoughts, and without what a base model goes on with. Unfinished thoughts leave nothing."""
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    elif "<think>" in text:
        return ""
    return _NEXT_QUESTION.split(text, maxsplit=1)[0]


def boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{}` whose braces close; `\\boxed 5` is one too."""
    for box in reversed(list(_BOX.finditer(text))):
        if box.group(1):
            return box.group(1)
        depth = 1
        for end in range(box.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[box.end() : end].strip()
    return None


def same(answer: str, reference: str) -> bool:
    """Whether two answers are the same number, or the same text in normal form."""
    ours, theirs = number(answer), number(reference)
    if ours is not None and theirs is not None:
        return ours == theirs
    return _form(answer) == _form(reference) != ""


def number(text: str) -> Fraction | None:
    """The number that a text is, a unit behind it allowed; None where it is something else."""
    if len(text) > MAX_CHARACTERS:
        return None
    plain = _NAMED.sub("", _PLAIN_FRACTION.sub(r" \1/\2", clean(text))).replace("- ", "-").strip()
    if ratio := _RATIO.fullmatch(plain):
        sign, whole, over, under = ratio.groups()
        if int(under) == 0:
            return None
        value = int(whole or 0) + Fraction(int(over), int(under))
    elif decimal := _DECIMAL.fullmatch(plain):
        sign, value = decimal.group(1), Fraction(decimal.group(2))
    else:
        return None
    return -value if sign == "-" else value


def numbers_in(text: str) -> list[Fraction]:
    """The numbers of a prose text in their order. A minus is a sign where it touches its number and nothing before it."""
    text = text.replace("\u2212", "-")
    found = []
    for match in _IN_PROSE.finditer(text):
        value = number(match.group())
        if value is not None:
            found.append(-value if _MINUS.search(text[max(0, match.start() - 4) : match.start()]) else value)
    return found


def clean(text: str) -> str:
    """An answer without what does not change it: cosmetic commands, currency, thousands' commas, marks around it."""
    text = _COSMETIC.sub("", _WORDS.sub(r" \1 ", text.replace("\u2212", "-")))
    text = _FRACTION.sub(lambda parts: f"\\frac{{{parts[1] or parts[2]}}}{{{parts[3] or parts[4]}}}", text)
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    if not any(mark in text for mark in "([{"):  # (1,234) is a pair
        text = _THOUSANDS.sub("", text)
    return " ".join(text.split()).lstrip(_MARKS).rstrip("." + _MARKS)


def _form(text: str) -> str:
    form = _NAMED.sub("", clean(text)).replace(" ", "")
    return form.casefold() if form.isalpha() else form
