"""What is measured against what: every row of `make bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Program:
    """A program of `bench/peers` with its words; `env` names its requirements file. A run may take `seconds`.

    `commit`: it and psjob are those of an earlier commit of this repository; empty: those of now.
    """

    title: str
    file: str
    words: tuple[str, ...] = ()
    env: str = ""
    seconds: float = 300.0
    commit: str = ""


@dataclass(frozen=True)
class Against:
    """Rows that compare `ours` with each peer in turn. The number beside a peer: how many times faster than it psjob is to be (below 1:
    how much of the peer's speed it must keep; 0: told only). `on_request`: measured only if it is named."""

    name: str
    about: str
    ours: Program
    peers: tuple[tuple[Program, float], ...]
    on_request: bool = False


@dataclass(frozen=True)
class Alone:
    """A program that gives finished rows itself, each with its own limit. `on_request`: measured only if it is named."""

    name: str
    about: str
    program: Program
    on_request: bool = False


def ours(*words: str) -> Program:
    return Program("psjob", "psjob_ps.py", words)


DENSE = ("--what", "dense")
FOUR = ("--workers", "4")
TWO = ("--workers", "2")
TWO_BY_TWO = (*TWO, "--shards", "2")
HALVED = ("--set", "maxGradNorm=2500", "--factor", "0.5")
"""The norm of a gradient of 25 million ones is 5,000."""
SHARED = ("--set", 'transport="auto"')
DENSE_STEP = ("--what", "dense-off", *TWO_BY_TWO, *SHARED)
LONE = (*SHARED, "--set", "streams=2")
"""A lone worker's blocks are updated on one core for each of its streams."""
ENCRYPTED = ("--set", 'encryption="tls"')
THEN = "b9fec4fc1e63be0274daa234ab5ae18c97bd4ebe"
"""A commit whose data path was fast and had little to do beside: what has come since may cost no time."""
AUTO = ("--set", "autoStreams=true")
"""The default, which a commit that knows one stream only passes over."""
AS_THEN = (
    ("shared memory, 1 worker", (*SHARED, *AUTO)),
    ("shared memory, 2 workers", (*TWO, *SHARED)),
    ("TCP, 1 worker", ()),
    ("TCP, 2 workers, 2 shards", TWO_BY_TWO),
    ("TCP, 10,000 tensors", ("--tensors", "10000")),
)
PASS = Program("the optimizer's own pass", "floor.py", ("--what", "pass"))
ADAM_PASS = Program("one fused Adam pass", "floor.py", ("--what", "pass", "--optimizer", "adam"))
MEMCPY = Program("memcpy of the bytes", "floor.py", ("--what", "memcpy"))
ALL_REDUCE = Program("gloo all_reduce, SGD on each rank", "gloo.py", (*TWO, "--what", "allreduce"))
ROWS = Program("psjob", "psjob_rows.py")
FBGEMM = Program("FBGEMM on the CPU, 1 thread", "fbgemm_rows.py", env="fbgemm")
ROW_FLOOR = Program("gather, update, put back in one process", "floor.py", ("--what", "rows"))
ROADS = (("shared", "shared memory", 1.1), ("tcp", "TCP", 1.1), ("overlap", "TCP with overlap", 1.2))
"""How psjob goes in the rows of a GPT, and how many times DDP's speed it is to have."""


def gpt(size: str, about: str) -> tuple[Against, ...]:
    """Rows of one size: psjob by each road against DDP. Neither is told to fuse AdamW, nor is the peer without exchange."""
    ddp, alone = (Program("", "gpt.py", ("--what", f"{size}-{side}")) for side in ("ddp", "alone"))
    return tuple(
        Against(
            f"gpt-{size}", f"{about}, AdamW, 2 workers, sync by {way}", Program("psjob", "gpt.py", ("--what", f"{size}-{road}")),
            (
                (replace(ddp, title=f"torchrun, DDP, gloo: {way}"), target),
                *([(replace(alone, title="2 processes without exchange"), 0.0)] if road == "shared" else []),
            ),
        )
        for road, way, target in ROADS
    )  # fmt: skip


ON_GPU = ("--device", "cuda")
OFFLOAD = ("FSDP2, CPUOffloadPolicy, fused AdamW", 1.0)
"""What keeps the optimizer on the host without psjob, and how much of its speed psjob is to have."""


def device_gpt(what: str, workers: int, shards: int = 8, title: str = "psjob") -> Program:
    """`what` of `device_gpt.py` by so many workers or ranks."""
    words = ("--what", what, "--workers", str(workers), "--shards", str(shards), *ON_GPU)
    return Program(title, "device_gpt.py", words, seconds=600.0)


def on_a_gpu() -> tuple[Against | Alone, ...]:
    """The rows of `bench device`: steps of a GPT and of bare push and pull, and returns after a kill."""
    about = "GPT of 124 M parameters on a GPU, bf16 autocast, AdamW"
    alone = {ranks: device_gpt("alone", ranks, title=f"{ranks} alone on the GPU") for ranks in (1, 2)}
    offload = (device_gpt("fsdp", 1, title=OFFLOAD[0]), OFFLOAD[1])
    ddp = (device_gpt("ddp", 2, title="DDP, gloo, 2 ranks"), 0.0)
    adamw = ("--optimizer", "adam", "--megabytes", "500", *ON_GPU)
    prototype = Program("bare prototype, 500 MB, AdamW by 8 processes", "device_floor.py", (*adamw, "--shards", "8"))
    gpts = (
        ("sync, 1 worker, 4 shards", device_gpt("psjob", 1, 4), ((alone[1], 0.0), offload, (prototype, 0.0))),
        ("sync, 1 worker, 8 shards", device_gpt("psjob", 1), ((alone[1], 0.0), offload, (prototype, 0.0))),
        ("overlap=True, 1 worker, 8 shards", device_gpt("overlap", 1), ((alone[1], 0.0), offload, (prototype, 0.0))),
        ("sync, 2 workers, 8 shards", device_gpt("psjob", 2), ((alone[2], 0.0), ddp)),
        ("async, 2 workers, 8 shards", device_gpt("async", 2), ((alone[2], 1 / 1.3), ddp)),
    )
    # A way with training.delay is one more line here, and one more entry of device_gpt.WAYS.
    steps = tuple(Against("device", f"{about}: {which}", program, peers, on_request=True) for which, program, peers in gpts)
    return (*steps, *(push_and_pull(*size) for size in ((100, 1, 1), (100, 1, 4), (100, 2, 4), (500, 1, 1))), *returns_on_a_gpu())


def push_and_pull(megabytes: int, workers: int, shards: int) -> Against:
    """A step of SGD whose gradients are there already, against other roads, gloo, and what the machine allows."""
    words = ("--megabytes", str(megabytes), "--workers", str(workers), "--shards", str(shards))
    bare = ("--megabytes", str(megabytes), *ON_GPU, "--shards")
    floors = [Program(f"bare prototype, {count} shards", "device_floor.py", (*bare, str(count))) for count in (1, 2, 4)]
    reduce = ("--what", "allreduce", *words)
    return Against(
        "device", f"{megabytes} MB on a GPU, workers × shards {workers} × {shards}, by shared memory: a step of push and pull",
        ours(*SHARED, *words, *ON_GPU),
        (
            (Program("psjob, the model on the GPU, by TCP", "psjob_ps.py", (*words, *ON_GPU)), 0.0),
            (Program("psjob, the model on the CPU, by shared memory", "psjob_ps.py", (*SHARED, *words)), 0.0),
            (Program("psjob, the model on the CPU, by TCP", "psjob_ps.py", words), 0.0),
            *((floor, 1 / 1.6 if floor is floors[-1] and shards == 4 else 0.0) for floor in (floors if workers == 1 else floors[-1:])),
            *(
                [
                    (Program("gloo all_reduce, the gradient on the GPU", "gloo.py", (*reduce, *ON_GPU)), 0.0),
                    (Program("gloo all_reduce, the gradient on the CPU", "gloo.py", reduce), 0.0),
                ]
                if workers == 2
                else []
            ),
        ),
        on_request=True,
    )  # fmt: skip


def returns_on_a_gpu() -> tuple[Alone, ...]:
    """From a SIGKILL to the next step, with models on a GPU."""
    return tuple(
        Alone(
            "device", f"2 workers, 2 shards, sync, models on a GPU: {what} is killed",
            Program("psjob", "returns.py", ("--what", f"{kind}:10", "--megabytes", "1", *ON_GPU), seconds=1800.0), on_request=True,
        )
        for what, kind in (("a worker", "worker"), ("a shard with its pod", "shard"), ("a shard's process", "process"))
    )  # fmt: skip


SHORT = ("--steps", "200", "--step", "0.05", "--every", "5", "--save-every", "2")
LITTLE = ("--most", "1.1")
RACERS = (
    ("sync", "psjob, sync", "", LITTLE),
    ("async", "psjob, async", "", LITTLE),
    ("torchft", "torchft, gloo", "torchft", ()),
    ("torchrun", "torchrun, DDP", "", ()),
)
"""Who races: word of `race.py`, title, environment, and what is wanted in a race of full length."""


def race(name: str, about: str, seconds: float, *short: str) -> tuple[Alone, ...]:
    """A row of each racer, in programs of their own, since one of them may be missing."""
    return tuple(
        Alone(name, f"{about}: {title}", Program(title, "race.py", ("--side", side, *(short or wanted)), env, seconds), on_request=True)
        for side, title, env, wanted in RACERS
    )


MEASURES: Sequence[Against | Alone] = (
    Against(
        "one-worker", "1 worker, 1 shard, TCP: push 100 MB, SGD, pull 100 MB", ours(),
        (
            (Program("MXNet dist_sync", "mxnet_ps.py", env="mxnet"), 2.5),
            (Program("torch RPC, one call, TCP", "rpc.py", ("--what", "whole-tcp")), 2.0),
            (Program("torch RPC, a call a tensor, TCP", "rpc.py", ("--what", "each-tcp")), 0.0),
            (Program("TensorFlow PSS", "tensorflow_ps.py", env="tensorflow"), 2.2),
            (Program("gloo send/recv as a PS", "gloo.py", ("--what", "ps")), 1.5),
        ),
    ),
    Against(
        "two-workers", "2 workers, 1 shard, sync, TCP", ours(*TWO),
        ((Program("MXNet dist_sync", "mxnet_ps.py", TWO, "mxnet"), 4.0), (ALL_REDUCE, 0.8)),
    ),
    Against("two-workers-shared", "2 workers, 1 shard, sync, shared memory", ours(*TWO, *SHARED), ((ALL_REDUCE, 1.8),)),
    Against(
        "one-worker-shared", "1 worker, 1 shard, shared memory, 2 streams", ours(*LONE),
        (
            (PASS, 0.8),
            (Program("Ray actor", "ray_ps.py", env="ray"), 0.0),
            (Program("torch RPC, a call a tensor", "rpc.py", ("--what", "each")), 0.0),
        ),
    ),
    Against(
        "small-tensors", "10,000 tensors of 10 KB in one cycle, TCP", ours("--tensors", "10000"),
        ((Program("psjob, one tensor of 100 MB", "psjob_ps.py", ("--tensors", "1")), 1 / 1.3),),
    ),
    Against(
        "encrypted", "1 worker, 1 shard, TCP with TLS, 2 streams", ours(*ENCRYPTED, "--set", "streams=2"),
        ((Program("psjob in clear text", "psjob_ps.py", ("--set", "streams=2")), 0.5),),
    ),
    Against(
        "encrypted-4", "the same with 4 streams", ours(*ENCRYPTED, "--set", "streams=4"),
        ((Program("psjob in clear text", "psjob_ps.py", ("--set", "streams=4")), 0.0),),
    ),
    Against(
        "streams", "1 worker, 1 shard, shared memory, as many streams as psjob finds", ours(*SHARED, *AUTO),
        ((Program("psjob with 1 stream", "psjob_ps.py", SHARED), 1.0), (Program("psjob with 2", "psjob_ps.py", LONE), 0.97)),
    ),
    Against(
        "streams-tcp", "the same over TCP", ours(*AUTO),
        ((Program("psjob with 1 stream", "psjob_ps.py"), 0.97), (Program("psjob with 2", "psjob_ps.py", ("--set", "streams=2")), 0.97)),
    ),
    Against(
        "adam-shared", "Adam on the shard, 1 worker, shared memory, 2 streams", ours("--optimizer", "adam", *LONE), ((ADAM_PASS, 1 / 1.3),)
    ),
    Alone("snapshot", "a checkpoint of 1.0 GB while Adam trains, TCP", Program("psjob", "snapshot_ps.py")),
    Alone("snapshot-shared", "the same with shared memory", Program("psjob", "snapshot_ps.py", SHARED)),
    Against(
        "rows", "100,000 unique rows of 2,000,000 x 64, 1 worker, 1 shard, TCP: pull, push, row-wise Adagrad", ROWS,
        ((FBGEMM, 4.0), (ROW_FLOOR, 0.5)),
    ),
    Against("rows-shared", "the same with shared memory", Program("psjob", "psjob_rows.py", SHARED), ((FBGEMM, 8.0), (ROW_FLOOR, 0.5))),
    Against(
        "rows-in-process", "pull, push, row-wise Adagrad of the same rows in one process, look-ups included",
        Program("psjob's table", "table.py"),
        ((ROW_FLOOR, 0.9),),
    ),
    Alone("lookup", "ids of rows to their places in a shard's table", Program("psjob", "lookup_rows.py")),
    Alone("overlap", "a net that sleeps, behind a slow link: a step with overlap", Program("overlap", "overlap_ps.py")),
    Alone("codecs", "a cycle of 10 MB with each codec, by the speed of its link", Program("codecs", "codecs_ps.py")),
    Alone("no-overlap", "the same without overlap", Program("overlap", "overlap_ps.py", ("--what", "off"))),
    Against(
        "overlap-dense", "100 MB of dense layers, batches of 32, TCP: with overlap", Program("psjob", "overlap_ps.py", DENSE),
        ((Program("without overlap", "overlap_ps.py", ("--what", "dense-off")), 0.0),),
    ),
    Against(
        "credit", "4 workers push at once, a block at a time: what the least share of a shard's memory costs",
        ours(*FOUR, "--set", f"gradientBytes={16 << 20}"),
        ((Program("psjob with 32 MiB per worker", "psjob_ps.py", FOUR), 0.0),),
    ),
    Against(
        "clip", "2 workers, 2 shards, sync, TCP, 100 MB: with maxGradNorm, a factor of 0.5", ours(*TWO_BY_TWO, *HALVED),
        ((Program("psjob without maxGradNorm", "psjob_ps.py", TWO_BY_TWO), 1 / 1.05),),
    ),
    Against(
        "clip-shared", "the same with shared memory", ours(*TWO_BY_TWO, *HALVED, *SHARED),
        ((Program("psjob without maxGradNorm", "psjob_ps.py", (*TWO_BY_TWO, *SHARED)), 1 / 1.05),),
    ),
    Against(
        "clip-step", "100 MB of dense layers, batches of 32, 2 workers, 2 shards, shared memory: a step with maxGradNorm",
        Program("psjob", "overlap_ps.py", (*DENSE_STEP, "--set", "maxGradNorm=1e-3")),
        ((Program("psjob without maxGradNorm", "overlap_ps.py", DENSE_STEP), 1 / 1.05),),
    ),
    *(
        Against(
            "kept", f"100 MB, {name}, 1 worker, 1 shard, shared memory: a step whose result outlives the shard's process",
            ours("--optimizer", optimizer, *LONE),
            ((Program("psjob with PS_FORK_SERVER=never", "psjob_ps.py", ("--what", "unkept", "--optimizer", optimizer, *LONE)), 1 / most),),
        )
        for name, optimizer, most in (("SGD", "sgd", 1.25), ("Adam", "adam", 1.1))
    ),
    *(
        Against(
            "then", f"100 MB, SGD, {about}: a step beside that of commit {THEN[:8]}", ours(*words),
            ((Program(f"psjob at {THEN[:8]}: {about}", "psjob_ps.py", words, commit=THEN), 1.0),),
        )
        for about, words in AS_THEN
    ),
    *(
        Alone(
            "returns", f"2 workers, 2 shards, sync: {what} is killed", Program("psjob", "returns.py", words, seconds=1800.0),
            on_request=True,
        )
        for what, words in (
            ("a worker", ("--what", "worker:20", "--megabytes", "1")),
            ("a shard's process", ("--what", "process:1000", "--megabytes", "1")),
            ("a shard with its pod", ("--what", "shard:20", "--megabytes", "1")),
            ("a shard's process of 1 GB", ("--what", "process:20", "--megabytes", "1000")),
        )
    ),
    *on_a_gpu(),
    Alone("processes", "a worker of 2 processes: a step by the way in which they sum", Program("psjob", "processes.py")),
    Alone(
        "processes-device", "the same on a GPU, and 2 stages there", Program("psjob", "processes.py", ("--device", "cuda")), on_request=True
    ),
    Alone("memory", "100 MB, SGD, 1 worker, 1 shard: memory beyond what the work itself holds", Program("psjob", "memory_ps.py")),
    Alone("memory-adam", "the same with Adam", Program("psjob", "memory_ps.py", ("--optimizer", "adam"))),
    Alone(
        "staleness", "3 workers in async, TCP: processor time of a push with the look at staleness and gap, over that without",
        Program("psjob", "staleness_ps.py"),
    ),
    Alone(
        "step-parts", "2 workers, TCP: processor time of a step with the break-down of where it goes, over that without",
        Program("psjob", "parts_cost.py", seconds=900.0),
    ),
    Alone("drift", "2 workers, 100 MB, shared memory: what comparing their weights costs", Program("psjob", "drift.py", SHARED)),
    Alone("clients", "processor time of a push of 4 KB in a shard's store, by the number of workers", Program("psjob", "clients.py")),
    Alone(
        "clients-wire", "processor time of a push of 4 KB in a shard's process, over TCP, by the number of workers; its threads and memory",
        Program("psjob", "clients_wire.py", seconds=900.0),
    ),
    Alone("join", "500 workers dial a shard: seconds until all are welcome", Program("psjob", "joins.py")),
    Alone("flood", "4 workers that compute for 50 ms and exchange 4 MiB, while strangers flood their shard", Program("psjob", "flood.py")),
    Alone("flood-exchange", "the same workers without compute", Program("psjob", "flood.py", ("--what", "exchange"))),
    Alone("sharding", "a step against max(M/B_worker, m·M/(n·B_server)), links of 48 and 32 MB/s", Program("psjob", "sharding_ps.py")),
    Alone("collectives", "4 processes, links of 10 MB/s and 4 ms: sums against their cost model", Program("psjob", "collectives.py")),
    Alone("picks", "3 machines of slow links: the planner's pick against every strategy that runs", Program("psjob", "picks.py")),
    Alone("stages", "4 models in stages by torch's Schedule1F1B: a step as predicted", Program("psjob", "stages.py", seconds=1500)),
    Alone("pipeline", "jobs of 2 and 4 stages, flush and 2BW, beside torch's Schedule1F1B", Program("psjob", "pipeline.py", seconds=1800)),
    Alone(
        "stages-learning", "8 stages learn digits and text in each way of training", Program("psjob", "learning_stages.py", seconds=3600),
        on_request=True,
    ),
    Alone("colocated", "shards beside workers: a machine's network, its own part", Program("psjob", "colocated.py", seconds=900)),
    Alone("modes", "4 workers that sleep: each mode's pushes a second over sync's, against the simulator", Program("psjob", "modes.py")),
    Alone(
        "delay", "digits and charlm, sync with a delay of 1 against none, 5 seeds", Program("psjob", "delay.py", seconds=7200.0),
        on_request=True,
    ),
    Alone(
        "delay-simulated", "digits-64 simulated, with a delay of 1 and without, 5 seeds",
        Program("psjob", "delay.py", ("--what", "simulated"), seconds=3600.0), on_request=True,
    ),
    Alone("simulator", "the simulator on one core, 32 workers: thousands of pushes a second", Program("psjob", "simulator.py")),
    *gpt("small", "a GPT of 0.6 M parameters"),
    *gpt("large", "a GPT of 19 M parameters"),
    Alone("latency", "a step of 1,000 parameters, 2 workers, sync", Program("psjob", "latency.py")),
    Alone(
        "start", "the README's commands on a laptop, with packages from pip's cache: seconds to the first training step",
        Program("psjob", "start.py", seconds=1800.0), on_request=True,
    ),
    Alone("page", "the live page of 100 runs of 10,000 points: seconds until all is painted", Program("psjob", "page.py", seconds=600.0)),
    *race("race", "3,000 steps of 0.2 s, 4 workers, a kill each 60 s", 4500.0),
    *race("race-short", "200 steps of 0.05 s, 4 workers, a kill each 5 s", 600.0, *SHORT),
    Against("floor", "how far TCP is from memory itself", ours(), ((PASS, 0.0), (MEMCPY, 0.0))),
)  # fmt: skip
