"""What a file costs a shard that begins or looks at it: manifests, tensors' headers, admission tables, cuts and the config."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from psjob import contract
from psjob.checkpoint import claim, files, manifest
from psjob.checkpoint.files import FileFact
from psjob.checkpoint.manifest import Manifest
from psjob.checkpoint.states import _positions, open_blocks, read_admission
from psjob.process import config
from psjob.shard import rendezvous
from tests.costs import LIMIT_SECONDS, MOST_BYTES, MOST_MEMORY, dearest, memory, more, seconds
from tests.fuzzing import changed_json, json_changes
from tests.soaking import rotating, soak
from tests.tensors import checkpoint_parts as parts
from tests.tensors.checkpoint_rows import World

CONFIG = {
    "format": contract.CONFIG_FORMAT, "job": "job", "run": "run-1", "specHash": "0" * 64, "mode": "async", "seed": 1, "updateAt": None,
    "workers": 4, "shards": [{"host": "127.0.0.1", "port": 7070, "statusPort": 7071}] * 3, "successPolicy": "AllWorkers",
    "checkpoint": {"intervalSeconds": 0.5, "everySteps": None, "keep": 2, "disabled": False, "resumeFrom": None},
    "shardTimeoutSeconds": 10.0, "connectSeconds": 20, "updateRule": "adagrad", "ruleOptions": {"lr": 0.1},
}  # fmt: skip
NAMES = ("manifest", "header", "admission", "cuts", "config")
SMALL = 4096
"""Bytes of files that cannot cost: claims and keys."""


class Kinds:
    """By name, what reads a file, and files to begin with."""

    def __init__(self, folder: Path) -> None:
        world = World(folder)
        world.push()
        world.checkpoint()
        assert world.made is not None
        self.folder, self.made = folder, world.made
        table = json.loads((folder / self.made.tables["0"].name).read_bytes())
        row = table["rows"][0]
        tensors = [(f"w{number}", "float32", (1, 1)) for number in range(3)]
        self.seeds: dict[str, Any] = {
            "manifest": json.loads(manifest.encode(self.made)),
            "header": json.loads(files.make_header(tensors)[0][8:]),
            "admission": table | {"rows": [[*row[:5], "f" * 10]] * 20},
            "cuts": {"run": parts.RUN, "cuts": ["a", "b"], "seconds": 1.0},
            "config": CONFIG,
        }
        self.readers: dict[str, Callable[[bytes], object]] = {
            "manifest": lambda raw: manifest.decode(raw, self.made.name),
            "header": lambda raw: files.read_header(raw, 12),
            "admission": self._admission,
            "cuts": self._cuts,
            "config": self._config,
        }

    def _cuts(self, raw: bytes) -> None:
        (self.folder / rendezvous.FILE).write_bytes(raw)
        place = SimpleNamespace(run=parts.RUN, config=SimpleNamespace(stages=SimpleNamespace(replicas=(1, 1, 1))))
        rendezvous.PartitionStore(cast(Any, place), self.folder).kept()

    def _config(self, raw: bytes) -> None:
        path = self.folder / "config.json"
        path.write_bytes(raw)
        problems: list[str] = []
        assert (config._read(str(path), problems) is None) == bool(problems)

    def _admission(self, raw: bytes) -> None:
        path = self.folder / "a.json"
        path.write_bytes(raw)
        odd: Manifest = replace(self.made, tables={"0": FileFact(path.name, len(raw), zlib.crc32(raw), {})})
        rows = read_admission(self.folder, odd, 0)
        assert rows is not None
        open_blocks(odd, {0: rows})

    def whole(self, name: str, body: Any) -> bytes:
        """A file of this body; of a manifest with its own hash, so that all of it is read."""
        if name == "manifest" and isinstance(body, dict):
            body = {key: value for key, value in body.items() if key != "sha256"}
            body["sha256"] = manifest._hash(body)
        return json.dumps(body, separators=(",", ":")).encode()

    def change(self, name: str) -> Callable[[Random, bytes, bytes], bytes]:
        def change(random: Random, one: bytes, other: bytes) -> bytes:
            made = more(random, one, other)
            try:
                body = json.loads(made)
            except (ValueError, RecursionError):
                body = changed_json(json.loads(self.whole(name, self.seeds[name])), json_changes(random))
            try:
                return self.whole(name, body)
            except (ValueError, RecursionError):
                return made

        return change

    def grown(self, name: str) -> Iterator[bytes]:
        """A MiB of each of its lists and objects, one at a time."""
        for key, part in self.seeds[name].items():
            for filled in (part, [part], [[]], [{}], {"a": 0}, {"a": {"b": []}}):
                times = (MOST_BYTES - (1 << 17)) // (len(json.dumps(filled)) + 9)
                if isinstance(filled, list):
                    body = self.seeds[name] | {key: filled * times}
                elif isinstance(filled, dict):
                    body = self.seeds[name] | {key: {f"{at}{n}": value for n in range(times) for at, value in filled.items()}}
                else:
                    continue
                raw = self.whole(name, body)
                if len(raw) <= MOST_BYTES:
                    yield raw


@pytest.mark.parametrize(("name", "rounds"), [*(rotating(name, 4) for name in NAMES), *(soak(name, 100) for name in NAMES)])
@pytest.mark.timeout(3600)
def test_no_file_of_a_mebibyte_costs_more_than_a_tenth_of_a_second(tmp_path: Path, name: str, rounds: int) -> None:
    kinds = Kinds(tmp_path)
    seed = 1 if rounds < 50 else Random().randrange(1 << 32)
    begin = [kinds.whole(name, kinds.seeds[name]), *islice(kinds.grown(name), None if seed > 1 else 1)]
    took, worst = dearest(begin, kinds.change(name), len, seconds(kinds.readers[name]), rounds, seed)
    assert took <= LIMIT_SECONDS, f"{took:.3f} s of {len(worst)} bytes: {worst[:300]!r} … {worst[-300:]!r}, seed {seed}"
    held, worst = dearest(begin, kinds.change(name), len, memory(kinds.readers[name]), rounds // 4, seed)
    assert held <= MOST_MEMORY, f"{held / 2**20:.0f} MiB of {len(worst)} bytes: {worst[:300]!r} … {worst[-300:]!r}, seed {seed}"


def test_the_open_blocks_of_a_large_model_are_read_in_one_pass() -> None:
    bits = "f" * 16_000 + "0" * 16_000 + "5"
    began = time.thread_time()
    found = _positions(bits, 4 * len(bits))
    assert time.thread_time() - began <= LIMIT_SECONDS
    assert found[:3] == [0, 2, 64_004] and len(found) == 64_002


def test_other_files_are_too_small_to_cost() -> None:
    assert claim.MAX_OWNER < SMALL and config.MOST_KEY_BYTES <= SMALL and rendezvous.MOST_PARTITION_BYTES <= MOST_BYTES
