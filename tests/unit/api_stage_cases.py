"""Stages to refuse and to take."""

from __future__ import annotations

from typing import Any

from tests.unit.api_manifest import REMOVED, Case, refused

_POD: dict[str, Any] = {"spec": {"containers": [{"name": "worker", "image": "me/stage:1", "command": ["python", "stage.py"]}]}}
_HOST = {"spec": {**_POD["spec"], "hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}}


def stages(*replicas: int, cuts: bool = True, **laid: Any) -> list[dict[str, Any]]:
    """Stages of so many workers; `s1={…}` lays something over the second one."""
    made: list[dict[str, Any]] = [{"name": f"s{k}", "replicas": count, "cut": f"layers.{k}"} for k, count in enumerate(replicas)]
    for stage in made if not cuts else made[:1]:
        del stage["cut"]
    return [{**stage, **laid.get(stage["name"], {})} for stage in made]


def _with(**change: Any) -> dict[str, Any]:
    """Stages 2-1-1, and what is changed beside them: `training_mode` is spec.training.mode."""
    given = {f"spec.{key.replace('_', '.')}": value for key, value in change.items()}
    return {"spec.workers.replicas": REMOVED, "spec.stages": stages(2, 1, 1), **given}


def _template(**change: Any) -> list[dict[str, Any]]:
    """Stages of which the second has a template of its own, `change` laid over its pod."""
    return stages(2, 1, s1={"template": {"spec": {**_POD["spec"], **change}}})


def _container(**change: Any) -> list[dict[str, Any]]:
    return _template(containers=[{**_POD["spec"]["containers"][0], **change}])


STAGES_REFUSED: list[Case] = [
    *(Case(f"stages-{len(given)}", _with(stages=given), "spec.stages", "must have 2..64 items; a model that is not cut",
          server_sentence=said)
        for given, said in ((stages(1), "must have 2..64 items"), (stages(*[1] * 65), "must have at most 64 items"))),
    *(Case(f"stage-name-{name!r}", _with(stages=stages(2, 1, s1={"name": name})), "spec.stages[1].name",
          "must be a DNS label: 1 to 63 lower-case letters, digits and '-'")
        for name in ("", "Two", "-a", "a-", "a.b", "a_b", "a\n")),
    Case("stage-name-long", _with(stages=stages(2, 1, s1={"name": "a" * 64})), "spec.stages[1].name", "must be a DNS label: ",
        server_sentence="may not be more than 63 "),
    Case("stage-twice", _with(stages=stages(2, 1, s1={"name": "s0"})), "spec.stages", "must have another name for each stage; rename"),
    *(Case(f"stage-replicas-{count}", _with(stages=stages(2, count)), "spec.stages[1].replicas", "must be 1..256; leave it out for 1")
        for count in (0, -1, 257)),
    Case("stage-workers", _with(stages=stages(255, 2)), "spec.stages", "must have at most 256 replicas in all stages together; lower"),
    Case("cut-empty", _with(stages=stages(2, 1, s1={"cut": ""})), "spec.stages[1].cut", "must have 1..256 characters; name the module"),
    Case("cut-long", _with(stages=stages(2, 1, s1={"cut": "a" * 257})), "spec.stages[1].cut", "must have 1..256 characters; ",
        server_sentence="may not be more than 256 "),
    Case("cut-of-the-first", _with(stages=stages(2, 1, s0={"cut": "embed"})), "spec.stages",
        "must have no cut in the first stage; it begins"),
    Case("cuts-of-some", _with(stages=stages(2, 1, 1, cuts=False, s2={"cut": "head"})), "spec.stages",
        "must have a cut in each stage after the first, or in none; name the module"),
    *(Case(f"stages-of-other-{count}", _with(workers_replicas=count), "spec.workers.replicas",
          "must be the sum of spec.stages[].replicas; leave it out")
        for count in (3, 5)),
    *(Case(f"stages-{field}", _with(**{f"training_{field}": value}), f"spec.training.{field}", f"must be {wanted} with spec.stages; ")
        for field, value, wanted in (
            ("mode", "async", "sync"),
            ("sync.backupWorkers", 1, "0"),
            ("sync.reduction", "median", "mean"),
            ("delay", 1, "0"),
        )),
    Case("stages-first-worker", _with(runPolicy_successPolicy="FirstWorker"), "spec.runPolicy.successPolicy",
        "must be AllWorkers with spec.stages; no worker has all of the model"),
    Case("stages-worker-update", _with(training_updateAt="worker"), "spec.training.updateAt",
        "must not be worker with spec.stages; no worker has all of the optimizer's state"),
    refused("pipeline-without-stages", "spec.training.pipeline", {"microbatches": 4}, "must not be given without spec.stages; "),
    *(Case(f"microbatches-{count}", _with(training_pipeline={"microbatches": count}), "spec.training.pipeline.microbatches",
          "must be 1..1024; ")
        for count in (0, 1025)),
    *(
        Case(
            f"pipeline-{'-'.join(words.values())}",
            _with(training_pipeline={"microbatches": 4, **words}),
            "spec.training.pipeline",
            "must have schedule: pipedream for predict: nesterov and for weights: vertical and latest, and pipedream or flush for weights: "
            "recompute; change the schedule",
        )
        for words in (
            {"predict": "nesterov"},
            {"schedule": "2bw", "predict": "nesterov"},
            {"schedule": "2bw", "weights": "recompute"},
            {"weights": "vertical"},
            {"schedule": "2bw", "weights": "latest"},
        )
    ),
    *(Case(f"pipeline-{weights}-predicted", _with(training_pipeline={"microbatches": 4, "schedule": "pipedream", "weights": weights,
          "predict": "nesterov"}), "spec.training.pipeline",
          "must have weights: stash or recompute for predict: nesterov; change the weights")
        for weights in ("vertical", "latest")),
    *(Case(f"pipeline-anneal-{count}", _with(training_pipeline={"microbatches": 4, "schedule": "pipedream", "annealSteps": count}),
          "spec.training.pipeline.annealSteps", "must be 1..1000000000; ")
        for count in (0, 1_000_000_001)),
    *(Case(f"pipeline-anneal-{schedule}", _with(training_pipeline={"microbatches": 4, "schedule": schedule, "annealSteps": 5}),
          "spec.training.pipeline", "must have schedule: pipedream for annealSteps; ")
        for schedule in ("flush", "2bw")),
    *(Case(f"pipeline-correct-{'-'.join(words.values())}", _with(training_pipeline={"microbatches": 4, "correct": "dc-asgd", **words}),
          "spec.training.pipeline", "must have schedule: 2bw or pipedream and weights: stash or vertical for correct; ")
        for words in (
            {},
            {"schedule": "flush", "weights": "recompute"},
            {"schedule": "pipedream", "weights": "recompute", "predict": "nesterov"},
            {"schedule": "pipedream", "weights": "latest"},
        )),
    *(Case(f"pipeline-options-{word}", _with(training_pipeline={"microbatches": 4, "schedule": "2bw", "correctOptions": {"lam": 1.0},
          **word}), "spec.training.pipeline", "must not have correctOptions without correct; ")
        for word in ({}, {"correct": "none"})),
    *(Case(f"pipeline-options-{word}-{name}", _with(training_pipeline={"microbatches": 4, "schedule": "2bw", "correct": word,
          "correctOptions": {name: 1.0}}), "spec.training.pipeline",
          "must have correctOptions of its correct: lam, decay, adaptive of dc-asgd; average, max_lr of gap-aware; all other numbers")
        for word, name in (("dc-asgd", "average"), ("gap-aware", "lam"), ("dc-asgd", "lr"))),
    Case("pipeline-correct-unknown", _with(training_pipeline={"microbatches": 4, "schedule": "2bw", "correct": "dana-dc"}),
        "spec.training.pipeline.correct", 'Unsupported value: "dana-dc": supported values: "none", "dc-asgd", "gap-aware"',
        server_sentence='Unsupported value: "dana-dc"'),
    *(Case(f"pipeline-momentum-{number}", _with(training_pipeline={"microbatches": 4, "schedule": "pipedream", "highestMomentum": number}),
          "spec.training.pipeline.highestMomentum", "must be 0..0.9999; ")
        for number in (-0.1, 1)),
    *(Case(f"pipeline-momentum-{schedule}", _with(training_pipeline={"microbatches": 4, "schedule": schedule, "highestMomentum": 0.99}),
          "spec.training.pipeline", "must have schedule: pipedream for highestMomentum; ")
        for schedule in ("flush", "2bw")),
    Case("2bw-of-few", _with(training_pipeline={"microbatches": 2, "schedule": "2bw"}), "spec.training.pipeline.microbatches",
        "must be the number of stages or more with schedule: 2bw; the first stage"),
    Case("uneven-without-flush", _with(training_pipeline={"microbatches": 3, "schedule": "pipedream"}),
        "spec.training.pipeline.microbatches",
        "must be a multiple of the replicas of each stage where the schedule is not flush; the workers"),
    Case("microbatches-missing", _with(training_pipeline={}), "spec.training.pipeline.microbatches", "Required value",
        server_sentence="Required value"),
    Case("a-block-for-each-staged-worker", _with(training_gradientMebibytes=15), "spec.training.gradientMebibytes",
        "must be at least 4 times spec.workers.replicas, a block for each; "),
    Case("stage-nameless", _with(stages=[{}, {"name": "a"}]), "spec.stages[0].name", "Required value", server_sentence="Required value"),
    Case("stage-unknown", _with(stages=stages(2, 1, s1={"gpus": 1})), "spec.stages[1].gpus",
        'unknown field "spec.stages[1].gpus"; fields here: name, cut, replicas, template',
        server_sentence='unknown field "spec.stages[1].gpus"'),
    Case("stage-text", _with(stages=stages(2, 1, s1={"replicas": "2"})), "spec.stages[1].replicas",
        "must be of type integer; write it without quotes", server_sentence="must be of type integer"),
    # -- templates of stages
    Case("stage-containers-missing", _with(stages=stages(2, 1, s1={"template": {"spec": {}}})), "spec.stages[1].template.spec.containers",
        "Required value", server_sentence="Required value"),
    Case("stage-command-text", _with(stages=_container(command="python stage.py")), "spec.stages[1].template.spec.containers[0].command",
        "must be of type array; write it as a list", server_sentence="must be of type array"),
    Case("stage-without-command", _with(stages=_container(command=[])), "spec.stages[1].template.spec.containers",
        "the container worker, or the only one, must have a command; "),
    Case("stage-hostname", _with(stages=_template(hostname="a")), "spec.stages[1].template.spec.hostname", "must be left out; psjob names"),
    Case("stage-label", _with(stages=stages(2, 1, s1={"template": {**_POD, "metadata": {"labels": {"psjob.dev/stage": "x"}}}})),
        "spec.stages[1].template.metadata.labels", "must not have keys that begin with psjob.dev/; "),
    *(Case(f"stage-{name}", _with(stages=given), f"spec.stages[1].template{at}", sentence, server=name not in ("key", "shell"))
        for name, given, at, sentence in (
            ("variable", _container(env=[{"name": "PSJOB_X", "value": "1"}]), ".spec.containers[0].env[0].name",
                "must not begin with PSJOB_"),
            ("mount", _container(volumeMounts=[{"name": "a", "mountPath": "/psjob/x"}]), ".spec.containers[0].volumeMounts[0].mountPath",
                "must not be in /psjob"),
            ("volume", _template(volumes=[{"name": "psjob-keys"}]), ".spec.volumes[0].name", "must not begin with psjob-; "),
            ("key", _template(volumes=[{"name": "k", "secret": {"secretName": "digits-key-0a1b2c3d-1"}}]), "",
                "must not name the Secret of"),
            ("shell", _container(command=["cd", "/", "&&", "ls"]), ".spec.containers[0].command", "must not hold a word of the shell"),
        )),
    Case("stages-in-two-networks", _with(stages=stages(2, 1, s1={"template": _HOST})), "spec.stages",
        "must all have hostNetwork: true in their template, or none of them; "),
]  # fmt: skip

STAGES_PASSED: list[Case] = [
    Case("stages", _with()),
    Case("stages-counted", _with(workers_replicas=4)),
    Case("stages-of-the-script", _with(stages=stages(2, 1, 1, cuts=False), training_pipeline={"microbatches": 8})),
    Case("stages-by-default", _with(stages=[{"name": "a"}, {"name": "b", "cut": "3"}], training_gradientMebibytes=8)),
    *(Case(f"pipeline-{'-'.join(words.values())}", _with(training_pipeline={"microbatches": 4, **words}))
        for words in (
            {"schedule": "flush", "weights": "recompute"},
            {"schedule": "2bw"},
            {"schedule": "pipedream", "weights": "recompute", "predict": "nesterov"},
            {"schedule": "pipedream", "weights": "vertical"},
            {"schedule": "pipedream", "weights": "latest"},
        )),
    Case("pipeline-anneal-most", _with(training_pipeline={"microbatches": 4, "schedule": "pipedream", "annealSteps": 1_000_000_000})),
    *(Case(f"pipeline-corrected-{number}", _with(training_pipeline={"microbatches": 4, **words}))
        for number, words in enumerate(({"correct": "none"},
            {"correct": "none", "schedule": "pipedream", "weights": "latest", "correctOptions": {}},
            {"correct": "dc-asgd", "schedule": "2bw", "correctOptions": {"lam": 1, "decay": 0.9, "adaptive": 0}},
            {"correct": "gap-aware", "schedule": "pipedream", "weights": "vertical", "correctOptions": {"average": 0.9, "max_lr": 0.1}},
            {"correct": "gap-aware", "schedule": "pipedream", "predict": "nesterov"}, {"schedule": "pipedream", "highestMomentum": 0},
            {"schedule": "pipedream", "highestMomentum": 0.9999}))),
    Case("stages-most", _with(stages=stages(*[4] * 64), training_pipeline={"microbatches": 1024})),
    Case("stages-wide", _with(stages=stages(255, 1), training_pipeline={"microbatches": 1})),
    Case("stages-longest", _with(stages=stages(1, 1, s1={"name": "a" * 63, "cut": "ü" * 256}))),
    Case("stages-template", _with(stages=_template(nodeSelector={"gpu": "a100"}))),
    Case("stages-on-nodes", _with(stages=stages(1, 1, s0={"template": _HOST}, s1={"template": _HOST}))),
    Case("stages-null", {"spec.stages": None, "spec.training.pipeline": None}),
]  # fmt: skip
