"""`python -m psjob.simulate`: what `psjob simulate` starts."""

from __future__ import annotations

import os
import sys

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")  # small arrays: a second thread costs more than it brings; read when numpy is imported


EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main() -> int:
    """Do what the one word asks for. What is not installed is named in a sentence; who stops reading, or stops all, gets no traceback."""
    try:
        from psjob.simulate.cli import run_asked

        if len(sys.argv) != 2:
            print("psjob simulate: its options are those of `psjob simulate --help`", file=sys.stderr)
            return EXIT_BAD_INPUT
        code = run_asked(sys.argv[1])
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Our reader has gone, as with `psjob simulate … | head`; nothing may be written to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("psjob simulate: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        print(f"psjob simulate: needs {error.name}, which is not installed here: pip install numpy scikit-learn", file=sys.stderr)
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    raise SystemExit(main())
