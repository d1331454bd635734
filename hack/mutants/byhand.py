"""Faults put in by hand, one for each that `make test` must always catch, and the cheap tests that catch it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PLAN = "operator/src/psjob_operator/plan"
PSJOB = "runtime/src/psjob"
OVERLAP = "tests/live/test_overlap.py"
LONG_COPIES = "tests/live/test_staging.py::test_a_model_whose_copies_take_long_has_the_same_bits"
DELAY = "tests/live/test_delay.py"
SAME_STEPS = "tests/tensors/test_restarted_scripts.py::test_a_restart_makes_the_same_steps"


@dataclass(frozen=True)
class ByHand:
    """`old` occurs once in the file, and `new` takes its place. `tests` fail then; each is a file, or a test of one."""

    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, root: Path) -> bytes:
        """The file with the fault. Raises ValueError if `old` is not there once."""
        source = (root / self.path).read_text()
        if source.count(self.old) != 1:
            raise ValueError(
                f"{self.what}: {self.old!r} occurs {source.count(self.old)} times in {self.path}, and should once; change byhand.py"
            )
        return source.replace(self.old, self.new).encode()


BY_HAND = (
    ByHand(
        "a push is applied twice",
        f"{PSJOB}/shard/deduplication.py",
        "if clock < row.complete or (clock == row.complete and position in row.open):",
        "if clock < row.complete:",
        ("tests/unit/test_modes.py",),
    ),
    ByHand(
        "a snapshot is not of one step",
        f"{PSJOB}/protocol/coordinator/checkpoints.py",
        "        if other != told[0]:\n",
        "        if False:\n",
        ("tests/unit/test_coordinator_machine.py",),
    ),
    ByHand(
        "a checkpoint does not wait for a record",
        f"{PSJOB}/protocol/coordinator/members.py",
        "if (pins.get(m.rank, m.clock) if step is None else step) not in m.records}",
        "if (pins.get(m.rank, m.clock) if step is None else step) in ()}",
        ("tests/tensors/test_coordinator_disk.py",),
    ),
    ByHand(
        "a term that was passed is not stale",
        f"{PSJOB}/checkpoint/claim.py",
        "if found is None or found[0] < term:",
        "if found is None or found[0] != term:",
        ("tests/tensors/test_checkpoint_manifest.py",),
    ),
    ByHand(
        "a fenced process may push",
        f"{PSJOB}/shard/deduplication.py",
        "        if incarnation < row.incarnation:\n            return Verdict.FENCED\n",
        "",
        ("tests/unit/test_modes.py",),
    ),
    ByHand(
        "a sync worker resumes one clock too far",
        f"{PSJOB}/protocol/coordinator/membership.py",
        "    return clock if found else None\n",
        "    return clock + 1 if found else None\n",
        ("tests/unit/test_snapshot_schedule.py",),
    ),
    ByHand(
        "an async worker resumes one clock too early",
        f"{PSJOB}/protocol/coordinator/membership.py",
        "    return newest - 1 if newest - 1 in complete else newest\n",
        "    return newest - 1\n",
        ("tests/unit/test_snapshot_schedule.py",),
    ),
    ByHand(
        "an order is lost after a break",
        f"{PSJOB}/protocol/coordinator/decisions.py",
        "    return [order for order in self._kept if order.number > carried]\n",
        "    return [order for order in self._kept if order.number > carried + 1]\n",
        ("tests/tensors/test_orders.py",),
    ),
    ByHand(
        "a restore does not rewind the sessions of a shard",
        f"{PSJOB}/protocol/shard/machine.py",
        "e.DropSessions(bool(adopted) or self.mode.rewinds_together)",
        "e.DropSessions(bool(adopted))",
        ("tests/unit/test_shard_machine.py",),
    ),
    ByHand(
        "a residual is fed back twice",
        f"{PSJOB}/protocol/coordinator/membership.py",
        '"residual": taken is None or taken == clock,',
        '"residual": True,',
        ("tests/unit/test_coordinator_machine.py",),
    ),
    ByHand(
        "pushes are summed in another order",
        f"{PSJOB}/rules/reduction.py",
        '    _in_order("add", pushes, out)\n    if',
        '    _in_order("add", [*pushes[1:], *pushes[:1]], out)\n    if',
        ("tests/tensors/test_reductions.py",),
    ),
    ByHand(
        "a stage has the wrong delay",
        f"{PSJOB}/pipeline/schedule.py",
        "return -(-warm_up(stage, replicas) // microbatches)",
        "return warm_up(stage, replicas) // microbatches",
        ("tests/unit/test_pipeline_order.py",),
    ),
    ByHand(
        "a restart is counted twice",
        f"{PLAN}/restarts.py",
        '"counted": before.counted + len(added.new),',
        '"counted": before.counted + 2 * len(added.new),',
        ("tests/unit/test_plan_restart.py",),
    ),
    ByHand(
        "the backoff does not grow",
        f"{PLAN}/restarts.py",
        "FIRST_SECONDS * 2.0 ** min(failures - 1, 10)",
        "FIRST_SECONDS * 2.0 ** min(failures - 1, 0)",
        ("tests/unit/test_plan_policies.py",),
    ),
    ByHand(
        "one failure more than the limit is forgiven",
        f"{PLAN}/terminal.py",
        "counted(state) + len(added.new) > policy.backoff_limit:",
        "counted(state) + len(added.new) > policy.backoff_limit + 1:",
        ("tests/unit/test_plan_policies.py",),
    ),
    ByHand(
        "the name of a pod is used twice",
        f"{PLAN}/restarts.py",
        "*(pod.number for pod in state.ahead if _sits(pod.role, pod.index, seat))]) + 1",
        "]) + 1",
        ("tests/unit/test_plan_restart.py",),
    ),
    ByHand(
        "a checkpoint is torn where a call fails",
        f"{PSJOB}/checkpoint/disk.py",
        "    temp = name + TEMP\n",
        "    temp = name\n",
        ("tests/tensors/test_checkpoint_files.py",),
    ),
    ByHand(
        "a damaged frame is taken",
        f"{PSJOB}/wire/frame.py",
        "if not sealed and _CRC.unpack_from",
        "if sealed and _CRC.unpack_from",
        ("tests/unit/test_frame.py",),
    ),
    ByHand(
        "another key is taken",
        f"{PSJOB}/wire/auth.py",
        "if not hmac.compare_digest(said, proof(key, transcript)):",
        "if len(said) != PROOF_BYTES:",
        ("tests/unit/test_wire_auth.py",),
    ),
    ByHand(
        "what an epoch begins with is put back at the record's place only",
        f"{PSJOB}/api/training_job.py",
        "            self.carry_out(lambda: self._restore(kept, self.records.between))\n",
        "",
        (f"{SAME_STEPS}[an order that each epoch draws]",),
    ),
    ByHand(
        "what runs again after a pass counts twice",
        f"{PSJOB}/api/training_job.py",
        "            self.carry_out(lambda: self._restore(restored, self.records.kept))\n",
        "            pass\n",
        (f"{SAME_STEPS}[a tail that counts]",),
    ),
    ByHand(
        "ps.state in a record is one step behind",
        f"{PSJOB}/api/values.py",
        "        return {**self._restored, **kept}\n",
        '        last, self.__dict__["_last"] = self.__dict__.get("_last", kept), kept\n        return {**self._restored, **last}\n',
        (f"{SAME_STEPS}[steps are counted in ps.state]",),
    ),
    ByHand(
        "a gradient is announced before its copy is complete",
        f"{PSJOB}/worker/staging.py",
        "        _wait_for(self._copied.get(block))\n",
        "        pass\n",
        (f"{LONG_COPIES}[sync-slow]",),
    ),
    ByHand(
        "a shard may overwrite an answer while it is copied",
        f"{PSJOB}/worker/staging.py",
        "        _wait_for(self._landed.get(block))\n",
        "        pass\n",
        (f"{LONG_COPIES}[sync-slow]",),
    ),
    ByHand(
        "a worker leaves before its last answer is copied",
        f"{PSJOB}/worker/staging.py",
        "        for event in [*self._copied.values(), *self._landed.values()]:\n",
        "        for event in ():\n",
        (f"{LONG_COPIES}[sync-slow]",),
    ),
    ByHand(
        "a gradient is changed before its copy is complete",
        f"{PSJOB}/worker/overlap.py",
        "        self.staging.keep_back()\n",
        "",
        (f"{LONG_COPIES}[sync-slow overlap]",),
    ),
    ByHand(
        "a gradient that has changed since it left early counts",
        f"{PSJOB}/worker/overlap.py",
        "if self._holds(index, grads or ()):",
        "if True:",
        (f"{OVERLAP}::test_a_gradient_that_is_changed_after_it_was_sent_is_sent_again[by numpy]",),
    ),
    ByHand(
        "early data of another scale counts",
        f"{PSJOB}/worker/overlap.py",
        "held == (lane, self._contents[header.block], scale)",
        "held[:2] == (lane, self._contents[header.block])",
        (f"{OVERLAP}::test_a_grad_scaler[none-sync]",),
    ),
    ByHand(
        "a step with a delay takes weights before they have come",
        f"{PSJOB}/worker/delay.py",
        "self.wait(lambda: self._done > clock - self.delay)",
        "self.wait(lambda: True)",
        (f"{DELAY}::test_so_many_steps_are_made_while_no_answer_comes",),
    ),
    ByHand(
        "with a delay a gradient is used again before it is copied",
        f"{PSJOB}/worker/delay.py",
        "            self.staging.keep_back()\n",
        "",
        (f"{DELAY}::test_copies_that_take_long_change_no_bit",),
    ),
    ByHand(
        "nobody waits at the end of a pass",
        f"{PSJOB}/api/data.py",
        "                        job.catch_up()\n",
        "                        pass\n",
        (f"{DELAY}::test_at_the_end_of_a_pass_all_has_landed",),
    ),
    ByHand(
        "a worker that comes back computes on the newest weights",
        f"{PSJOB}/worker/delay.py",
        "asked(Flag.BEFORE if behind else Flag.NONE)",
        "asked(Flag.NONE)",
        (f"{DELAY}::test_a_job_goes_on_from_a_checkpoint_with_both_versions",),
    ),
    ByHand(
        "an update that changes nothing leaves older weights to who comes back",
        f"{PSJOB}/shard/block.py",
        "if self.keeps_before and not self._noted:",
        "if False:",
        (f"{DELAY}::test_a_step_that_is_left_out_is_a_version_too",),
    ),
)
