"""Flowcharts of pages become pictures; what is not drawn is named."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from hack.site.flowchart import Edge, pictured, placed, read, svg
from tests.docs.finding import ALL

CHART = """flowchart LR
  a[first<br>one & all] --> b --> c[third]
  b <--> d
  c -- words --> a
"""


def test_nodes_and_edges_are_read() -> None:
    nodes, edges = read(CHART)
    assert nodes == {"a": "first<br>one & all", "b": "b", "c": "third", "d": "d"}
    assert edges == [Edge("a", "b", "", False), Edge("b", "c", "", False), Edge("b", "d", "", True), Edge("c", "a", "words", False)]


def test_columns_go_to_the_right_and_no_box_lies_over_another() -> None:
    boxes = placed(*read(CHART))
    assert boxes["a"].x < boxes["b"].x < boxes["c"].x == boxes["d"].x
    assert boxes["c"].y + boxes["c"].height < boxes["d"].y
    assert boxes["a"].lines == ("first", "one & all")


def test_a_picture_is_one_line_of_well_formed_html_that_names_each_arrow() -> None:
    made = svg(CHART)
    (picture,) = ElementTree.fromstring(made)  # noqa: S314
    assert "\n" not in made and picture.get("aria-label") == "a to b; b to c; b and d; c to a: words"
    assert len(picture.findall("rect")) == 4 and len(picture.findall("path")) == 4
    assert [text.text for text in picture.findall("text")] == ["words", "first", "one & all", "b", "third", "d"]


def test_a_page_keeps_all_else() -> None:
    page = f"# A\n\n```mermaid\n{CHART}```\n\n```sh\nls\n```\n"
    made = pictured(page)
    assert made.startswith("# A\n\n<div") and made.endswith("</div>\n\n```sh\nls\n```\n")


@pytest.mark.parametrize(
    "text", ["sequenceDiagram\n  a->>b: x", "flowchart TD\n  a --> b", "flowchart LR\n  a{x} --> b", "flowchart LR\n  a ==> b"]
)
def test_what_is_not_drawn_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape("hack/site/flowchart.py draws")):
        svg(text)


def test_the_pages_have_some() -> None:
    assert len([svg(block.text) for block in ALL if block.kind == "mermaid"]) == 2
