"""Faults that are put into a copy of the sources, and the tests that must fail with them.

`python -m hack.mutants --table` puts in the faults of `byhand.py`, one at a time. `--random N --seed S` draws faults from the syntax of the
pure packages. `python -m hack.mutants.idle` names tests that assert nothing.
"""
