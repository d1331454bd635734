"""Manifests to refuse and to take: one list for `psjob run` and the API server alike."""

from __future__ import annotations

from psjob_operator.contract import MODES
from tests.unit.api_claim_cases import CLAIMS_PASSED, CLAIMS_REFUSED
from tests.unit.api_failure_cases import FAILURES_PASSED, FAILURES_REFUSED
from tests.unit.api_manifest import REMOVED, Case
from tests.unit.api_placement_cases import PLACEMENTS_PASSED, PLACEMENTS_REFUSED
from tests.unit.api_stage_cases import STAGES_PASSED, STAGES_REFUSED
from tests.unit.api_template_cases import TEMPLATES_PASSED, TEMPLATES_REFUSED


def _range(path: str, low: int, high: int) -> list[Case]:
    short = path.rpartition(".")[2]
    return [
        Case(f"{short}-{value}", {path: value}, path, f"must be {low}..{high}; ")
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
        Case(f"name-{name!r}", {"metadata.name": name}, "metadata.name", _NAME, server=server)
        for server, names in ((True, ("a" * 41, "1st", "a.b", "a-")), (False, ("-a", "Digits", "zü", "größe-ß", "../up", "", "a\n")))
        for name in names
    ),
    *(
        Case(f"period-{number}", {"spec.checkpoint.periodSeconds": number}, "spec.checkpoint.periodSeconds", "must be 1..86400; ")
        for number in (-1, 0, 86_401)
    ),
    *CLAIMS_REFUSED,
    *(
        Case(
            f"resume-{text!r}",
            {"spec.checkpoint.resumeFrom": {"run": text}},
            "spec.checkpoint.resumeFrom.run",
            "must be a run: 1 to 63 lower-case letters, digits and '-'; copy status.run",
        )
        for text in ("", "../other", "/abs/path", "a/b", "Über", "a\nb", "a" * 64)
    ),
    *(
        Case(
            f"claim-{text!r}",
            {"spec.checkpoint.volume": {"persistentVolumeClaim": {"claimName": text}}},
            "spec.checkpoint.volume.persistentVolumeClaim.claimName",
            "must be the name of a PersistentVolumeClaim in the job's namespace; ",
        )
        for text in ("", "ns/name", "../x", "Data", "a_b")
    ),
    *(
        Case(
            f"resume-job-{text!r}",
            {"spec.checkpoint.resumeFrom": {"job": text}},
            "spec.checkpoint.resumeFrom.job",
            "must be the name of a PSTrainingJob in the job's namespace; write its metadata.name",
        )
        for text in ("", "Digits", "team-a/digits", "1digits", "a" * 41)
    ),
    *(
        Case(
            f"resume-{name}",
            {"spec.checkpoint.resumeFrom": source},
            "spec.checkpoint.resumeFrom",
            "must name exactly one of job and run; such as {job: digits}",
            server_sentence=sentence,
        )
        for name, source, sentence in (
            ("neither", {}, "should have at least 1 properties"),
            ("both", {"job": "other", "run": "r"}, "must have at most 1 item"),
        )
    ),
    Case(
        "resume-itself",
        {"spec.checkpoint.resumeFrom": {"job": "digits"}},
        "spec.checkpoint.resumeFrom.job",
        "must not be the job itself; it continues from its own checkpoint after spec.suspend; name another job, or a run",
    ),
    Case(
        "resume-text",
        {"spec.checkpoint.resumeFrom": "5f1c9e0a"},
        "spec.checkpoint.resumeFrom",
        "must be of type object; Start from the last checkpoint of a run on the same volume: `{job: NAME}` or `{run: UID}`.",
        server_sentence="must be of type object",
    ),
    *(
        Case(f"managed-{text!r}", {"spec.managedBy": text}, "spec.managedBy", "must be a domain, '/' and a name; such as")
        for text in ("", "kueue", "a/b/c", "Ä.de/x", "/x")
    ),
    *(
        Case(
            f"pull-{name}",
            {"spec.training.compression": {"pull": name}},
            "spec.training.compression.pull",
            "must not be int8, topk or randomk; they leave out parts of the weights, and no later pull sends those; take bf16",
        )
        for name in ("int8", "topk", "randomk")
    ),
    *(
        Case(f"ratio-{value}", {"spec.training.compression": {"ratio": value}}, "spec.training.compression.ratio", "must be 0.0001..0.5; ")
        for value in (0.0, 0.51, -0.1)
    ),
    *(
        Case(f"{path}-{value}", {f"spec.training.{path}": value}, f"spec.training.{path}", f"must be {limits}; ")
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
    *(
        Case(f"processes-{value}", {"spec.workers.processes": value}, "spec.workers.processes", "must be 1..64 or auto; ")
        for value in (0, -1, 65, "all", "2", "")
    ),
    Case(
        "processes-of-many-gpus",
        {"spec.workers.processes": "auto", "spec.workers.template.spec.containers.0.resources": {"limits": {"nvidia.com/gpu": 65}}},
        "spec.workers.processes",
        "must not stand for more than 64 processes; ",
        server=False,
    ),
    *(
        Case(
            f"local-sum-{way}-of-one",
            {"spec.workers.localSum": way},
            "spec.workers.localSum",
            "must not be given without spec.workers.processes; ",
        )
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
        Case(
            f"local-{field}-{value}",
            {"spec.training": {"mode": "local", "local": {"quorum": 1, field: value}}},
            f"spec.training.local.{field}",
            f"must be {limits}; ",
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
        Case(
            f"mode-without-{field}",
            {"spec.training": {"mode": mode, field: value}},
            f"spec.training.{field}",
            "must not be given but in spec.training.mode: ",
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
    Case(
        "options-without-rule",
        {"spec.training": {"ruleOptions": {"lam": 2.0}}},
        "spec.training.ruleOptions",
        "must not be given without spec.training.updateRule; ",
    ),
    *(
        Case(
            f"options-of-{rule}-{name}",
            {"spec.training": {"mode": "async", "updateRule": rule, "ruleOptions": {name: 1.0}}},
            "spec.training.ruleOptions",
            "must name hyperparameters of its rule: lam, decay, adaptive of dana-dc and dc-asgd; ",
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
    Case(
        "a-norm-with-backups",
        {"spec.training.sync": {"maxGradNorm": 1.0, "backupWorkers": 1}},
        "spec.training.sync.maxGradNorm",
        "must not be given with spec.training.sync.backupWorkers; ",
    ),
    Case(
        "quorum-of-more",
        {"spec.training": {"mode": "local", "local": {"quorum": 3}}, "spec.workers.replicas": 2},
        "spec.training.local.quorum",
        "must be at most spec.workers.replicas; ",
    ),
    *(
        Case(
            f"reduction-{name}",
            {"spec.training.sync": {"reduction": name}},
            "spec.training.sync.reduction",
            "must be mean, sum, median, trimmed_mean or module:function; such as robust:clipped",
        )
        for name in ("", "max", "robust:", ":clipped", "a b:c", "robust:clipped:twice", "mean\n")
    ),
    *(
        Case(
            f"scaling-{name}",
            {"spec.training": {"lrScaling": "linear", **given}},
            "spec.training.lrScaling",
            "must not be linear but in spec.training.mode: sync, nor with reduction: sum; only a mean",
        )
        for name, given in {"async": {"mode": "async"}, "local": {"mode": "local"}, "sum": {"sync": {"reduction": "sum"}}}.items()
    ),
    Case(
        "warmup-local",
        {"spec.training": {"mode": "local", "warmupSteps": 10}},
        "spec.training.warmupSteps",
        "must be 0 in spec.training.mode: local; ",
    ),
    Case(
        "grace-without-quorum",
        {"spec.training": {"mode": "local", "local": {"graceSeconds": 1}}},
        "spec.training.local.graceSeconds",
        "must not be given without spec.training.local.quorum; a round waits for all then",
    ),
    Case(
        "quorum-with-delayed-nesterov",
        {"spec.training": {"mode": "local", "updateRule": "delayed-nesterov", "local": {"quorum": 1}}},
        "spec.training.local.quorum",
        "must be 0 with spec.training.updateRule; no round waits for others then",
    ),
    Case(
        "local-shard-update",
        {"spec.training": {"mode": "local", "updateAt": "shard"}},
        "spec.training.updateAt",
        "must not be shard in spec.training.mode: local; the optimizer steps on the workers",
    ),
    Case(
        "async-worker-update",
        {"spec.training": {"mode": "async", "updateAt": "worker"}},
        "spec.training.updateAt",
        "must not be worker but in spec.training.mode: sync without backupWorkers; ",
    ),
    *(
        Case(
            f"update-rule-{name}",
            {"spec.training": {"updateRule": "dana-slim", **given}},
            "spec.training.updateRule",
            "must not be given but in spec.training.mode: async, and delayed-nesterov in local; ",
        )
        for name, given in {"sync": {"mode": "sync"}, "by-default": {}, "local": {"mode": "local"}}.items()
    ),
    *FAILURES_REFUSED,
    Case(
        "claim-disabled",
        {"spec.checkpoint": {"disabled": True, "volume": {"persistentVolumeClaim": {"claimName": "x"}}}},
        "spec.checkpoint.volume",
        "must not name a claim with spec.checkpoint.disabled: true; ",
    ),
    Case(
        "emptydir-kept",
        {"spec.checkpoint.volume": {"emptyDir": {}}},
        "spec.checkpoint.volume",
        "must not be an emptyDir, which is lost with the shard; set spec.checkpoint.disabled",
    ),
    Case(
        "resume-disabled",
        {"spec.checkpoint": {"disabled": True, "resumeFrom": {"job": "a"}}},
        "spec.checkpoint.resumeFrom",
        "must not be given with spec.checkpoint.disabled: true; a run is resumed",
    ),
    Case(
        "every-disabled",
        {"spec.checkpoint": {"disabled": True, "everySteps": 5}},
        "spec.checkpoint.everySteps",
        "must not be given with spec.checkpoint.disabled: true; no checkpoint",
    ),
    Case(
        "volume-empty",
        {"spec.checkpoint.volume": {}},
        "spec.checkpoint.volume",
        "must name exactly one volume source; such as",
        server_sentence="should have at least 1 properties",
    ),
    Case(
        "volume-two",
        {"spec.checkpoint.volume": {"nfs": {"server": "a", "path": "/"}, "persistentVolumeClaim": {"claimName": "b"}}},
        "spec.checkpoint.volume",
        "must name exactly one volume source; such as",
        server_sentence="must have at most 1 item",
    ),
    Case(
        "shards-one-port",
        {"spec.shards": {"replicas": 2, "template": {"spec": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}}}},
        "spec.shards.template.spec.hostNetwork",
        "must not be true with two or more spec.shards.replicas and a claim for checkpoints without ReadWriteMany; ",
    ),
    # -- unknown fields, types, enums, missing parts
    Case(
        "typo",
        {"spec.chekpoint": {"keep": 3}},
        "spec.chekpoint",
        'unknown field "spec.chekpoint"; did you mean spec.checkpoint?',
        server_sentence='unknown field "spec.chekpoint"',
    ),
    Case(
        "typo-deep", {(at := "spec.shards.replica"): 3}, at, "did you mean spec.shards.replicas?", server_sentence=f'unknown field "{at}"'
    ),
    Case("typo-top", {"specs": {}}, "specs", "did you mean spec?", server_sentence='unknown field "specs"'),
    *(
        Case(
            f"later-{path}",
            {f"spec.{path}": 1},
            f"spec.{path}",
            f'unknown field "spec.{path}"; fields here: ',
            server_sentence=f'unknown field "spec.{path}"',
        )
        for path in ("training.elastic", "workers.max", "scheduling")
    ),
    Case(
        "shards-text",
        {"spec.shards.replicas": "2"},
        "spec.shards.replicas",
        _TYPE + "integer; write it without quotes",
        server_sentence=_TYPE + "integer",
    ),
    Case("shards-part", {"spec.shards.replicas": 1.5}, "spec.shards.replicas", _TYPE + "integer", server_sentence=_TYPE + "int"),
    Case("shards-yes", {"spec.shards.replicas": True}, "spec.shards.replicas", _TYPE + "integer", server_sentence=_TYPE + "int32"),
    Case(
        "period-text",
        {"spec.checkpoint.periodSeconds": "30s"},
        "spec.checkpoint.periodSeconds",
        _TYPE + "integer; Seconds between checkpoints",
        server_sentence=_TYPE + "integer",
    ),
    Case(
        "suspend-text",
        {"spec.suspend": "yes"},
        "spec.suspend",
        _TYPE + "boolean; write it without quotes",
        server_sentence=_TYPE + "boolean",
    ),
    Case("spec-list", {"spec": []}, "spec", _TYPE + "object", server_sentence=_TYPE + "object"),
    Case("spec-missing", {"spec": REMOVED}, "spec", "Required value", server_sentence="Required value"),
    Case("template-list", {"spec.workers.template": []}, "spec.workers.template", _TYPE + "object", server_sentence=_TYPE + "object"),
    Case(
        "template-missing", {"spec.workers.template": REMOVED}, "spec.workers.template", "Required value", server_sentence="Required value"
    ),
    Case(
        "shards-missing",
        {"spec.shards.replicas": REMOVED},
        "spec.shards.replicas",
        "Required value; Number of shards",
        server_sentence="Required value",
    ),
    Case(
        "replicas-missing", {"spec.workers.replicas": REMOVED}, "spec.workers.replicas", "Required value", server_sentence="Required value"
    ),
    *(
        Case(
            f"enum-{path}-{value}",
            {f"spec.{path}": value},
            f"spec.{path}",
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
