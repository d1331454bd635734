"""Training programs by others, in jobs: fetched with their packages, edited as the docs say, and compared with DDP.

`programs.toml` has the table, `packages.py` fetches, `edits.py` edits, `running.py` runs and compares, `page.py` writes docs/programs.md.
`python -m tests.programs [NAME …]` runs programs in all modes and writes their results.
"""
