"""`python -m tests.simulation`, see `protocol.cli`."""

import sys

from tests.simulation.protocol.cli import main

if __name__ == "__main__":
    sys.exit(main())
