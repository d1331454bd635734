"""How this process began, noted when psjob is imported: a script that starts again in place finds that again."""

from __future__ import annotations

import os

FOLDER = os.getcwd()
ENVIRONMENT = dict(os.environ)
