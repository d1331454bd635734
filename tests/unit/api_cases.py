"""Manifests to refuse and to take: one list for `psjob run` and the API server alike."""

from __future__ import annotations

from psjob_operator.contract import MODES
from tests.unit.api_claim_cases import CLAIMS_PASSED, CLAIMS_REFUSED
from tests.unit.api_failure_cases import FAILURES_PASSED, FAILURES_REFUSED
from tests.unit.api_manifest import REMOVED, Case, each_refused, refused
from tests.unit.api_placement_cases import PLACEMENTS_PASSED, PLACEMENTS_REFUSED
from tests.unit.api_stage_cases import STAGES_PASSED, STAGES_REFUSED
from tests.unit.api_template_cases import TEMPLATES_PASSED, TEMPLATES_REFUSED


def _range(path: str, low: int, high: int) -> list[Case]:
    short = path.rpartition(".")[2]
    return [
        refused(f"{short}-{value}", path, value, f"must be {low}..{high}; ")
        for value in (low - 1, -1, high + 1, 2**31, 2**53)
        if not low <= value <= high
    ]


def _edges(path: str, low: int, high: int) -> list[Case]:
    return [Case(f"{path.rpartition('.')[2]}-{value}", {path: value}) for value in (low, high)]


_RANGES = [
    ("spec.training.seed", 0, 2**31 - 1),
    ("spec.training.streams", 1, 8),
    ("spec.shards.replicas", 1, 256),
    ("spec.shards.progressDeadlineSeconds", 2, 3600),
    ("spec.workers.replicas", 1, 4000),
    ("spec.checkpoint.everySteps", 1, 10**9),
    ("spec.checkpoint.request", 1, 2**53 - 1),
    ("spec.checkpoint.keep", 2, 1000),
    ("spec.runPolicy.backoffLimit", 0, 1000),
    ("spec.runPolicy.backoffLimitPerRole.shard", 0, 1000),
    ("spec.runPolicy.backoffLimitPerRole.worker", 0, 1000),
    ("spec.runPolicy.activeDeadlineSeconds", 1, 2**31 - 1),
    ("spec.runPolicy.ttlSecondsAfterFinished", 0, 2**31 - 1),
]
_NAME = "must be 1 to 40 lower-case letters, digits and '-'"
_TYPE = "must be of type "
_FIXED = "is fixed; make a new job"

