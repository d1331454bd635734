"""What a worker with a key says beside its pushes: names, aliases and clocks that cannot be are not taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from psjob.layout.blocks import MAX_NAME, RESERVED, TensorSpec, check_aliases, check_table
from psjob.shard.checks import MOST_AHEAD
from psjob.shard.coordinator_driver import numbers_of
from psjob.wire.auth import Peer
from psjob.wire.frame import Header, Kind
from psjob_operator.cluster.progress import parse
from tests.tensors.whole_shard import HELLO, RECORD, WholeShard, frame


def test_reported_numbers_have_printable_names() -> None:
    body: Mapping[str, Any] = {"\x1b[2Jloss\n": 1.0, "a\u202eb": 1, "\ud800": 2.0, "x\ny": "nan", "loss": 2, "Güte 1": 0.5}
    assert numbers_of(body) == {"loss": 2, "Güte 1": 0.5}


def test_the_operator_keeps_no_escapes_in_names() -> None:
    told = parse(b'{"coordinator": {"metrics": {"\\u001b[2Jloss\\n": 1.0}}}')
    assert told is not None and told["coordinator"]["metrics"] == {r"\x1b[2Jloss\n": 1.0}


@pytest.mark.parametrize("clock", [1 << 62, (1 << 63) - 1, MOST_AHEAD + 1])
@pytest.mark.parametrize("kind", [Kind.RECORD, Kind.MARK])
def test_a_clock_that_nobody_has_come_to_ends_the_stream(tmp_path: Path, clock: int, kind: Kind) -> None:
    shard = WholeShard(tmp_path)
    try:
        shard.begin()

        def say(base: Header) -> Sequence[tuple[bytes, bytes]]:
            hello = frame(Kind.HELLO, HELLO, base)
            near = frame(Kind.RECORD, RECORD, base, clock=1)
            far = frame(kind, RECORD if kind is Kind.RECORD else b"", base, clock=clock)
            return [hello, near, far, frame(Kind.RECORD, RECORD, base, clock=2)]

        heard = shard.converse(Peer("worker", 0, 1), say)
        assert f"worker 0 names step {clock}; this shard has 0 complete steps".encode() in heard
        member = shard.coordinator.machine.state.members[0]
        assert member.clock == 1 and 1 in member.records
    finally:
        shard.close()


ODD_ALIASES: list[tuple[dict[Any, Any], str]] = [
    ({RESERVED: "w0"}, "files of tensors keep the name '__metadata__'"),
    ({"w1": "w0"}, "'w1' is a further name of a tensor, and the name of another one"),
    ({"w0": "w0"}, "'w0' is a further name"),
    ({"": "w0"}, "printable characters"),
    ({"a\n": "w0"}, "printable characters"),
    ({"\ud800": "w0"}, "printable characters"),
    ({"a" * (MAX_NAME + 1): "w0"}, "printable characters"),
    ({"a": "x"}, "'a' is a further name of 'x', which is no tensor"),
    ({"a": 1}, "which is no tensor"),
    ({"a": ["w0"]}, "which is no tensor"),
]


@pytest.mark.parametrize(("aliases", "why"), ODD_ALIASES)
def test_aliases_that_no_file_can_hold_are_refused_in_a_hello(tmp_path: Path, aliases: dict[Any, Any], why: str) -> None:
    shard = WholeShard(tmp_path)
    try:
        heard = shard.converse(Peer("worker", 0, 1), lambda base: [frame(Kind.HELLO, HELLO | {"aliases": aliases}, base)])
        assert why.encode() in heard and b"refused" in heard
        assert shard.coordinator.machine.state.aliases == ()
    finally:
        shard.close()


def test_an_alias_of_a_tensor_is_taken_and_a_reserved_name_is_no_tensor(tmp_path: Path) -> None:
    check_aliases({"head.weight": "w"}, (TensorSpec("w", (2,), "float32", 0),))
    with pytest.raises(ValueError, match="keep the name '__metadata__'"):
        check_table((TensorSpec(RESERVED, (2,), "float32", 0),))
    shard = WholeShard(tmp_path)
    try:
        shard.converse(Peer("worker", 0, 1), lambda base: [frame(Kind.HELLO, HELLO | {"aliases": {"tied": "w1"}}, base)])
        assert shard.coordinator.machine.state.aliases == (("tied", "w1"),)
    finally:
        shard.close()
