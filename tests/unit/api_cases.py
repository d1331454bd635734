"""Manifests to refuse and to take: one list for `psjob run` and the API server alike.

- Rules of runPolicy.podFailurePolicy.rules to refuse and to take.
- Manifests that say where shards are placed, to refuse and to take.
"""

from __future__ import annotations

from typing import Any

from psjob_operator.contract import MODES
from tests.unit.api_claim_cases import CLAIMS_PASSED, CLAIMS_REFUSED
from tests.unit.api_manifest import MANY_NODES, MY_CLAIM, REMOVED, Case, each_refused, refused
from tests.unit.api_stage_cases import STAGES_PASSED, STAGES_REFUSED
from tests.unit.api_template_cases import TEMPLATES_PASSED, TEMPLATES_REFUSED

RULES = "spec.runPolicy.podFailurePolicy.rules"
FIRST = f"{RULES}[0]"


def _rule(**given: Any) -> dict[str, Any]:
    return {RULES: [{"action": "FailJob", **given}]}


def _codes(*values: int, operator: str = "In") -> dict[str, Any]:
    return _rule(onExitCodes={"operator": operator, "values": list(values)})


def _conditions(*types: str) -> dict[str, Any]:
    return _rule(onPodConditions=[{"type": name} for name in types])


_ANY = {"action": "FailJob", "onReasons": ["Error"]}
_MANY = "Too many"

FAILURES_REFUSED: list[Case] = [
    refused("rules-21", RULES, [_ANY] * 21, "must have 0..20 items; ", server_sentence=_MANY),
    Case("rule-of-all", _rule(), FIRST, "must have onExitCodes, onPodConditions, onSignals or onReasons; a rule that matches every"),
    Case("rule-of-nothing", _rule(onSignals=[], onReasons=[]), FIRST, "must have onExitCodes, onPodConditions, onSignals or onReasons; "),
    *(Case(f"rule-code-{code}", _codes(code), f"{FIRST}.onExitCodes.values[0]", "must be 1..255; ") for code in (-1, 0, 256)),
    Case("rule-no-codes", _codes(), f"{FIRST}.onExitCodes.values", "must have 1..64 items; "),
    Case("rule-codes-65", _codes(*range(1, 66)), f"{FIRST}.onExitCodes.values", "must have 1..64 items; ", server_sentence=_MANY),
    *(Case(f"rule-signal-{one}", _rule(onSignals=[9, one]), f"{FIRST}.onSignals[1]", "must be 1..64; such as 11") for one in (0, 65)),
    Case("rule-signals-17", _rule(onSignals=[9] * 17), f"{FIRST}.onSignals", "must have 0..16 items; ", server_sentence=_MANY),
    *(Case(f"rule-reason-{word!r}", _rule(onReasons=[word]), f"{FIRST}.onReasons[0]", "must be one word of 1 to 63 letters and digits; ")
        for word in ("", "OOM killed", "9", "über", "Error\n")),
    Case("rule-reasons-17", _rule(onReasons=["Error"] * 17), f"{FIRST}.onReasons", "must have 0..16 items; ", server_sentence=_MANY),
    Case("rule-conditions-21", _conditions(*["A"] * 21), f"{FIRST}.onPodConditions", "must have 0..20 items; ", server_sentence=_MANY),
    *(Case(f"rule-condition-{name!r}", _conditions(name), f"{FIRST}.onPodConditions[0].type", sentence)
        for name, sentence in (
            ("", "must be a pod condition's type: "),
            ("Disruption Target", "must be a pod condition's type: "),
            ("Ready", "must not be a condition that every pod has: "),
        )),
    Case("rule-condition-status", _rule(onPodConditions=[{"type": "DisruptionTarget", "status": "yes"}]),
        f"{FIRST}.onPodConditions[0].status", 'supported values: "True", "False", "Unknown"', server_sentence='Unsupported value: "yes"'),
    Case("rule-per", _rule(action="Ignore", per="Process", onReasons=["Error"]), f"{FIRST}.per", "must have action: Count where"),
    Case("rule-of-old", {RULES: [{"action": "Restart", "onReasons": ["Error"]}]}, f"{FIRST}.action",
        'supported values: "FailJob", "Count", "Ignore"', server_sentence='Unsupported value: "Restart"'),
    Case("rule-of-shards", _rule(role="shards", onReasons=["Error"]), f"{FIRST}.role", 'supported values: "shard", "worker", "any"',
        server_sentence='Unsupported value: "shards"'),
]  # fmt: skip

