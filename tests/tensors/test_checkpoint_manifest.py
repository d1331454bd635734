"""Manifests: the newest whole one counts, damage means the one before it, and a newer term's claim stops an old one."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psjob.checkpoint import claim, disk, files, final, manifest, states
from psjob.checkpoint.disk import CheckpointProblem, Damage
from psjob.contract import FINAL_WEIGHTS
from psjob.process.errors import Fenced
from psjob.rules.base import BlockState
from tests.tensors.checkpoint_parts import HOWS, LAYOUT, RUN, blocks, damage, names, same, save


def committed(folder: Path, *steps: int, term: int = 1, **more: Any) -> list[manifest.Manifest]:
    made = [save(folder, step, term, **more) for step in steps]
    for one in made:
        manifest.commit(folder, one)
    return made


def test_the_newest_comes_back_whole(tmp_path: Path) -> None:
    first, second = committed(tmp_path, 0, 10)
    found, problems = manifest.newest_manifest(tmp_path, RUN)
    assert found == second != first and problems == []
    assert manifest.newest_manifest(tmp_path, None)[0] == second
    assert found is not None and found.name == "manifest-v000001-s000000000010.json" and found.bytes > 0


def test_a_higher_view_counts_more_than_a_higher_step(tmp_path: Path) -> None:
    committed(tmp_path, 50, term=1)
    (low,) = committed(tmp_path, 10, term=2)
    assert manifest.newest_manifest(tmp_path, RUN)[0] == low


def test_nothing_is_none_and_another_run_is_passed_over(tmp_path: Path) -> None:
    assert manifest.newest_manifest(tmp_path, RUN) == (None, [])
    assert manifest.newest_manifest(tmp_path / "missing", RUN) == (None, [])
    committed(tmp_path, 10, run="other")
    found, problems = manifest.newest_manifest(tmp_path, RUN)
    assert found is None and problems == ["manifest-v000001-s000000000010.json is of run other, not of run-1"]


@pytest.mark.parametrize("how", [*HOWS, "flip"])
@pytest.mark.parametrize("which", ["manifest", "shard000-a1.", "shard001-a1.", "records", "buffers", "shard001-a1-admission"])
def test_any_damage_means_the_one_before(tmp_path: Path, which: str, how: str) -> None:
    before, after = committed(tmp_path, 10, 20)
    name = after.name if which == "manifest" else next(n for n in names(tmp_path, "v000001-c000020") if which in n)
    if how == "flip":
        raw = bytearray((tmp_path / name).read_bytes())
        raw[len(raw) // 2] ^= 4
        (tmp_path / name).write_bytes(raw)
    else:
        damage(tmp_path / name, how)
    found, problems = manifest.newest_manifest(tmp_path, RUN)
    assert found == before
    if (which, how) != ("manifest", "gone"):
        assert len(problems) == 1
        assert problems[0].startswith(f"checkpoint {after.name} is passed over: ")
        assert name in problems[0]


def test_swapped_files_are_found(tmp_path: Path) -> None:
    before, _ = committed(tmp_path, 10, 20)
    one, two = (tmp_path / n for n in names(tmp_path, "v000001-c000020-shard") if n.endswith(".safetensors"))
    one.rename(tmp_path / "t")
    two.rename(one)
    (tmp_path / "t").rename(two)
    assert manifest.newest_manifest(tmp_path, RUN)[0] == before


def test_a_manifest_under_another_name_is_found(tmp_path: Path) -> None:
    (made,) = committed(tmp_path, 10)
    (tmp_path / "manifest-v000009-s000000000010.json").write_bytes((tmp_path / made.name).read_bytes())
    found, problems = manifest.newest_manifest(tmp_path, RUN)
    assert found == made and len(problems) == 1


def rewritten(made: manifest.Manifest, change: Any) -> bytes:
    """A manifest with a right hash over wrong contents."""
    body = json.loads(manifest.encode(made))
    body.pop("sha256")
    change(body)
    body["sha256"] = manifest._hash(body)
    return json.dumps(body).encode()


CHANGES: list[tuple[Any, str]] = [
    (lambda b: b.update(format=9), "a newer psjob wrote it"),
    (lambda b: b.pop("blocks"), "blocks"),
    (lambda b: b["blocks"].pop(), "blocks"),
    (lambda b: b["blocks"].append(b["blocks"][0]), "blocks"),
    (lambda b: b["files"][0].update(name="../../etc/passwd"), "plain name"),
    (lambda b: b["records"].update(name="/etc/passwd"), "plain name"),
    (lambda b: b["files"].pop(), "does not list it"),
    (lambda b: b["layout"]["table"][0].__setitem__(1, [1 << 60]), "size"),
    (lambda b: b.update(layoutDigest="0"), "digest"),
    (lambda b: b.update(step=-1), "whole number"),
    (lambda b: b.update(view="1"), "whole number"),
    (lambda b: b.update(request="7"), "whole number"),
    (lambda b: b.update(request=-7), "whole number"),
    (lambda b: b.update(run=7), "short text"),
    (lambda b: b.update(workers=[]), "not an object"),
    (lambda b: b["workers"]["clock"].append(1), "zip"),
    (lambda b: b["workers"]["start"].__setitem__(0, -1), "whole number"),
    (lambda b: b["tables"]["0"].update(name="../x"), "plain name"),
    (lambda b: b.update(assignment=[9] * len(b["assignment"])), "assignment"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_manifest_that_lies_is_damage(tmp_path: Path, change: Any, words: str) -> None:
    made = save(tmp_path, 10)
    with pytest.raises(Damage, match=words):
        manifest.decode(rewritten(made, change), made.name)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False,
        allow_infinity=False) | st.sampled_from([float("1e300"), 10**400, -1, "x", "../x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@given(st.data())
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_wrong_value_under_a_right_hash_is_damage_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    global _good
    if _good is None:
        folder = tmp_path_factory.mktemp("run")
        _good = folder, committed(folder, 10)[0]
    folder, made = _good

    def change(body: Any) -> None:
        at, key = body, data.draw(st.sampled_from(sorted(body)))
        while isinstance(at[key], dict | list) and at[key] and data.draw(st.integers(0, 3)):
            at = at[key]
            key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        at[key] = data.draw(json_values)

    try:
        changed = manifest.decode(rewritten(made, change), made.name)
        for fact in changed.listed():
            files.check_file(folder / fact.name, fact)
        states.read_states(folder, changed, range(len(changed.layout.blocks)))
    except Damage:
        pass


_good: tuple[Path, manifest.Manifest] | None = None


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[]", b"[" * 100_000, b'{"format": 2, "sha256": "x"}', b'{"a": 1e999}', b'{"a": NaN}', b"\xff"]
)
def test_what_is_no_manifest_is_damage(raw: bytes) -> None:
    with pytest.raises(Damage, match="m is damaged"):
        manifest.decode(raw, "m")


def test_a_manifest_of_an_older_format_is_refused_with_a_sentence(tmp_path: Path) -> None:
    before, after = committed(tmp_path, 10, 20)
    (tmp_path / after.name).write_bytes(rewritten(after, lambda body: body.update(format=1)))
    found, problems = manifest.newest_manifest(tmp_path, RUN)
    assert found == before and "has format 1, this psjob reads 2: an older psjob wrote it" in problems[0]


def test_the_request_that_it_answers_comes_back_and_older_manifests_have_none(tmp_path: Path) -> None:
    made = save(tmp_path, 10)
    assert "request" not in json.loads(manifest.encode(made)) and manifest.decode(manifest.encode(made), made.name).request is None
    asked = dataclasses.replace(made, request=2**53 - 1)
    assert manifest.decode(manifest.encode(asked), made.name) == asked


def test_the_manifest_of_the_largest_job_is_small(tmp_path: Path) -> None:
    """Admission tables lie beside it: what it has of 256 shards and 4,000 workers adds up, and is not multiplied."""
    made = save(tmp_path, 10)
    table = made.tables["0"]
    workers = {str(rank): {"clock": 10**6 + rank, "start": 3, "rewinds": 12, "leftAt": None} for rank in range(4000)}
    tables = {str(shard): dataclasses.replace(table, name=f"v000001-c000010-shard{shard:03d}-a1-admission.json") for shard in range(256)}
    raw = manifest.encode(dataclasses.replace(made, workers=workers, tables=tables))
    assert len(raw) < 200_000
    back = manifest.decode(raw, made.name)
    assert back.workers == workers and back.tables == tables


def test_a_shallow_look_leaves_bytes_to_those_who_read_them(tmp_path: Path) -> None:
    before, after = committed(tmp_path, 10, 20)
    path = tmp_path / after.files[0].name
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    assert manifest.newest_manifest(tmp_path, RUN, whole=False) == (after, [])
    assert manifest.newest_manifest(tmp_path, RUN, whole=False, passed={after.name}) == (before, [])
    path.write_bytes(raw[:-1])
    found, problems = manifest.newest_manifest(tmp_path, RUN, whole=False)
    assert found == before and path.name in problems[0]


def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    made = save(tmp_path, 10)
    for counters in ({"a": float("nan")}, {"a": object()}):
        with pytest.raises(CheckpointProblem, match="what JSON cannot"):
            manifest.commit(tmp_path, dataclasses.replace(made, counters=counters))
    assert manifest.newest_manifest(tmp_path, RUN) == (None, [])


# -- claims ----------------------------------------------------------------------------------------


def test_a_view_is_claimed_once(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "r"
    assert claim.highest(folder) is None
    assert claim.claim_term(folder, 3, "pod-a") is True
    assert claim.claim_term(folder, 3, "pod-a") is False
    assert claim.highest(folder) == (3, "pod-a")
    with pytest.raises(Fenced, match="term 3 of this run is claimed by pod-a; this is pod-b") as equal:
        claim.claim_term(folder, 3, "pod-b")
    with pytest.raises(Fenced, match="term 3 of this run is claimed by pod-a; this is term 2") as lower:
        claim.claim_term(folder, 2, "pod-a")
    assert (equal.value.term, lower.value.term) == (3, 3)
    assert claim.claim_term(folder, 4, "pod-b") is True


def test_a_claim_whose_writer_died_belongs_to_nobody(tmp_path: Path) -> None:
    (tmp_path / "CLAIM-000002").write_bytes(b"")
    assert claim.highest(tmp_path) == (2, "")
    with pytest.raises(Fenced, match="another pod"):
        claim.claim_term(tmp_path, 2, "pod-a")


def test_a_claim_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text('{"owner": "pod-a"}')
    (tmp_path / "CLAIM-000002").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Fenced):
        claim.claim_term(tmp_path, 2, "pod-a")


def test_an_old_view_can_neither_commit_nor_prune(tmp_path: Path) -> None:
    claim.claim_term(tmp_path, 1, "old")
    committed(tmp_path, 0, 10)
    late = save(tmp_path, 20)
    claim.claim_term(tmp_path, 2, "new")
    before = names(tmp_path)
    with pytest.raises(Fenced):
        manifest.commit(tmp_path, late, "old")
    with pytest.raises(Fenced):
        manifest.prune(tmp_path, 1, late)
    assert names(tmp_path) == before


def test_a_claim_between_rename_and_answer_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = disk._rename

    def slow(*arguments: Any) -> None:
        rename(*arguments)
        (tmp_path / "CLAIM-000002").write_text("{}")

    made = save(tmp_path, 10)
    monkeypatch.setattr(disk, "_rename", slow)
    with pytest.raises(Fenced):
        manifest.commit(tmp_path, made, "old")


def test_an_equal_view_of_another_pod_stops_a_commit(tmp_path: Path) -> None:
    claim.claim_term(tmp_path, 1, "pod-a")
    with pytest.raises(Fenced, match="this is pod-b"):
        manifest.commit(tmp_path, save(tmp_path, 10), "pod-b")


# -- pruning ---------------------------------------------------------------------------------------


def test_prune_keeps_the_newest_and_their_files_only(tmp_path: Path) -> None:
    made = committed(tmp_path, 0, 10, 20, 30)
    (tmp_path / FINAL_WEIGHTS).write_bytes(b"x")
    (tmp_path / "mine.txt").write_bytes(b"x")
    claim.claim_term(tmp_path, 1, "pod")
    save(tmp_path, 25)  # a snapshot that was void
    (tmp_path / "v000001-c000024-shard000-a1.safetensors.tmp").write_bytes(b"half")
    (tmp_path / "manifest-v000001-s000000000007.json.tmp").write_bytes(b"half")
    inflight = save(tmp_path, 40)
    manifest.prune(tmp_path, 2, made[-1])
    assert names(tmp_path, "manifest") == [made[2].name, made[3].name]
    assert {n.split("-")[1] for n in names(tmp_path, "v0")} == {"c000020", "c000030", "c000040"}
    assert {FINAL_WEIGHTS, "mine.txt", "CLAIM-000001"} <= set(names(tmp_path))
    manifest.commit(tmp_path, inflight)
    assert manifest.newest_manifest(tmp_path, RUN) == (inflight, [])


def test_prune_of_a_new_view_clears_what_the_old_left(tmp_path: Path) -> None:
    committed(tmp_path, 10, 20)
    save(tmp_path, 30)
    (made,) = committed(tmp_path, 20, term=2, snapshot=1)
    manifest.prune(tmp_path, 1, made)
    assert names(tmp_path, "manifest") == [made.name]
    assert all(n.startswith("v000002") for n in names(tmp_path, "v0"))


def test_prune_leaves_the_highest_claim_alone(tmp_path: Path) -> None:
    for term in (1, 2):
        (tmp_path / f"CLAIM-{term:06d}").write_text("{}")
    claim.remove_older_claims(tmp_path, 4)
    assert names(tmp_path) == ["CLAIM-000001", "CLAIM-000002"], "not claimed itself: the highest of these still holds"
    claim.claim_term(tmp_path, 4, "shard-0")
    (made,) = committed(tmp_path, 3, term=4)
    manifest.prune(tmp_path, 1, made)
    assert names(tmp_path, "CLAIM") == ["CLAIM-000004"]


def test_prune_spares_final_other_runs_and_higher_views(tmp_path: Path) -> None:
    (last,) = committed(tmp_path, 10, final=True)
    (other,) = committed(tmp_path, 11, run="other")
    new = committed(tmp_path, 20, 30, 40)
    (higher,) = committed(tmp_path, 5, term=3)
    manifest.prune(tmp_path, 1, new[-1])
    assert set(names(tmp_path, "manifest")) == {last.name, other.name, new[-1].name, higher.name}
    for one in (last, other, new[-1], higher):
        for fact in one.listed():
            files.check_file(tmp_path / fact.name, fact)


def test_prune_removes_damaged_manifests_behind_a_good_one(tmp_path: Path) -> None:
    made = committed(tmp_path, 10, 20, 30)
    (tmp_path / made[0].name).write_bytes(b"{}")
    manifest.prune(tmp_path, 3, made[-1])
    assert names(tmp_path, "manifest") == [made[1].name, made[2].name]


# -- restore and final -----------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_blocks_come_back_onto_any_number_of_shards(tmp_path: Path, shards: int) -> None:
    (made,) = committed(tmp_path, 10, shards=shards)
    expected = blocks(10)
    found = states.read_states(tmp_path, made, range(len(LAYOUT.blocks)))
    assert all(same(found[i][0], expected[i]) and found[i][1] == 10 for i in expected)
    assert list(states.read_states(tmp_path, made, [2])) == [2]
    with pytest.raises(Damage, match="block 99"):
        states.read_states(tmp_path, made, [99])


def test_damage_after_the_check_is_still_found(tmp_path: Path) -> None:
    (made,) = committed(tmp_path, 10)
    path = tmp_path / made.files[0].name
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(Damage, match=path.name):
        states.read_states(tmp_path, made, range(len(LAYOUT.blocks)))


def test_counts_that_do_not_fit_are_damage(tmp_path: Path) -> None:
    (made,) = committed(tmp_path, 10)
    wrong = dataclasses.replace(made.blocks[0], counts={"steps": 1, "segments": [[1, 1]]})
    with pytest.raises(Damage, match="counts and state of block 0"):
        states.read_states(tmp_path, dataclasses.replace(made, blocks=(wrong, *made.blocks[1:])), [0])


def of_workers(folder: Path, *names: str) -> manifest.Manifest:
    """A checkpoint of dana-zero with one worker whose first file has these tensors too, as long as block 0."""
    (made,) = committed(folder, 10, shards=1)
    states_of = {i: BlockState(state.weights, {"sum": state.weights, "v@0": state.weights * 2}) for i, state in blocks(10).items()}
    tensors = [(f"{i}.{name}", t) for i, s in states_of.items() for name, t in {"weights": s.weights, **s.slots}.items()]
    fact = files.write_blocks(folder, made.files[0].name, [*tensors, *((name, states_of[0].weights) for name in names)])
    return dataclasses.replace(made, rule="dana-zero", files=(fact,))


def test_what_belongs_to_a_worker_comes_back(tmp_path: Path) -> None:
    made = of_workers(tmp_path)
    found = states.read_states(tmp_path, made, [0])[0][0]
    assert sorted(found.slots) == ["sum", "v@0"] and torch.equal(found.slots["v@0"], 2 * found.weights)


@pytest.mark.parametrize(
    "name",
    ["0.v@1", "0.v@00", "0.v@-1", "0.v@", "0.v", "0.sum@0", "0.momentum_buffer", "00.v@0", "x.v@0", "9" * 5000 + ".v@0", "v@0", "0."],
)
def test_state_that_no_worker_of_the_job_has_is_damage(tmp_path: Path, name: str) -> None:
    made = of_workers(tmp_path, name)
    with pytest.raises(Damage, match="weights and state of rule dana-zero for 1 workers and"):
        states.read_states(tmp_path, made, [0])


def test_final_is_one_file_for_plain_torch(tmp_path: Path) -> None:
    (made,) = committed(tmp_path, 10, final=True)
    target = tmp_path / "out"
    target.mkdir()
    final.write_final(target, made, {"tied.w": "w"}, source=tmp_path)
    weights = safetensors.torch.load_file(target / FINAL_WEIGHTS)
    assert {name: tuple(t.shape) for name, t in weights.items()} == {
        "w": (12, 30), "b": (30,), "d": (70,), "tied.w": (12, 30), "bn.running_mean": (3,)
    }  # fmt: skip
    assert torch.equal(weights["w"], weights["tied.w"]) and weights["bn.running_mean"].tolist() == [10, 10, 10]
    digest = final.tensors_sha256([weights["w"], weights["b"], weights["d"]])
    assert digest == final.checkpoint_sha256(tmp_path, made)
    assert digest == final.weights_sha256(LAYOUT, {i: s.weights for i, s in blocks(10).items()})
    with pytest.raises(Damage, match="no parameter nowhere"):
        final.write_final(target, made, {"x": "nowhere"}, source=tmp_path)


def test_weights_are_those_of_the_newest_checkpoint_until_there_are_final_ones(tmp_path: Path) -> None:
    assert final.read_weights(tmp_path / "nowhere") == {} == final.read_weights(tmp_path)
    aliases = {"aliases": {"tied.w": "w"}}
    before, made = (dataclasses.replace(save(tmp_path, step), extra=aliases) for step in (10, 20))
    for one in (before, made):
        manifest.commit(tmp_path, one)
    found = final.read_weights(tmp_path)
    (tmp_path / "out").mkdir()
    final.write_final(tmp_path / "out", made, aliases["aliases"], source=tmp_path)
    whole = safetensors.torch.load_file(tmp_path / "out" / FINAL_WEIGHTS)
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
    assert found["bn.running_mean"].tolist() == [20, 20, 20]
    final.write_final(tmp_path, before, aliases["aliases"])
    assert final.read_weights(tmp_path)["bn.running_mean"].tolist() == [10, 10, 10], "the final ones, whatever else is there"


def test_weights_of_a_checkpoint_that_is_pruned_meanwhile_are_those_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = committed(tmp_path, 10)
    newest = manifest.newest_manifest

    def pruned(folder: Path, run: str | None, **words: Any) -> Any:
        found = newest(folder, run, **words)
        if found[0] == first:
            committed(tmp_path, 20)
            for name in (first.name, *(fact.name for fact in first.listed())):
                (tmp_path / name).unlink()
        return found

    monkeypatch.setattr(manifest, "newest_manifest", pruned)
    assert final.read_weights(tmp_path)["bn.running_mean"].tolist() == [20, 20, 20]


def test_weights_that_are_damaged_are_not_read(tmp_path: Path) -> None:
    before, made = committed(tmp_path, 10, 20)
    block = made.blocks[0]
    path, span = tmp_path / block.file, made.fact(block.file).tensors[f"{block.index}.weights"]
    whole = path.read_bytes()
    path.write_bytes(whole[: span.offset] + bytes([whole[span.offset] ^ 1]) + whole[span.offset + 1 :])
    with pytest.raises(Damage, match=r"weights as .* crc"):
        final.read_weights(tmp_path)
    path.write_bytes(whole[:-1])
    with pytest.warns(UserWarning, match="is passed over: .* is damaged"):
        assert final.read_weights(tmp_path)["bn.running_mean"].tolist() == [10, 10, 10], "the one before, and told"
    (tmp_path / before.name).unlink()
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(CheckpointProblem, match="is damaged"):
        final.read_weights(tmp_path)


def test_final_of_equal_runs_is_the_same_bytes(tmp_path: Path) -> None:
    found = []
    for run in ("one", "another"):
        (tmp_path / run).mkdir()
        (made,) = committed(tmp_path / run, 10, final=True)
        final.write_final(tmp_path / run, dataclasses.replace(made, run=run), {"tied.w": "w"})
        found.append((tmp_path / run / FINAL_WEIGHTS).read_bytes())
    assert found[0] == found[1]


def test_the_folder_is_made_and_a_closed_one_is_a_sentence(tmp_path: Path) -> None:
    disk.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointProblem, match="cannot"):
        claim.claim_term(tmp_path / "file" / "x", 1, "pod")


@pytest.mark.parametrize("reachable", [True, False], ids=["a folder that is closed", "below a folder that is closed"])
def test_a_folder_of_another_user_is_a_sentence(reachable: bool) -> None:
    """Root may write anywhere, so a child process that is nobody tries."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755 if reachable else 0o700)
        closed = Path(made) / "closed"
        closed.mkdir(mode=0o500)
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            sentence = "no error"
            try:
                if os.geteuid() == 0:
                    os.setresuid(65534, 65534, 65534)
                claim.claim_term(closed, 1, "pod")
            except CheckpointProblem as problem:
                sentence = str(problem)
            except BaseException as error:
                sentence = repr(error)
            os.write(tell, sentence.encode())
            os._exit(0)
        os.close(tell)
        with os.fdopen(told) as answer:
            sentence = answer.read()
        os.waitpid(child, 0)
        assert "EACCES" in sentence and made in sentence


def test_whether_a_run_is_over_is_told_without_a_byte_of_its_blocks(tmp_path: Path) -> None:
    assert not manifest.is_over(tmp_path, RUN)
    manifest.commit(tmp_path, save(tmp_path, 1))
    assert not manifest.is_over(tmp_path, RUN)
    manifest.commit(tmp_path, save(tmp_path, 2, final=True))
    for path in tmp_path.glob("v*"):
        path.unlink()
    assert manifest.is_over(tmp_path, RUN) and not manifest.is_over(tmp_path, "another")
