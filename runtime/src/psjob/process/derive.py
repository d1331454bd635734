"""Derive one process's key file from its run's keys: `python -m psjob.process.derive --from FOLDER --to FILE`.

What an init container runs in an image that has psjob installed. Role, index and number come by contract's environment.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from psjob import contract
from psjob.contract import keys


def main(arguments: list[str] | None = None) -> int:
    """Write each file whole or not at all; what is wrong is one line on stderr, and 1."""
    parser = argparse.ArgumentParser(prog="python -m psjob.process.derive", description="Derive a process's keys from its run's.")
    parser.add_argument("--from", dest="source", type=Path, required=True, help="folder with the run's keys, a file each")
    parser.add_argument("--to", dest="target", type=Path, required=True, help="the file to write")
    asked = parser.parse_args(arguments)
    try:
        run = {name: bytes.fromhex((asked.source / name).read_text()) for name in keys.NAMES}
        role, index = os.environ[contract.ENV_ROLE], int(os.environ[contract.ENV_INDEX])
        number = int(os.environ[contract.ENV_START if role == "worker" else contract.ENV_ATTEMPT])
        own = contract.CERTIFICATE if role == "shard" else contract.WORKER_CERTIFICATE
        for name in (contract.AUTHORITY, own.format(index=index)):
            if (asked.source / name).exists():
                _write(asked.target.with_name(name), (asked.source / name).read_text())
        _write(asked.target, keys.process_key_file(run, role, index, number))
    except (OSError, KeyError, ValueError) as error:
        print(f"psjob: cannot derive this process's keys from {asked.source} into {asked.target}: {error!r}", file=sys.stderr)
        return 1
    return 0


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)  # one that broke off before left it read-only
    part.write_text(text)
    part.chmod(0o444)
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main())