FAILURES_PASSED: list[Case] = [
    *(Case(f"rules-{count}", {RULES: [_ANY] * count}) for count in (0, 20)),
    Case("rule-codes-64", _codes(*range(1, 65), operator="NotIn")),
    Case("rule-conditions", _conditions("DisruptionTarget", "example.com/Config-Issue", *"ABCDEFGHIJKLMNOPQR")),
    Case("rule-per-process", {RULES: [{"action": "Count", "per": "Process", "onReasons": ["Error"]}]}),
    Case("rule-codes-ends", _codes(1, 255)),
    Case("rule-whole", _rule(**_codes(3)[RULES][0] | {"role": "worker", "onSignals": [1, 64], "onReasons": ["Error", "a" * 63]})),
    Case("rule-largest", {RULES: [{"action": "Ignore", "onSignals": [11] * 16, "onReasons": ["Error"] * 16}] * 20}),
    Case("no-limits-of-a-role", {"spec.runPolicy.backoffLimitPerRole": {}}),
]  # fmt: skip


_MOUNT = (
    "must not be Spread or Colocated with two or more spec.shards.replicas and a claim for checkpoints without ReadWriteMany;"
    " one node at a time can mount it; "
)
_STAGES = [{"name": "a", "replicas": 2}, {"name": "b", "replicas": 1}]
_WIDE = {"spec.checkpoint": MANY_NODES}

PLACEMENTS_REFUSED = [
    *(refused(f"{word}-on-one-node", "spec.shards.placement", word, _MOUNT) for word in ("Spread", "Colocated")),
    Case("colocated-on-one-node-by-name", {"spec.shards.placement": "Colocated",
        "spec.checkpoint": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}, "disabled": False}},
        "spec.shards.placement", _MOUNT),
    Case("more-shards-than-workers", {"spec.shards": {"replicas": 5, "placement": "Colocated"}, **_WIDE}, "spec.shards.replicas",
        "must be at most spec.workers.replicas with spec.shards.placement: Colocated; shard i stands beside worker i"),
    Case("more-shards-than-workers-of-stages", {"spec.shards": {"replicas": 4, "placement": "Colocated"}, **_WIDE, "spec.stages": _STAGES,
        "spec.workers.replicas": REMOVED}, "spec.shards.replicas",
        "must be at most spec.workers.replicas with spec.shards.placement: Colocated; "),
    *(
        Case(f"volume-without-pairs-{placement}", {"spec.shards": {"replicas": 1, **given, "pairStorageClassName": "local-path"}},
             "spec.shards.pairStorageClassName", "must not be given without placement: Colocated; leave it out")
        for placement, given in (("absent", {}), ("packed", {"placement": "Packed"}))
    ),
]  # fmt: skip
PLACEMENTS_PASSED = [
    *(Case(f"placement-{word}", {"spec.shards.placement": word, **_WIDE}) for word in ("Spread", "Packed", "Colocated")),
    Case("packed-on-one-node", {"spec.shards.placement": "Packed"}),
    Case("spread-of-one", {"spec.shards": {"replicas": 1, "placement": "Spread"}}),
    Case("pairs-by-a-volume", {"spec.shards": {"replicas": 1, "placement": "Colocated", "pairStorageClassName": "local-path"}}),
    Case("colocated-of-one", {"spec.shards": {"replicas": 1, "placement": "Colocated"}}),
    Case("colocated-without-checkpoints", {"spec.shards.placement": "Colocated", "spec.checkpoint": {"disabled": True}}),
    Case("colocated-claim", {"spec.shards.placement": "Colocated", "spec.checkpoint": MY_CLAIM}),
    Case("as-many-shards-as-workers", {"spec.shards": {"replicas": 4, "placement": "Colocated"}, **_WIDE}),
    Case("as-many-shards-as-workers-of-stages", {"spec.shards": {"replicas": 3, "placement": "Colocated"}, **_WIDE, "spec.stages": _STAGES,
        "spec.workers.replicas": REMOVED}),
]  # fmt: skip


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
    ("spec.training.delay", 0, 8),
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
_DELAY_MODES = "must be 0 but in spec.training.mode: sync without backupWorkers, bounded and async; take one of these, or leave delay out"
_DELAY_BOUND = (
    "must be below spec.training.bounded.staleness (3 where it is left out); it counts toward that; lower delay, or raise staleness"
)
_DELAYS: list[tuple[str, dict[str, Any], str]] = [
    *((mode, {"mode": mode, "delay": 1}, _DELAY_MODES) for mode in ("softsync", "threshold", "local")),
    ("backups", {"delay": 1, "sync": {"backupWorkers": 1}}, _DELAY_MODES),
    ("sync", {"delay": 2}, "must be 0 or 1 in spec.training.mode: sync; write 1, or take mode bounded or async"),
    ("bounded", {"mode": "bounded", "delay": 3}, _DELAY_BOUND),
    ("bounded-empty", {"mode": "bounded", "delay": 3, "bounded": {}}, _DELAY_BOUND),
    ("bounded-least", {"mode": "bounded", "delay": 1, "bounded": {"staleness": 1}}, _DELAY_BOUND),
    ("bounded-none", {"mode": "bounded", "delay": 1, "bounded": {"staleness": 0}}, _DELAY_BOUND),
]  # fmt: skip
"""By name: spec.training, and what is said of its delay."""
_NAME = "must be 1 to 40 lower-case letters, digits and '-'"
_TYPE = "must be of type "
_FIXED = "is fixed; make a new job"

