"""`python -m psjob.simulate`: what `psjob simulate` starts."""

from __future__ import annotations

import os
import sys

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")  # small arrays: a second thread costs more than it brings; read when numpy is imported


def main() -> int:
    """Run the command line. What is not installed is named in a sentence."""
    try:
        from psjob.simulate.cli import run

        return run(sys.argv[1:])
    except ModuleNotFoundError as error:
        print(f"psjob simulate: needs {error.name}, which is not installed here: pip install 'psjob[simulate]'", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
