"""One job in one world: its processes, its network and volume, its planner, and the faults that wait for their moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from psjob import modes
from psjob.layout.blocks import Layout, TensorSpec, assign
from psjob.modes import ServedMode
from psjob.tables import TableSpec
from tests.simulation.protocol import faults, records
from tests.simulation.protocol.faults import Fault
from tests.simulation.protocol.kernel import Kernel
from tests.simulation.protocol.network import Network
from tests.simulation.protocol.plan import Plan
from tests.simulation.protocol.planner import Planner
from tests.simulation.protocol.promises import Promises, Saved
from tests.simulation.protocol.volume import Volume

if TYPE_CHECKING:
    from tests.simulation.protocol.shard import SimShard
    from tests.simulation.protocol.worker import SimWorker


class World:
    """Everything of one run. `shards` and `workers` are the newest process of each; older ones may still be alive."""

    def __init__(self, plan: Plan, traced: bool = False) -> None:
        self.plan = plan
        self.kernel = Kernel(f"world {plan.seed}")
        if traced:
            self.kernel.traced = []
        self.network = Network(self.kernel, plan.delay, plan.rate)
        self.volume = Volume(self.kernel, plan.disk_rate, plan.disk_delay)
        self.promises = Promises(self)
        self.shards: dict[int, SimShard] = {}
        self.workers: dict[int, SimWorker] = {}
        self.named: dict[tuple[str, int], list[Any]] = {}
        """What a name stands for: every process of that role and index that may still be reached, oldest first."""
        self.planner = Planner(self)
        self.phase = "gathering"
        self.quiet_at = 0.0
        """When the last fault has ended."""
        self.pairs: set[tuple[str, str]] = set()
        """(phase, fault) that were met."""
        self.switched = False
        self.saved: dict[str, Saved] = {}
        """Every manifest that was ever committed, by name."""
        self.final_at = 0.0
        self.counts: Counter[str] = Counter()
        """Messages by kind."""
        self._entered: Counter[str] = Counter()
        self._waiting: list[Fault] = []
        self._numbers = 0

    def begin(self) -> None:
        """Start the processes; faults at a time are set, the others wait for their phase."""
        for fault in self.plan.faults:
            if fault.phase is None:
                self.kernel.after(fault.at, self._strike, fault)
            else:
                self._waiting.append(fault)
        self.planner.begin()

    # -- processes ---------------------------------------------------------------------------------

    def start_shard(self, index: int, attempt: int, term: int) -> None:
        """A new process of a shard."""
        from tests.simulation.protocol.shard import SimShard

        self.shards[index] = self._name(("shard", index), SimShard(self, index, attempt, term))

    def fork_shard(self, before: SimShard) -> None:
        """A process in place of one that crashed, if its pod is still the newest."""
        from tests.simulation.protocol.shard import SimShard

        made = self._name(("shard", before.index), SimShard(self, before.index, before.attempt, before.first_term, before))
        if self.shards[before.index] is before:
            self.shards[before.index] = made

    def start_worker(self, rank: int, start: int) -> None:
        """A new process of a worker."""
        from tests.simulation.protocol.worker import SimWorker

        self.workers[rank] = self._name(("worker", rank), SimWorker(self, rank, start))

    def _name(self, seat: tuple[str, int], process: Any) -> Any:
        held = self.named.setdefault(seat, [])
        held[:] = [old for old in held if old.alive]
        held.append(process)
        process.trace("starts")
        return process

    def seat(self, who: tuple[str, int]) -> Any:
        """The newest process of a role and index."""
        role, index = who
        return self.shards[index % self.plan.shards] if role == "shard" else self.workers[index % self.plan.workers]

    # -- faults ------------------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """The job stands elsewhere now."""
        if phase == self.phase:
            return
        self.phase = phase
        self.kernel.trace("PHASE", phase)
        self._entered[phase] += 1
        for fault in [fault for fault in self._waiting if fault.phase == phase and fault.nth == self._entered[phase]]:
            self._waiting.remove(fault)
            self.kernel.after(fault.at, self._strike, fault)
            self._quiet(fault.at)

    def _strike(self, fault: Fault) -> None:
        self._quiet(0.0)
        faults.strike(self, fault)

    def until(self, seconds: float, act: Callable[..., Any], *args: Any) -> None:
        """A fault continues for so long, and ends with `act`."""
        self._quiet(seconds)
        self.kernel.after(seconds, act, *args)

    def _quiet(self, seconds: float) -> None:
        self.quiet_at = max(self.quiet_at, self.kernel.now + seconds)

    def met(self, kind: str) -> None:
        """A fault comes over the phase of now."""
        self.pairs.add((self.phase, kind))

    def number(self) -> int:
        """A number that nobody else has."""
        self._numbers += 1
        return self._numbers

    # -- the model ---------------------------------------------------------------------------------

    @cached_property
    def _parts(self) -> tuple[int, ...]:
        return tuple(range(self.plan.blocks + self.plan.tables * self.plan.shards))

    def parts(self) -> tuple[int, ...]:
        """The parts of the model: blocks, then each table's rows by shard."""
        return self._parts

    def polled(self) -> None:
        """The planner reads shard 0's status, and somebody looks at the volume."""
        self.promises.tidy()
        shard = self.shards[0]
        for older in self.named["shard", 0]:
            if older is not shard:
                self.promises.superseded(older, records.highest_claim(self.volume))
        if shard.alive and not shard.frozen and shard.pod not in self.planner.cut_off:
            shard.polled()

    # -- the job, as processes are told of it --------------------------------------------------------

    @cached_property
    def table(self) -> tuple[TensorSpec, ...]:
        """A tensor a block: each in a parameter group of its own."""
        return tuple(TensorSpec(f"t{number}", (64,), "float32", number) for number in range(self.plan.blocks))

    @cached_property
    def layout(self) -> Layout:
        """As the shards cut it."""
        made = Layout.of(self.table)
        assert len(made.blocks) == self.plan.blocks
        return made

    @cached_property
    def _specs(self) -> tuple[TableSpec, ...]:
        return tuple(TableSpec.from_json(spec) for spec in self.model()["tables"])

    def specs(self) -> tuple[TableSpec, ...]:
        """The job's tables."""
        return self._specs

    def model(self) -> dict[str, Any]:
        """What a worker's hello tells of its model."""
        return self._model

    @cached_property
    def _model(self) -> dict[str, Any]:
        rows = [{**TABLE, "name": f"rows{number}"} for number in range(self.plan.tables)]
        table = [{"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "group": t.group} for t in self.table]
        return {"rule": "sgd", "aliases": {}, "table": table, "tables": rows}

    @cached_property
    def _owners(self) -> tuple[int, ...]:
        blocks = assign(self.layout, self.plan.shards)
        return (*blocks, *(part % self.plan.shards for part in range(self.plan.tables * self.plan.shards)))

    def owner(self, part: int) -> int:
        """The shard that has a part."""
        return self._owners[part]

    @cached_property
    def _owned(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(part for part in self.parts() if self._owners[part] == shard) for shard in range(self.plan.shards))

    def owned(self, shard: int) -> tuple[int, ...]:
        """The parts of a shard."""
        return self._owned[shard]

    def mode_of(self, name: str) -> ServedMode:
        """The mode object of a name."""
        return MADE[name]

    def mode_read(self, word: str) -> ServedMode:
        """The mode of a REWIND."""
        return next((mode for mode in MADE.values() if modes.format_mode(mode) == word), None) or modes.parse_mode(word)

    def count(self, kind: str, word: str) -> None:
        """A message was sent."""
        self.counts[f"{kind} {word}"] += 1


MADE: dict[str, ServedMode] = {
    "sync": modes.Sync(), "async": modes.Async(), "bounded": modes.Bounded(2), "backup": modes.Backup(1), "softsync": modes.Softsync(2),
    "threshold": modes.Threshold(4), "local": modes.LocalSGD(4),
    "sync-delay": modes.Sync(1), "async-delay": modes.Async(3), "bounded-delay": modes.Bounded(4, 2),
    "local-quorum": modes.Quorum(4, 2, 0.5), "local-async": modes.LocalAsync(4),
}  # fmt: skip
TABLE = TableSpec("rows", 4, "sgd").to_json()
