"""Rejection analysis: every token that a step could have had and did not, charged to a cause; and
what to do about it.

`explain.py: explain(...)` is the door; docs/explain.md says what each number means.
"""

from outrider.extras import check_lab

check_lab("explain")
