"""`grade`: whether a text answers a request rightly, where that can be decided without a judge.

    reasoning, or a numeric reference   the final answer is compared (`answers.py`)
    code                                never graded: it would have to be run, and what a model wrote is not run here
    chat, translation, summarization    never graded: there is no one right answer
    everything else                     exact match after the normalisation of SQuAD (Rajpurkar et al., 1606.05250): letter case,
                                        punctuation, articles and spacing do not count

A share of right answers says whether speculation changed what a model can do. It is no benchmark score: prompts are asked
once, without examples, and the embedded sets have a dozen of them.
"""

from __future__ import annotations

import re
import string

from outrider.lab.workload.answers import finished, is_right, number
from outrider.lab.workload.types import WorkloadRequest

UNGRADED = ("code", "chat", "translation", "summarization")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def grade(request: WorkloadRequest, text: str) -> bool | None:
    """True or False; None where the request has no reference or its task has no one right answer."""
    if request.reference is None or not request.reference.strip() or request.task in UNGRADED:
        return None
    if request.task == "reasoning" or number(request.reference) is not None:
        return is_right(text, request.reference)
    return _normal(finished(text)) == _normal(request.reference)


def _normal(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())