REFUSED: list[Case] = [
    *(case for row in _RANGES for case in _range(*row)),
    # -- names and texts
    *(
        refused(f"name-{name!r}", "metadata.name", name, _NAME, server=server)
        for server, names in ((True, ("a" * 41, "1st", "a.b", "a-")), (False, ("-a", "Digits", "zü", "größe-ß", "../up", "", "a\n")))
        for name in names
    ),
    *each_refused("period", "spec.checkpoint.periodSeconds", (-1, 0, 86_401), "must be 1..86400; "),
    *CLAIMS_REFUSED,
    *each_refused(
        "resume",
        "spec.checkpoint.resumeFrom.run",
        ("", "../other", "/abs/path", "a/b", "Über", "a\nb", "a" * 64),
        "must be a run: 1 to 63 lower-case letters, digits and '-'; copy status.run",
    ),
    *each_refused(
        "claim",
        "spec.checkpoint.volume.persistentVolumeClaim.claimName",
        ("", "ns/name", "../x", "Data", "a_b"),
        "must be the name of a PersistentVolumeClaim in the job's namespace; ",
    ),
    *each_refused(
        "resume-job",
        "spec.checkpoint.resumeFrom.job",
        ("", "Digits", "team-a/digits", "1digits", "a" * 41),
        "must be the name of a PSTrainingJob in the job's namespace; write its metadata.name",
    ),
    *(
        refused(
            f"resume-{name}",
            "spec.checkpoint.resumeFrom",
            source,
            "must name exactly one of job and run; such as {job: digits}",
            server_sentence=sentence,
        )
        for name, source, sentence in (
            ("neither", {}, "should have at least 1 properties"),
            ("both", {"job": "other", "run": "r"}, "must have at most 1 item"),
        )
    ),
    refused(
        "resume-itself",
        "spec.checkpoint.resumeFrom.job",
        "digits",
        "must not be the job itself; it continues from its own checkpoint after spec.suspend; name another job, or a run",
    ),
    refused(
        "resume-text",
        "spec.checkpoint.resumeFrom",
        "5f1c9e0a",
        "must be of type object; Start from the last checkpoint of a run on the same volume: `{job: NAME}` or `{run: UID}`.",
        server_sentence="must be of type object",
    ),
    *each_refused("managed", "spec.managedBy", ("", "kueue", "a/b/c", "Ä.de/x", "/x"), "must be a domain, '/' and a name; such as"),
    *each_refused(
        "pull",
        "spec.training.compression.pull",
        ("int8", "topk", "randomk"),
        "must not be int8, topk or randomk; they leave out parts of the weights, and no later pull sends those; take bf16",
    ),
    *each_refused("ratio", "spec.training.compression.ratio", (0.0, 0.51, -0.1), "must be 0.0001..0.5; "),
    *(
        refused(f"{path}-{value}", f"spec.training.{path}", value, f"must be {limits}; ")
        for path, values, limits in (
            ("sync.backupWorkers", (-1, 4000), "0..3999"),
            ("softsync.splits", (0, 4001), "1..4000"),
            ("threshold.staleness", (-1, 100_001), "0..100000"),
            ("bounded.staleness", (-1, 100_001), "0..100000"),
            ("warmupSteps", (-1, 10**9 + 1), "0..1000000000"),
            ("gradientMebibytes", (3, 65537), "4..65536"),
            ("sync.maxGradNorm", (0, -1.0, 1.1e6), "1e-06..1000000"),
            ("maxPushNorm", (0, -1.0, 1.1e12), "1e-06..1000000000000"),
        )
        for value in values
    ),
    *(Case(f"no-step-{value}", {(at := "spec.workers.progressDeadlineSeconds"): value}, at, "must be 5..86400; ") for value in (4, 86_401)),
    *each_refused("processes", "spec.workers.processes", (0, -1, 65, "all", "2", ""), "must be 1..64 or auto; "),
    Case(
        "processes-of-many-gpus",
        {"spec.workers.processes": "auto", "spec.workers.template.spec.containers.0.resources": {"limits": {"nvidia.com/gpu": 65}}},
        "spec.workers.processes",
        "must not stand for more than 64 processes; ",
        server=False,
    ),
    *(
        refused(f"local-sum-{way}-of-one", "spec.workers.localSum", way, "must not be given without spec.workers.processes; ")
        for way in ("shared", "gloo", "nccl")
    ),
    Case(
        "processes-local",
        {"spec.workers.processes": "auto", "spec.training": {"mode": "local"}},
        "spec.training.mode",
        "must not be local with spec.workers.processes; ",
    ),
    *(
        Case(
            f"processes-{reduction}",
            {"spec.workers.processes": 2, "spec.training": {"sync": {"reduction": reduction}}},
            "spec.training.sync.reduction",
            "must be mean or sum with spec.workers.processes; ",
        )
        for reduction in ("median", "trimmed_mean", "mine:norm")
    ),
    Case(
        "processes-stages",
        {
            "spec.workers.processes": 4,
            "spec.workers.replicas": 2,
            "spec.stages": [{"name": "a"}, {"name": "b", "cut": "head"}],
        },
        "spec.workers.processes",
        "must not be given with spec.stages; ",
    ),
    *(
        refused(
            f"local-{field}-{value}",
            "spec.training",
            {"mode": "local", "local": {"quorum": 1, field: value}},
            f"must be {limits}; ",
            below=f".local.{field}",
        )
        for field, values, limits in (
            ("innerSteps", (0, 10**6 + 1), "1..1000000"),
            ("quorum", (-1, 4001), "0..4000"),
            ("graceSeconds", (-0.5, 86_401), "0..86400"),
            ("lr", (0, 10.5), "1e-06..10"),
            ("momentum", (-0.1, 1), "0..0.9999"),
        )
        for value in values
    ),
    # -- across fields
    *(
        refused(
            f"mode-without-{field}",
            "spec.training",
            {"mode": mode, field: value},
            "must not be given but in spec.training.mode: ",
            below=f".{field}",
        )
        for mode, field, value in (
            ("async", "sync", {"backupWorkers": 1}),
            ("local", "bounded", {"staleness": 3}),
            ("sync", "bounded", {"staleness": 3}),
            ("async", "bounded", {"staleness": 3}),
            ("bounded", "threshold", {"staleness": 3}),
            ("sync", "softsync", {"splits": 2}),
            ("bounded", "sync", {}),
            ("sync", "local", {}),
            ("async", "sync", {"maxGradNorm": 1.0}),
        )
    ),
    refused("options-without-rule", "spec.training.ruleOptions", {"lam": 2.0}, "must not be given without spec.training.updateRule; "),
    *(
        refused(
            f"options-of-{rule}-{name}",
            "spec.training",
            {"mode": "async", "updateRule": rule, "ruleOptions": {name: 1.0}},
            "must name hyperparameters of its rule: lam, decay, adaptive of dana-dc and dc-asgd; ",
            below=".ruleOptions",
        )
        for rule, name in (("dana-zero", "lam"), ("dana-dc", "lr"), ("ftrl", "momentum"))
    ),
    Case(
        "no-block-for-each",
        {"spec.training.gradientMebibytes": 15, "spec.workers.replicas": 4},
        "spec.training.gradientMebibytes",
        "must be at least 4 times spec.workers.replicas, a block for each; ",
    ),
    Case(
        "all-are-backups",
        {"spec.training.sync.backupWorkers": 2, "spec.workers.replicas": 2},
        "spec.training.sync.backupWorkers",
        "must be below spec.workers.replicas, so that a worker is left to take; ",
    ),
    refused(
        "a-norm-with-backups",
        "spec.training.sync",
        {"maxGradNorm": 1.0, "backupWorkers": 1},
        "must not be given with spec.training.sync.backupWorkers; ",
        below=".maxGradNorm",
    ),
    Case(
        "quorum-of-more",
        {"spec.training": {"mode": "local", "local": {"quorum": 3}}, "spec.workers.replicas": 2},
        "spec.training.local.quorum",
        "must be at most spec.workers.replicas; ",
    ),
    *each_refused(
        "reduction",
        "spec.training.sync.reduction",
        ("", "max", "robust:", ":clipped", "a b:c", "robust:clipped:twice", "mean\n"),
        "must be mean, sum, median, trimmed_mean or module:function; such as robust:clipped",
    ),
    *(
        refused(
            f"scaling-{name}",
            "spec.training",
            {"lrScaling": "linear", **given},
            "must not be linear but in spec.training.mode: sync, nor with reduction: sum; only a mean",
            below=".lrScaling",
        )
        for name, given in {"async": {"mode": "async"}, "local": {"mode": "local"}, "sum": {"sync": {"reduction": "sum"}}}.items()
    ),
    refused(
        "warmup-local",
        "spec.training",
        {"mode": "local", "warmupSteps": 10},
        "must be 0 in spec.training.mode: local; ",
        below=".warmupSteps",
    ),
    refused(
        "grace-without-quorum",
        "spec.training",
        {"mode": "local", "local": {"graceSeconds": 1}},
        "must not be given without spec.training.local.quorum; a round waits for all then",
        below=".local.graceSeconds",
    ),
    refused(
        "quorum-with-delayed-nesterov",
        "spec.training",
        {"mode": "local", "updateRule": "delayed-nesterov", "local": {"quorum": 1}},
        "must be 0 with spec.training.updateRule; no round waits for others then",
        below=".local.quorum",
    ),
    refused(
        "local-shard-update",
        "spec.training",
        {"mode": "local", "updateAt": "shard"},
        "must not be shard in spec.training.mode: local; the optimizer steps on the workers",
        below=".updateAt",
    ),
    refused(
        "async-worker-update",
        "spec.training",
        {"mode": "async", "updateAt": "worker"},
        "must not be worker but in spec.training.mode: sync without backupWorkers; ",
        below=".updateAt",
    ),
    *(
        refused(
            f"update-rule-{name}",
            "spec.training",
            {"updateRule": "dana-slim", **given},
            "must not be given but in spec.training.mode: async, and delayed-nesterov in local; ",
            below=".updateRule",
        )
        for name, given in {"sync": {"mode": "sync"}, "by-default": {}, "local": {"mode": "local"}}.items()
    ),
    *FAILURES_REFUSED,
    refused(
        "claim-disabled",
        "spec.checkpoint",
        {"disabled": True, "volume": {"persistentVolumeClaim": {"claimName": "x"}}},
        "must not name a claim with spec.checkpoint.disabled: true; ",
        below=".volume",
    ),
    refused(
        "emptydir-kept",
        "spec.checkpoint.volume",
        {"emptyDir": {}},
        "must not be an emptyDir, which is lost with the shard; set spec.checkpoint.disabled",
    ),
    refused(
        "resume-disabled",
        "spec.checkpoint",
        {"disabled": True, "resumeFrom": {"job": "a"}},
        "must not be given with spec.checkpoint.disabled: true; a run is resumed",
        below=".resumeFrom",
    ),
    refused(
        "every-disabled",
        "spec.checkpoint",
        {"disabled": True, "everySteps": 5},
        "must not be given with spec.checkpoint.disabled: true; no checkpoint",
        below=".everySteps",
    ),
    refused(
        "volume-empty",
        "spec.checkpoint.volume",
        {},
        "must name exactly one volume source; such as",
        server_sentence="should have at least 1 properties",
    ),
    refused(
        "volume-two",
        "spec.checkpoint.volume",
        {"nfs": {"server": "a", "path": "/"}, "persistentVolumeClaim": {"claimName": "b"}},
        "must name exactly one volume source; such as",
        server_sentence="must have at most 1 item",
    ),
    refused(
        "shards-one-port",
        "spec.shards",
        {"replicas": 2, "template": {"spec": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}}},
        "must not be true with two or more spec.shards.replicas and a claim for checkpoints without ReadWriteMany; ",
        below=".template.spec.hostNetwork",
    ),
    # -- unknown fields, types, enums, missing parts
    refused(
        "typo",
        "spec.chekpoint",
        {"keep": 3},
        'unknown field "spec.chekpoint"; did you mean spec.checkpoint?',
        server_sentence='unknown field "spec.chekpoint"',
    ),
    Case(
        "typo-deep", {(at := "spec.shards.replica"): 3}, at, "did you mean spec.shards.replicas?", server_sentence=f'unknown field "{at}"'
    ),
    refused("typo-top", "specs", {}, "did you mean spec?", server_sentence='unknown field "specs"'),
    *(
        refused(
            f"later-{path}",
            f"spec.{path}",
            1,
            f'unknown field "spec.{path}"; fields here: ',
            server_sentence=f'unknown field "spec.{path}"',
        )
        for path in ("training.elastic", "workers.max", "scheduling")
    ),
    refused("shards-text", "spec.shards.replicas", "2", _TYPE + "integer; write it without quotes", server_sentence=_TYPE + "integer"),
    refused("shards-part", "spec.shards.replicas", 1.5, _TYPE + "integer", server_sentence=_TYPE + "int"),
    refused("shards-yes", "spec.shards.replicas", True, _TYPE + "integer", server_sentence=_TYPE + "int32"),
    refused(
        "period-text",
        "spec.checkpoint.periodSeconds",
        "30s",
        _TYPE + "integer; Seconds between checkpoints",
        server_sentence=_TYPE + "integer",
    ),
    refused("suspend-text", "spec.suspend", "yes", _TYPE + "boolean; write it without quotes", server_sentence=_TYPE + "boolean"),
    refused("spec-list", "spec", [], _TYPE + "object", server_sentence=_TYPE + "object"),
    refused("spec-missing", "spec", REMOVED, "Required value", server_sentence="Required value"),
    refused("template-list", "spec.workers.template", [], _TYPE + "object", server_sentence=_TYPE + "object"),
    refused("template-missing", "spec.workers.template", REMOVED, "Required value", server_sentence="Required value"),
    refused("shards-missing", "spec.shards.replicas", REMOVED, "Required value; Number of shards", server_sentence="Required value"),
    refused("replicas-missing", "spec.workers.replicas", REMOVED, "Required value", server_sentence="Required value"),
    *(
        refused(
            f"enum-{path}-{value}",
            f"spec.{path}",
            value,
            f'Unsupported value: "{value}": supported values: {choices}',
            server_sentence=f'Unsupported value: "{value}"',
        )
        for path, value, choices in (
            ("training.mode", "backup", ", ".join(f'"{mode}"' for mode in MODES)),
            ("training.lrScaling", "square", '"none", "linear"'),
            ("training.updateAt", "chief", '"shard", "worker"'),
            ("workers.localSum", "ring", '"auto", "shared", "gloo", "nccl"'),
            ("training.compression.push", "lz4", '"none", "bf16", "fp16", "int8", "topk", "randomk", "auto"'),
            ("checkpoint.persistentVolumeClaimRetentionPolicy.whenDeleted", "Never", '"Retain", "Delete"'),
            ("runPolicy.cleanPodPolicy", "none", '"Running", "All", "None"'),
            ("runPolicy.successPolicy", "All", '"AllWorkers", "FirstWorker"'),
            ("injection", "image", '"Auto", "None"'),
            ("shards.placement", "beside", '"Spread", "Packed", "Colocated"'),
        )
    ),
    *TEMPLATES_REFUSED,
    *PLACEMENTS_REFUSED,
    *STAGES_REFUSED,
]

