"""What the generator calls for each page that it has made."""

from __future__ import annotations

import re
from typing import Any

BLOCK = re.compile(r'<div class="highlight">(.*?)</div>', re.DOTALL)
LINES = re.compile("[─│┌┐└┘├┤▶◀▲▼]")
"""Letters of which boxes and arrows are drawn."""
DIALOG = 'data-md-component="search" role="dialog"'


def on_post_page(output: str, **_: Any) -> str:
    """Give the dialog of the search its name, which screen readers say, and mark drawings, whose lines must not be broken."""
    if output.count(DIALOG) != 1:
        raise ValueError("the theme has changed its search dialog; look again at hack/site/hooks.py")
    named = output.replace(DIALOG, f'{DIALOG} aria-label="Search"')
    return BLOCK.sub(lambda found: found[0].replace("highlight", "highlight drawing", 1) if LINES.search(found[1]) else found[0], named)
