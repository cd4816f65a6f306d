"""Outrider inside other people's programs: one module or package per host, imported by the user who
has that host."""