PASSED: list[Case] = [
    *(case for row in _RANGES for case in _edges(*row)),
    *(Case(f"name-{name}", {"metadata.name": name}) for name in ("a", "a" * 40, "digits-2", "a--b")),
    *(Case(f"staleness-{n}", {"spec.training": {"mode": "bounded", "bounded": {"staleness": n}}}) for n in (0, 100_000)),
    *(Case(f"period-{number}", {"spec.checkpoint.periodSeconds": number}) for number in (1, 90, 86_400)),
    *CLAIMS_PASSED,
    *(Case(f"managed-{text}", {"spec.managedBy": text}) for text in ("psjob.dev/operator", "kueue.x-k8s.io/multikueue", "a.b/C_d.e")),
    Case("compression", {"spec.training.compression": {"push": "topk", "pull": "bf16", "ratio": 0.05}}),
    Case("compression-auto", {"spec.training.compression": {"push": "auto", "pull": "auto"}}),
    Case("async-shard", {"spec.training": {"mode": "async", "updateAt": "shard"}}),
    Case("scaling", {"spec.training": {"lrScaling": "linear", "warmupSteps": 10, "sync": {"reduction": "median"}}}),
    Case("warmup-async", {"spec.training": {"mode": "async", "warmupSteps": 10}}),
    Case("local", {"spec.training": {"mode": "local"}}),
    Case("local-quorum", {"spec.training": {"mode": "local", "local": {"quorum": 2, "graceSeconds": 0.5}}, "spec.workers.replicas": 3}),
    Case("local-numbers", {"spec.training": {"mode": "local", "local": {"innerSteps": 500, "lr": 1, "momentum": 0}}}),
    Case("local-async", {"spec.training": {"mode": "local", "local": {"innerSteps": 9}, "updateRule": "delayed-nesterov"}}),
    Case("delayed", {"spec.training": {"mode": "async", "updateRule": "delayed-nesterov", "ruleOptions": {"every": 8, "activation": 0.1}}}),
    Case("sync-worker", {"spec.training": {"updateAt": "worker"}}),
    Case("disabled", {"spec.checkpoint": {"disabled": True, "volume": {"emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}}}),
    Case("disabled-plain", {"spec.checkpoint.disabled": True}),
    Case("nfs", {"spec.checkpoint.volume": {"nfs": {"server": "a", "path": "/b"}}}),
    Case("claim", {"spec.checkpoint.volume": {"persistentVolumeClaim": {"claimName": "my-claim"}}}),
    Case("resume-run", {"spec.checkpoint.resumeFrom": {"run": "5f1c9e0a-7f0e-4c55-9d0b-0c5d2b7a6d11"}}),
    Case("resume-job", {"spec.checkpoint.resumeFrom": {"job": "digits-2"}}),
    *FAILURES_PASSED,
    *TEMPLATES_PASSED,
    *PLACEMENTS_PASSED,
    *STAGES_PASSED,
]
