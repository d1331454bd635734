"""The files of a run as the drivers write and read them: claims, manifests, what lies beside them. Disk work, step by step."""

from __future__ import annotations

import re
from collections.abc import Callable

from psjob.checkpoint.disk import Damage
from psjob.process.errors import Fenced
from tests.simulation.protocol.promises import Saved
from tests.simulation.protocol.volume import TEMP, Job, Volume

_MANIFEST = re.compile(r"manifest-v(\d{6,})-s(\d{12,})\.json")
_CLAIM = re.compile(r"CLAIM-(\d{6,})")
_DATA = re.compile(r"v(\d{6,})-c(\d{6,})-")
SMALL = 2_000


def manifest_name(term: int, step: int) -> str:
    """As `Manifest.name`."""
    return f"manifest-v{term:06d}-s{step:012d}.json"


def data_name(term: int, snapshot: int, shard: int, attempt: int) -> str:
    """The file of a shard's part of a snapshot."""
    return f"v{term:06d}-c{snapshot:06d}-shard{shard:03d}-a{attempt}.safetensors"


def claim(volume: Volume, pod: str, term: int) -> Job:
    """As `checkpoint.claim.claim_term`."""
    yield from check(volume, pod, term)
    yield volume.seconds(pod)
    new = volume.exclusive(pod, f"CLAIM-{term:06d}", pod)
    if new:
        yield from volume.sync_folder(pod)
    yield from check(volume, pod, term)
    return new


def check(volume: Volume, pod: str, term: int, owner: bool = True) -> Job:
    """As `checkpoint.claim.check_claim`. Raises Fenced."""
    names = yield from volume.listing(pod)
    terms = [int(match[1]) for name in names if (match := _CLAIM.fullmatch(name))]
    if not terms or max(terms) < term:
        return
    if max(terms) > term:
        raise Fenced(f"term {max(terms)} of this run is claimed; this is term {term}", max(terms))
    held = volume.files.get(f"CLAIM-{term:06d}")
    if owner and held is not None and held.content != pod:
        raise Fenced(f"term {term} of this run is claimed by {held.content}; this is {pod}", term)


def highest_claim(volume: Volume) -> int:
    """The highest term that is claimed."""
    return max((int(match[1]) for name in volume.files if (match := _CLAIM.fullmatch(name))), default=0)


def newest(volume: Volume, pod: str, passed: frozenset[str] = frozenset()) -> Job:
    """As `checkpoint.manifest.newest_manifest`: (manifest or None, what was passed over).

    What it lists must be there; its bytes are not read.
    """
    problems: list[str] = []
    names = yield from volume.listing(pod)
    found = sorted(((int(m[1]), int(m[2]), name) for name in names if (m := _MANIFEST.fullmatch(name))), reverse=True)
    for _, _, name in found:
        if name in passed:
            continue
        try:
            saved = yield from volume.read(pod, name)
            for data in saved.files:
                if data not in volume.files:
                    raise Damage(data, "a file", "nothing")
            return saved, problems
        except Damage as problem:
            problems.append(f"checkpoint {name} is passed over: {problem}")
    return None, problems


def commit(volume: Volume, pod: str, saved: Saved, renamed: Callable[[], None]) -> Job:
    """As `checkpoint.manifest.commit`; `renamed()` is called when the manifest has its name."""
    yield from check(volume, pod, saved.term)
    yield from volume.write_whole(pod, saved.name, saved, SMALL, renamed)
    yield from check(volume, pod, saved.term)


def prune(volume: Volume, pod: str, keep: int, saved: Saved) -> Job:
    """As `checkpoint.manifest.prune`: manifests beyond the newest `keep`, then older files that none lists."""
    yield from check(volume, pod, saved.term, owner=False)
    names = yield from volume.listing(pod)
    for name in names:
        match = _CLAIM.fullmatch(name)
        if match is not None and int(match[1]) < saved.term:
            volume.unlink(pod, name)
    ordinary = 0
    manifests = sorted(((int(m[1]), int(m[2]), name) for name in names if (m := _MANIFEST.fullmatch(name))), reverse=True)
    for term, step, name in manifests:
        content = volume.files[name].content if name in volume.files else None
        if not isinstance(content, Saved):
            continue
        if not content.final and (term, step) <= (saved.term, saved.step):
            ordinary += 1
            if ordinary > max(1, keep):
                volume.unlink(pod, name)
    yield volume.seconds(pod)
    yield from _removed(volume, pod, lambda term, number: (term, number) < (saved.term, saved.snapshot))


def sweep(volume: Volume, pod: str, before: int) -> Job:
    """Delete data files of snapshots below number `before`, of whatever term, that no manifest lists."""
    yield from _removed(volume, pod, lambda _term, number: number < before)


def _removed(volume: Volume, pod: str, goes: Callable[[int, int], bool]) -> Job:
    """Delete the data files that no manifest lists and whose term and snapshot are to go."""
    names = yield from volume.listing(pod)
    kept = [file.content for name, file in volume.files.items() if _MANIFEST.fullmatch(name) and isinstance(file.content, Saved)]
    listed = {name for made in kept for name in (made.name, *made.files)}
    for name in names:
        match = _DATA.match(name.removesuffix(TEMP))
        if match is not None and goes(int(match[1]), int(match[2])) and name not in listed:
            volume.unlink(pod, name)
