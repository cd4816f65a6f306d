"""Outrider inside other people's programs: one module per host, imported by the user who has that host."""
