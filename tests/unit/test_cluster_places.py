"""Watched namespaces, one by one: a table of what is known, and what follows."""

from __future__ import annotations

import pytest

from psjob_operator.cluster.client import JOBS, PODS, POLICIES
from psjob_operator.cluster.watch import Places

KINDS = (JOBS, PODS, POLICIES)


def known(namespaces: tuple[str, ...], steps: list[tuple[str, str]]) -> Places:
    """`steps`: (place, what), such as listed, `no list pods`, `may list pods`."""
    places = Places(namespaces, KINDS)
    by_name = {kind.plural: kind for kind in KINDS}
    for place, what in steps:
        if what == "listed":
            for kind in KINDS:
                places.listed(kind, place)
        else:
            word, verb, plural = what.split()
            if word == "no":
                places.refused(by_name[plural], place, verb, "forbidden")
            else:
                places.may(by_name[plural], place, verb)
    return places


ROWS: list[tuple[str, tuple[str, ...], list[tuple[str, str]], bool, str, dict[str, bool]]] = [
    ("nothing yet", ("a", "b"), [], False, "", {"a": False, "b": False}),
    ("one of two listed", ("a", "b"), [("a", "listed")], False, "", {}),
    ("both listed", ("a", "b"), [("a", "listed"), ("b", "listed")], True, "", {}),
    ("one listed, one refused", ("a", "b"), [("a", "listed"), ("b", "no list pods")], True, "", {"a": False, "b": True}),
    ("refused after it was listed", ("a", "b"), [("a", "listed"), ("b", "listed"), ("b", "no watch pods")], True, "", {"b": True}),
    ("one refused, one not listed yet", ("a", "b"), [("b", "no list pods")], False, "", {"a": False}),
    (
        "both refused",
        ("a", "b"),
        [("a", "no list pods"), ("b", "no list pstrainingjobs")],
        False,
        "the right to list pods in namespace a: forbidden",
        {"a": True, "b": True},
    ),
    ("granted again", ("a",), [("a", "listed"), ("a", "no watch pods"), ("a", "may watch pods")], True, "", {"a": False}),
    (
        "another verb is granted",
        ("a",),
        [("a", "no watch pods"), ("a", "listed")],
        False,
        "the right to watch pods in namespace a: forbidden",
        {},
    ),
    ("everywhere, refused", (), [("", "no list pods")], False, "the right to list pods: forbidden", {"anything": True}),
    ("everywhere, listed", (), [("", "listed")], True, "", {"anything": False}),
    ("what is optional is done without", ("a",), [("a", "no list networkpolicies"), ("a", "listed")], True, "", {"a": False}),
]


@pytest.mark.parametrize(("namespaces", "steps", "whole", "blind", "shut"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_each_namespace_counts_by_itself(
    namespaces: tuple[str, ...], steps: list[tuple[str, str]], whole: bool, blind: str, shut: dict[str, bool]
) -> None:
    places = known(namespaces, steps)
    assert (places.whole, places.blind) == (whole, blind)
    assert {place: bool(places.shut(place)) for place in shut} == shut