REFUSED: list[Case] = [
    *(case for row in _RANGES for case in _range(*row)),
    # -- names and texts
    *(refused(f"name-{name!r}", "metadata.name", name, _NAME, server=server)
        for server, names in ((True, ("a" * 41, "1st", "a.b", "a-")), (False, ("-a", "Digits", "zü", "größe-ß", "../up", "", "a\n")))
        for name in names),
    *each_refused("period", "spec.checkpoint.periodSeconds", (-1, 0, 86_401), "must be 1..86400; "),
    *CLAIMS_REFUSED,
    *each_refused("resume", "spec.checkpoint.resumeFrom.run", ("", "../other", "/abs/path", "a/b", "Über", "a\nb", "a" * 64),
        "must be a run: 1 to 63 lower-case letters, digits and '-'; copy status.run"),
    *each_refused("claim", "spec.checkpoint.volume.persistentVolumeClaim.claimName", ("", "ns/name", "../x", "Data", "a_b"),
        "must be the name of a PersistentVolumeClaim in the job's namespace; "),
    *each_refused("resume-job", "spec.checkpoint.resumeFrom.job", ("", "Digits", "team-a/digits", "1digits", "a" * 41),
        "must be the name of a PSTrainingJob in the job's namespace; write its metadata.name"),
    *(refused(f"resume-{name}", "spec.checkpoint.resumeFrom", source, "must name exactly one of job and run; such as {job: digits}",
          server_sentence=sentence)
        for name, source, sentence in (
            ("neither", {}, "should have at least 1 properties"),
            ("both", {"job": "other", "run": "r"}, "must have at most 1 item"),
        )),
    refused("resume-itself", "spec.checkpoint.resumeFrom.job", "digits",
        "must not be the job itself; it continues from its own checkpoint after spec.suspend; name another job, or a run"),
    refused("resume-text", "spec.checkpoint.resumeFrom", "5f1c9e0a",
        "must be of type object; Start from the last checkpoint of a run on the same volume: `{job: NAME}` or `{run: UID}`.",
        server_sentence="must be of type object"),
    *each_refused("managed", "spec.managedBy", ("", "kueue", "a/b/c", "Ä.de/x", "/x"), "must be a domain, '/' and a name; such as"),
    *each_refused("pull", "spec.training.compression.pull", ("int8", "topk", "randomk"),
        "must not be int8, topk or randomk; they leave out parts of the weights, and no later pull sends those; take bf16"),
    *each_refused("ratio", "spec.training.compression.ratio", (0.0, 0.51, -0.1), "must be 0.0001..0.5; "),
    *(refused(f"{path}-{value}", f"spec.training.{path}", value, f"must be {limits}; ")
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
        for value in values),
    *(Case(f"no-step-{value}", {(at := "spec.workers.progressDeadlineSeconds"): value}, at, "must be 5..86400; ") for value in (4, 86_401)),
    *each_refused("streams", "spec.training.streams", (0, -1, 9, "all", "2", ""), "must be 1..8 or auto; "),
    *each_refused("processes", "spec.workers.processes", (0, -1, 65, "all", "2", ""), "must be 1..64 or auto; "),
    Case("processes-of-many-gpus", {"spec.workers.processes": "auto",
        "spec.workers.template.spec.containers.0.resources": {"limits": {"nvidia.com/gpu": 65}}}, "spec.workers.processes",
        "must not stand for more than 64 processes; ", server=False),
    *(refused(f"local-sum-{way}-of-one", "spec.workers.localSum", way, "must not be given without spec.workers.processes; ")
        for way in ("shared", "gloo", "nccl")),
    Case("processes-local", {"spec.workers.processes": "auto", "spec.training": {"mode": "local"}}, "spec.training.mode",
        "must not be local with spec.workers.processes; "),
    *(Case(f"processes-{reduction}", {"spec.workers.processes": 2, "spec.training": {"sync": {"reduction": reduction}}},
          "spec.training.sync.reduction", "must be mean or sum with spec.workers.processes; ")
        for reduction in ("median", "trimmed_mean", "mine:norm")),
    *(Case(f"processes-{given}-delay", {"spec.workers.processes": given, "spec.training": {"mode": "bounded", "delay": 1}},
          "spec.training.delay", "must be 0 with spec.workers.processes; the processes of a worker wait for its push together; leave one")
        for given in (2, "auto")),
    Case("processes-stages", {"spec.workers.processes": 4, "spec.workers.replicas": 2,
        "spec.stages": [{"name": "a"}, {"name": "b", "cut": "head"}]}, "spec.workers.processes", "must not be given with spec.stages; "),
    *(refused(f"local-{field}-{value}", "spec.training", {"mode": "local", "local": {"quorum": 1, field: value}}, f"must be {limits}; ",
          below=f".local.{field}")
        for field, values, limits in (
            ("innerSteps", (0, 10**6 + 1), "1..1000000"),
            ("quorum", (-1, 4001), "0..4000"),
            ("graceSeconds", (-0.5, 86_401), "0..86400"),
            ("lr", (0, 10.5), "1e-06..10"),
            ("momentum", (-0.1, 1), "0..0.9999"),
        )
        for value in values),
    # -- across fields
    *(refused(f"mode-without-{field}", "spec.training", {"mode": mode, field: value}, "is allowed only in spec.training.mode: ",
          below=f".{field}")
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
        )),
    *(refused(f"delay-{name}", "spec.training", training, sentence, below=".delay") for name, training, sentence in _DELAYS),
    refused("options-without-rule", "spec.training.ruleOptions", {"lam": 2.0}, "must not be given without spec.training.updateRule; "),
    *(refused(f"options-of-{rule}-{name}", "spec.training", {"mode": "async", "updateRule": rule, "ruleOptions": {name: 1.0}},
          "must name hyperparameters of its rule: lam, decay, adaptive of dana-dc and dc-asgd; ", below=".ruleOptions")
        for rule, name in (("dana-zero", "lam"), ("dana-dc", "lr"), ("ftrl", "momentum"))),
    Case("no-block-for-each", {"spec.training.gradientMebibytes": 15, "spec.workers.replicas": 4}, "spec.training.gradientMebibytes",
        "must be at least 4 times spec.workers.replicas, a block for each; "),
    Case("all-are-backups", {"spec.training.sync.backupWorkers": 2, "spec.workers.replicas": 2}, "spec.training.sync.backupWorkers",
        "must be below spec.workers.replicas, so that a worker is left to take; "),
    refused("a-norm-with-backups", "spec.training.sync", {"maxGradNorm": 1.0, "backupWorkers": 1},
        "must not be given with spec.training.sync.backupWorkers; ", below=".maxGradNorm"),
    Case("quorum-of-more", {"spec.training": {"mode": "local", "local": {"quorum": 3}}, "spec.workers.replicas": 2},
        "spec.training.local.quorum", "must be at most spec.workers.replicas; "),
    *each_refused("reduction", "spec.training.sync.reduction",
        ("", "max", "robust:", ":clipped", "a b:c", "robust:clipped:twice", "mean\n"),
        "must be mean, sum, median, trimmed_mean or module:function; such as robust:clipped"),
    *(refused(f"scaling-{name}", "spec.training", {"lrScaling": "linear", **given},
          "may be linear only in spec.training.mode: sync without reduction: sum; only a mean", below=".lrScaling")
        for name, given in {"async": {"mode": "async"}, "local": {"mode": "local"}, "sum": {"sync": {"reduction": "sum"}}}.items()),
    refused("warmup-local", "spec.training", {"mode": "local", "warmupSteps": 10}, "must be 0 in spec.training.mode: local; ",
        below=".warmupSteps"),
    refused("grace-without-quorum", "spec.training", {"mode": "local", "local": {"graceSeconds": 1}},
        "must not be given without spec.training.local.quorum; a round waits for all then", below=".local.graceSeconds"),
    refused("quorum-with-delayed-nesterov", "spec.training", {"mode": "local", "updateRule": "delayed-nesterov", "local": {"quorum": 1}},
        "must be 0 with spec.training.updateRule; no round waits for others then", below=".local.quorum"),
    refused("local-shard-update", "spec.training", {"mode": "local", "updateAt": "shard"},
        "must not be shard in spec.training.mode: local; the optimizer steps on the workers", below=".updateAt"),
    refused("async-worker-update", "spec.training", {"mode": "async", "updateAt": "worker"},
        "may be worker only in spec.training.mode: sync without backupWorkers and delay; ", below=".updateAt"),
    refused("late-worker-update", "spec.training", {"delay": 1, "updateAt": "worker"},
        "may be worker only in spec.training.mode: sync without backupWorkers and delay; other updates run on the shards",
        below=".updateAt"),
    *(refused(f"update-rule-{name}", "spec.training", {"updateRule": "dana-slim", **given},
          "is allowed only in spec.training.mode: async, and delayed-nesterov in local; ", below=".updateRule")
        for name, given in {"sync": {"mode": "sync"}, "by-default": {}, "local": {"mode": "local"}}.items()),
    *FAILURES_REFUSED,
    refused("claim-disabled", "spec.checkpoint", {"disabled": True, "volume": {"persistentVolumeClaim": {"claimName": "x"}}},
        "must not name a claim with spec.checkpoint.disabled: true; ", below=".volume"),
    refused("emptydir-kept", "spec.checkpoint.volume", {"emptyDir": {}},
        "must not be an emptyDir, which is lost with the shard; set spec.checkpoint.disabled"),
    refused("resume-disabled", "spec.checkpoint", {"disabled": True, "resumeFrom": {"job": "a"}},
        "must not be given with spec.checkpoint.disabled: true; a run is resumed", below=".resumeFrom"),
    refused("every-disabled", "spec.checkpoint", {"disabled": True, "everySteps": 5},
        "must not be given with spec.checkpoint.disabled: true; no checkpoint", below=".everySteps"),
    refused("volume-empty", "spec.checkpoint.volume", {}, "must name exactly one volume source; such as",
        server_sentence="should have at least 1 properties"),
    refused("volume-two", "spec.checkpoint.volume", {"nfs": {"server": "a", "path": "/"}, "persistentVolumeClaim": {"claimName": "b"}},
        "must name exactly one volume source; such as", server_sentence="must have at most 1 item"),
    refused("shards-one-port", "spec.shards", {"replicas": 2,
        "template": {"spec": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}}},
        "must not be true with two or more spec.shards.replicas and a claim for checkpoints without ReadWriteMany; ",
        below=".template.spec.hostNetwork"),
    # -- unknown fields, types, enums, missing parts
    refused("typo", "spec.chekpoint", {"keep": 3}, 'unknown field "spec.chekpoint"; did you mean spec.checkpoint?',
        server_sentence='unknown field "spec.chekpoint"'),
    Case("typo-deep", {(at := "spec.shards.replica"): 3}, at, "did you mean spec.shards.replicas?",
        server_sentence=f'unknown field "{at}"'),
    refused("typo-top", "specs", {}, "did you mean spec?", server_sentence='unknown field "specs"'),
    *(refused(f"later-{path}", f"spec.{path}", 1, f'unknown field "spec.{path}"; fields here: ',
          server_sentence=f'unknown field "spec.{path}"')
        for path in ("training.elastic", "workers.max", "scheduling")),
    refused("shards-text", "spec.shards.replicas", "2", _TYPE + "integer; write it without quotes", server_sentence=_TYPE + "integer"),
    refused("shards-part", "spec.shards.replicas", 1.5, _TYPE + "integer", server_sentence=_TYPE + "int"),
    refused("shards-yes", "spec.shards.replicas", True, _TYPE + "integer", server_sentence=_TYPE + "int32"),
    refused("period-text", "spec.checkpoint.periodSeconds", "30s", _TYPE + "integer; Seconds between checkpoints",
        server_sentence=_TYPE + "integer"),
    refused("suspend-text", "spec.suspend", "yes", _TYPE + "boolean; write it without quotes", server_sentence=_TYPE + "boolean"),
    refused("spec-list", "spec", [], _TYPE + "object", server_sentence=_TYPE + "object"),
    refused("spec-missing", "spec", REMOVED, "Required value", server_sentence="Required value"),
    refused("template-list", "spec.workers.template", [], _TYPE + "object", server_sentence=_TYPE + "object"),
    refused("template-missing", "spec.workers.template", REMOVED, "Required value", server_sentence="Required value"),
    refused("shards-missing", "spec.shards.replicas", REMOVED, "Required value; Number of shards", server_sentence="Required value"),
    refused("replicas-missing", "spec.workers.replicas", REMOVED, "Required value", server_sentence="Required value"),
    *(refused(f"enum-{path}-{value}", f"spec.{path}", value, f'Unsupported value: "{value}": supported values: {choices}',
          server_sentence=f'Unsupported value: "{value}"')
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
        )),
    *TEMPLATES_REFUSED,
    *PLACEMENTS_REFUSED,
    *STAGES_REFUSED,
]  # fmt: skip

PASSED: list[Case] = [
    *(case for row in _RANGES if row[0] != "spec.training.delay" for case in _edges(*row)),
    *(Case(f"streams-{given}", {"spec.training.streams": given}) for given in (1, 8, "auto")),
    *(Case(f"delay-of-{name}", {"spec.training": training}) for name, training in (
        ("none", {"mode": "local", "delay": 0}),
        ("bounded-none", {"mode": "bounded", "delay": 0, "bounded": {"staleness": 0}}),
        ("backups-none", {"delay": 0, "sync": {"backupWorkers": 1}}),
        ("workers-none", {"delay": 0, "updateAt": "worker"}),
        ("sync", {"delay": 1, "updateAt": "shard", "sync": {"reduction": "median", "maxGradNorm": 1.0}}),
        ("bounded", {"mode": "bounded", "delay": 2}),
        ("bounded-most", {"mode": "bounded", "delay": 8, "bounded": {"staleness": 9}}),
        ("async", {"mode": "async", "delay": 8, "updateRule": "dana-zero"}),
    )),
    Case("delay-of-one-process", {"spec.workers.processes": 1, "spec.training.delay": 1}),
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
]  # fmt: skip
