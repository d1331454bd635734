"""Every link and anchor between the pages of the repository leads somewhere."""

from __future__ import annotations

import pytest
import yaml

from hack.site.__main__ import HERE, existing
from hack.site.links import anchors, broken, links, slug
from hack.site.stage import pages, prepared
from tests.docs import ROOT

PAGE = """# A page of `psjob run`

Look [here](other.md#a-place), [there](other.md), [up](#twice-1) and [out](https://example.com/x.md#y). Not `[code](gone.md)`.

## Twice
```sh
# Twice
[fenced](gone.md)
```
## Twice
![picture](gone.svg)
"""


def test_no_link_of_the_repository_is_dead() -> None:
    texts = pages(ROOT)
    assert len(texts) > 80 and sum(len(links(text)) for text in texts.values()) > 400
    assert broken(texts, existing(ROOT)) == []


def test_the_list_by_task_leads_to_every_page_and_its_parts_are_not_long() -> None:
    """Contributing, manifest, modes, performance, rules and decisions have lists of their own."""
    text = pages(ROOT)["docs/index.md"]
    named = {f"docs/{one.target}" for one in links(text)}
    own = ("docs/contributing/", "docs/manifest/", "docs/modes/", "docs/performance/", "docs/rules/", "docs/design/")
    assert {page for page in pages(ROOT) if page.startswith("docs/") and not page.startswith(own)} - named == {"docs/index.md"}
    assert {f"{folder}index.md" for folder in own} <= named
    parts = text.split("\n## ")[1:]
    assert len(parts) == 9 and all(3 <= part.count("\n| ") - 2 <= 8 for part in parts)


def test_an_entry_of_the_changelog_is_one_short_line() -> None:
    lines = [line for line in pages(ROOT)["CHANGELOG.md"].split("### Added", 1)[1].splitlines() if line and not line.startswith("#")]
    entries = [line for line in lines if line.startswith("- ")]
    assert len(entries) > 50 and all(len(entry) <= 165 for entry in entries)
    assert [line for line in lines if line not in entries] == ["These are renames and new defaults for those who follow the main branch."]


def test_links_are_those_outside_of_code() -> None:
    assert [(one.target, one.line) for one in links(PAGE)] == [
        ("other.md#a-place", 3), ("other.md", 3), ("#twice-1", 3), ("https://example.com/x.md#y", 3), ("gone.svg", 11),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("`psjob run`", "psjob-run"),
        ("Push and pull, without a gradient", "push-and-pull-without-a-gradient"),
        ("5. On a cluster", "5-on-a-cluster"),
        ("[Data](data.md) — who", "data--who"),
        ("spec.ps_shards", "specps_shards"),
    ],
)
def test_an_anchor_is_that_of_github(heading: str, anchor: str) -> None:
    assert slug(heading) == anchor


def test_headings_that_are_equal_are_counted() -> None:
    assert anchors(PAGE) == {"a-page-of-psjob-run", "twice", "twice-1"}


def test_a_dead_link_and_a_dead_anchor_are_named_with_their_lines() -> None:
    texts = {"docs/page.md": PAGE, "docs/other.md": "# Other\n"}
    assert broken(texts, set(texts)) == [
        "docs/page.md:3: other.md#a-place: docs/other.md has no heading #a-place",
        "docs/page.md:11: gone.svg: there is no docs/gone.svg",
    ]


def test_a_list_below_a_paragraph_gets_the_blank_line_that_the_generator_needs() -> None:
    told = prepared("docs/x.md", "Two:\n- one\n  continues\n- two\n```\ntext\n- code\n```\nA table:\n| a |\n| --- |\n", set())
    assert told == "Two:\n\n- one\n  continues\n- two\n```\ntext\n- code\n```\nA table:\n\n| a |\n| --- |\n"


def test_a_link_to_a_folder_leads_to_its_page() -> None:
    told = prepared("docs/x.md", "[a](../examples/lda) [b](../tests)\n", {"docs/x.md", "examples/lda/README.md"})
    assert told == "[a](../examples/lda/README.md) [b](../tests)\n"


def test_the_navigation_has_every_page_once() -> None:
    class Loader(yaml.SafeLoader):
        """Leaves the tags of the generator unread."""

    Loader.add_multi_constructor("", lambda loader, suffix, node: suffix)
    tree = yaml.load((HERE / "mkdocs.yml").read_text(), Loader)["nav"]  # noqa: S506
    assert [name for part in tree for name in part] == ["Start", "Tutorials", "How-to", "Reference", "Explanation", "Contribute"]
    named = list(leaves(tree))
    assert sorted(named) == sorted(pages(ROOT))


def leaves(tree: object) -> list[str]:
    if isinstance(tree, str):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [leaf for part in parts for leaf in leaves(part)]
