"""`python -m tests.frameworks.alone SCRIPT` runs the script outside a job."""

import runpy
import sys

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
