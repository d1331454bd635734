"""What is said of a start that is not what the one before it was: what it has lost, what it made otherwise, where its loop begins."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from psjob.api import advice, values
from psjob.process.errors import Refused


def refuse(found: Sequence[str]) -> None:
    """Raises Refused if this start has not made again what had changed: names with their classes."""
    lost = list(dict.fromkeys(found))
    if lost:
        raise Refused(
            f"{', '.join(lost[:5])}{' …' if len(lost) > 5 else ''} had changed since the script began to train, and nobody keeps it, "
            f"so that this start cannot continue as the lost process would have. Give it to attach or to ps.state, such as "
            f"ps.state({lost[0].partition(' ')[0].rpartition('.')[2]}=…), and begin a new run"
        )


def tell_lost(name: str, thing: Any, when: str) -> None:
    """Say once that something changes which nobody keeps. `when`: what will be refused then."""
    word = name.rpartition(".")[2]
    advice.tell(
        "lost",
        f"{name} ({type(thing).__name__}) changes as the script trains, and nobody keeps it: {when} refused. Give it to attach, or "
        f"declare it: ps.state({word}=…)",
    )


def check_loops(loops: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]]) -> None:
    """Raises Refused if the script has begun its loop further on, as one that goes on from a file of its own.

    By function and variable, the numbers at which `for` loops were as the script first asked for data.
    """
    for function, names in loops.items():
        for name, began in names.items():
            begins = now.get(function, {}).get(name, began)
            if begins != began:
                raise Refused(
                    f"the loop over {name} began at {begins} in this start, and at {began} in the one before. The script continues from a "
                    f"file of its own, and so does psjob. Write `for {name} in ps.epochs(n)`, which gives what is left of it wherever "
                    "the script begins. Or do not read that file in a job"
                )


def check_made(made: Mapping[str, Mapping[str, Collection[Any]]], now: Mapping[tuple[str, str], int]) -> None:
    """Raises Refused if what had not changed when the record was made is not what it was: by function and name, class and checksum."""
    for function, names in made.items():
        for path, (kind, sample) in names.items():
            if now.get((function, path), sample) != sample:
                raise Refused(
                    f"{path} ({kind}) is made anew in this start, and is not what it was in the one before. It is made of the model's "
                    "weights, or of random numbers without a seed. Give it to attach or to ps.state, such as "
                    f"ps.state({path.rpartition('.')[2]}=…)"
                )


def check_state(path: str, thing: Any, given: Mapping[str, Any]) -> None:
    """Raises Refused if an object gives other counts than those that it was given by `load_state_dict`: it works them out anew."""
    now, again = values.state_of(thing) or {}, values.state_of(thing) or {}
    for key, wanted in given.items() if now else ():
        found = now.get(key)
        if type(wanted) in (bool, int, str) and not values.same(found, wanted) and values.same(found, again.get(key)):
            raise Refused(
                f"{path} ({type(thing).__name__}) was given {key} = {wanted!r} by its load_state_dict, and its state_dict says "
                f"{found!r} after that. Keep what it counts in ps.state, such as ps.state({key}=…), and begin a new run"
            )
