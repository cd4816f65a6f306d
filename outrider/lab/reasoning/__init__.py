"""The case to shine on: worked solutions. `study.py` is the way in, `result.py` what comes out, `kinds.py` the kinds of step."""
