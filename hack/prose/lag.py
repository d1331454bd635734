"""psjob's word lag stands beside the field's word, staleness, where a text uses it first."""

from __future__ import annotations

import re

NEAR = 300
"""Characters before and after the first lag in which the staleness is looked for."""
WORD = re.compile(r"\blags?\b", re.IGNORECASE)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)\n]*\)", re.MULTILINE | re.DOTALL)


def bare(text: str) -> int | None:
    """The line, from 1, of the first lag outside code, where no staleness is near; None where all is well."""
    prose = CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    found = WORD.search(prose)
    if found is None or "staleness" in text[max(0, found.start() - NEAR) : found.end() + NEAR].lower():
        return None
    return text.count("\n", 0, found.start()) + 1
