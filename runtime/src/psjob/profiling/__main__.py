"""`python -m psjob.profiling REQUEST`: what `psjob plan-stages` starts. The profile is written to a file, errors are one sentence."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2


def main() -> int:
    """REQUEST is JSON: script, function (null: none), args, meta, out, and the largest number of bytes that a model may take."""
    if len(sys.argv) != 2:
        print("psjob.profiling: its options are those of `psjob plan-stages --help`", file=sys.stderr)
        return EXIT_BAD_INPUT
    request = json.loads(sys.argv[1])
    from psjob.profiling.find import Found, Unfound, from_function, from_script
    from psjob.profiling.profile import profiled

    def write(found: Found) -> None:
        made = profiled(found)
        Path(request["out"]).write_text(json.dumps(made))

    def write_and_end(found: Found) -> None:
        try:
            write(found)
        except BaseException as error:
            _told(error)
            _end(EXIT_FAILED)
        _end(0)

    script = Path(request["script"])
    try:
        if request["function"] is not None:
            write(from_function(script, request["function"], request["args"], request["meta"], request["room"]))
        else:
            from_script(script, request["args"], write_and_end)
    except Unfound as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    except (Exception, SystemExit) as error:
        _told(error)
        return EXIT_FAILED
    return 0


def _told(error: BaseException) -> None:
    """The last line is what a user is shown."""
    from psjob.profiling.find import Unfound

    if isinstance(error, SystemExit):
        print(f"the script ended itself with {error.code}", file=sys.stderr)
    elif isinstance(error, Unfound):
        print(error, file=sys.stderr)
    else:
        traceback.print_exception(error)
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)


def _end(code: int) -> Any:
    """Without what the script would still do: its threads, its exit functions."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    raise SystemExit(main())
