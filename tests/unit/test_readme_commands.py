"""What hack/readme.py takes from a page."""

from __future__ import annotations

import pytest

from hack.readme import commands

PAGE = """# Top

```sh
make nothing
```

## Start

Words.

```sh
# a comment
one --flag \\
  --other

two && three
```

```python
# Not a heading
four
```

### Below it

```sh
five # with a word
```

## Next

```sh
six
```
"""


def test_commands_of_a_section_come_in_their_order() -> None:
    assert commands(PAGE, "Start") == ["one --flag --other", "two && three", "five # with a word"]
    assert commands(PAGE, "Below it") == ["five # with a word"]
    assert commands(PAGE, "Next") == ["six"]
    assert len(commands(PAGE, "Top")) == 5


def test_a_section_that_is_not_there_is_an_error() -> None:
    for title in ("Nowhere", "Not a heading"):
        with pytest.raises(LookupError, match=title):
            commands(PAGE, title)
