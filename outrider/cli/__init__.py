"""The command line: `outrider generate | chat | demo | ls | doctor`, one module per verb.

`verbs.py` says which options are flags and how the others are set, `options.py` holds every option
that more than one verb has, `lab.py` runs a measurement and writes its result, `session.py` opens a
model and reports what it is doing, `stream.py` prints an answer while it is made. What imports
torch or transformers is imported by the function that needs it: `outrider --help` must answer at
once. Text goes to stdout, everything else to stderr.

Exit codes: 0 done, 1 a run that failed, 2 bad input, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `outrider` command; Ctrl-C while its own modules are imported ends it like
    any other."""
    try:
        from outrider.cli import app
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    app.main()


__all__ = ["main"]
