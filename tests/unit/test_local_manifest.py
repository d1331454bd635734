"""What `psjob run` refuses before it starts anything: one line a problem, exit code 2, no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from psjob_client.cli import main
from psjob_client.local.faults import parse_faults, unfinished
from psjob_client.local.manifest import as_written, read_job, worker_commands
from psjob_client.problems import BadInput
from psjob_operator.api.spec import PSTrainingJob
from tests.support.typed import CliRunner

GOOD: dict[str, Any] = {
    "apiVersion": "psjob.dev/v1alpha1",
    "kind": "PSTrainingJob",
    "metadata": {"name": "tiny"},
    "spec": {"shards": {"replicas": 2}, "workers": {"replicas": 3,
        "template": {"spec": {"containers": [{"name": "worker", "image": "none", "command": ["python", "train.py"], "args": ["--x"]}]}}}},
}  # fmt: skip
COMMAND = "spec.workers.template.spec.containers[0]"


def write(folder: Path, text: str | None = None) -> Path:
    (folder / "train.py").write_text("")
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(GOOD) if text is None else text)
    return path


def said(path: Path, *settings: str) -> list[str]:
    with pytest.raises(BadInput) as refused:
        worker_commands(read_job(path, settings), path.parent)
    return list(refused.value.lines)


def test_a_setting_is_typed_as_yaml_and_makes_the_objects_on_its_way(tmp_path: Path) -> None:
    settings = (
        f"{COMMAND}.resources.limits.nvidia\\.com/gpu=1",
        "spec.training.mode=async",
        "spec.workers.replicas=7",
        f"{COMMAND}.command[1]=other.py",
        "spec.checkpoint.periodSeconds=300",
    )
    job = read_job(write(tmp_path), settings)
    assert (job.spec.training.mode, job.spec.workers.replicas, job.spec.checkpoint.period_seconds) == ("async", 7, 300)
    assert job.spec.workers.template["spec"]["containers"][0]["command"] == ["python", "other.py"]
    assert job.spec.workers.template["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 1}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("spec.workers.replicas=0",), ["spec.workers.replicas", "0", "1..4000"]),
        (("spec.workers.replicas='4'",), ["spec.workers.replicas", "integer", "without quotes"]),
        (("spec.shards.replicas=-1",), ["spec.shards.replicas", "-1", "1..256"]),
        (("spec.shards.replicas=99999999999999",), ["spec.shards.replicas", "1..256"]),
        (("spec.chekpoint.periodSeconds=30",), ["spec.chekpoint", "did you mean spec.checkpoint"]),
        (("spec.checkpoint.periodSeconds=30s",), ["spec.checkpoint.periodSeconds", "integer"]),
        (("spec.training.mode=bsp",), ["spec.training.mode", "sync", "async"]),
        (("metadata.name=Tiny_1",), ["metadata.name", "lower-case"]),
        (("kind=Job",), ["kind", "PSTrainingJob"]),
        (("spec",), ["--set spec", "path=value"]),
        (("training.mode=async",), ["--set training.mode=async", "perhaps --set spec.training.mode=async"]),
        (("a..b=3",), ["--set a..b=3", "path=value"]),
        (("a[b]=3",), ["--set a[b]=3", "path=value"]),
        (("=3",), ["--set =3", "path=value"]),
        (("spec.shards.replicas=[",), ["--set spec.shards.replicas=[", "YAML"]),
        (("spec.shards.replicas.deep=1",), ["--set spec.shards.replicas.deep=1", "no object"]),
        ((f"{COMMAND[:-3]}[5].image=x",), ["[5]", "has 1 items"]),
        ((f"{COMMAND}.env=[{{name: A, valueFrom: {{secretKeyRef: {{name: s, key: k}}}}}}]",), ["A has valueFrom", "give it a value"]),
        ((f"{COMMAND}.envFrom=[{{secretRef: {{name: s}}}}]",), ["envFrom", "write the values under env"]),
        ((f"{COMMAND}.env=[{{name: PSJOB_RUN, value: x}}]",), ["PSJOB_", "another name"]),
        ((f"{COMMAND}.env=[{{name: A, value: 3}}]",), ["env[0].value", 'in quotes: "3"']),
        ((f"{COMMAND}.command=python train.py",), ["containers[0].command", "[python, train.py]"]),
        ((f"{COMMAND}.command=[no-such-program-here]",), ["no-such-program-here", "no program on this machine"]),
        ((f"{COMMAND}.command=[python, gone.py]",), ["gone.py", "the manifest's folder"]),
        ((f"{COMMAND}.command=null",), ["command"]),
    ],
)
def test_a_bad_value_is_one_line_with_field_and_remedy(tmp_path: Path, settings: tuple[str, ...], words: list[str]) -> None:
    lines = said(write(tmp_path), *settings)
    assert all(any(word in line for line in lines) for word in words), lines
    assert all("\n" not in line for line in lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("a: [", "not YAML"),
        ("a: 1\n---\nb: 2\n", "2 documents"),
        ("- 1\n- 2\n", "must be an object"),
        ("kind: PSTrainingJob\nkind: PSTrainingJob\n", "already set"),
        ("a: !!python/object/apply:os.system ['true']\n", "not YAML"),
        ("3", "must be an object"),
        ("\x00", "not YAML"),
    ],
)
def test_a_file_that_is_no_manifest(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    for settings in ((), ("spec.shards.replicas=1",)):
        assert any(words in line for line in said(path, *settings))


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    assert "a folder" in said(tmp_path)[0]
    assert "cannot be read" in said(tmp_path / "gone.yaml")[0]


def test_python_is_our_own_and_unused_fields_are_named(tmp_path: Path) -> None:
    import sys

    path = write(tmp_path)
    job = read_job(
        path, (f"{COMMAND}.resources={{limits: {{nvidia.com/gpu: 1}}}}", "spec.workers.template.spec.volumes=[{name: x, emptyDir: {}}]")
    )
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"managed_by": "example.com/me"})})
    command = worker_commands(job, tmp_path)[0]
    assert command.argv == (sys.executable, "train.py", "--x")
    assert set(command.unused) >= {"image", "resources", "volumes of the pod", "managedBy"} and "injection" not in command.unused


@pytest.mark.parametrize(
    ("word", "expanded"), [("$(A)-$(B)", "1-1+2"), ("$$(A)", "$(A)"), ("$(GONE)", "$(GONE)"), ("$A", "$A"), ("$$", "$"), ("a$(A", "a$(A")]
)
def test_references_expand_as_on_a_cluster(tmp_path: Path, word: str, expanded: str) -> None:
    env = "[{name: A, value: '1'}, {name: B, value: '$(A)+2'}]"
    job: PSTrainingJob = read_job(write(tmp_path), (f"{COMMAND}.env={env}", f"{COMMAND}.args=['{word}']"))
    assert worker_commands(job, tmp_path)[0].argv[-1] == expanded


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kill:shard-2@step=1", "shard-0 to shard-1"),
        ("kill:worker-3@step=1", "worker-0 to worker-2"),
        ("stop:worker-0@step=1", "use kill"),
        ("kill:shard-0@step=0", "1 or more"),
        ("stop:shard-1@checkpoint=0", "1 or more"),
        ("kill:worker-0@checkpoint=2", "name a shard"),
        ("kill:shard-0@checkpoint=2+1s", "a step only"),
        ("kill:shard-0@step=2+1", "a step or a checkpoint"),
        ("kill:shard-0", "such as kill:shard-1@step=200"),
        ("kill:shard-0@view=2", "a step or a checkpoint"),
        ("burn:shard-0@step=5", "kill, crash, hang or stop"),
        ("", "kill, crash, hang or stop"),
        ("kill:shard-0@step=٣", "kill, crash, hang or stop"),
    ],
)
def test_a_fault_that_cannot_be_done(text: str, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_faults(["kill:shard-1@step=9", text], shards=2, workers=3)
    assert len(refused.value.lines) == 1 and words in refused.value.lines[0] and f"--fault {text}" in refused.value.lines[0]


def test_faults_come_in_the_order_of_their_numbers() -> None:
    faults = parse_faults(["kill:shard-1@step=9", "stop:shard-0@checkpoint=3", "kill:worker-2@step=9+0.25s"], shards=2, workers=3)
    assert [(fault.target, fault.when, fault.number, fault.later) for fault in faults] == [
        ("shard-0", "checkpoint", 3, 0),
        ("shard-1", "step", 9, 0),
        ("worker-2", "step", 9, 0.25),
    ]


def test_a_fault_in_a_checkpoint_is_due_from_the_checkpoint_before_on() -> None:
    (fault,) = parse_faults(["kill:shard-0@checkpoint=2"], shards=1, workers=1)
    assert [fault.due(500, checkpoints) for checkpoints in range(3)] == [False, True, True]


PART = "v000002-c000007-shard{:03d}-a{}.safetensors"
OTHERS = [
    PART.format(1, 3),
    PART.format(0, 2) + ".tmp",
    PART.format(1, 2) + ".tmp",
    PART.format(11, 3) + ".tmp",
    "CLAIM-000002",
    ".status.json.part",
]


@pytest.mark.parametrize(
    ("shard", "attempt", "more", "expected"),
    [
        (1, 3, [], None),
        (1, 3, [PART.format(1, 3) + ".tmp"], PART.format(1, 3) + ".tmp"),
        (1, 3, ["v000002-c000007-records.safetensors.tmp", "manifest-v000002-s000000000050.json.tmp"], None),
        (0, 3, ["v000002-c000007-shard000-a3-rows.safetensors.tmp"], "v000002-c000007-shard000-a3-rows.safetensors.tmp"),
        (0, 3, ["v000002-c000007-records.safetensors.tmp"], "v000002-c000007-records.safetensors.tmp"),
        (0, 3, ["manifest-v000002-s000000000050.json.tmp"], "manifest-v000002-s000000000050.json.tmp"),
        (0, 3, ["manifest-v000002-s000000000050.json"], None),
    ],
)
def test_what_a_shard_has_begun_to_write_and_not_finished(shard: int, attempt: int, more: list[str], expected: str | None) -> None:
    assert unfinished([*OTHERS, *more], shard, attempt) == expected


@pytest.mark.parametrize(
    "args",
    [
        ["run", "JOB", "--fault", "kill:shard-9@step=1"],
        ["run", "JOB", "--resume", "nowhere"],
        ["run", "JOB", "--summary", "no/such/folder/summary.json"],
        ["run", "JOB", "--set", "spec.suspend=true"],
        ["run", "gone.yaml"],
    ],
)
def test_the_command_line_ends_with_2_and_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    path = write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["psjob", *(str(path) if arg == "JOB" else arg for arg in args)])
    with pytest.raises(SystemExit) as ended:
        main.app()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.startswith("psjob: ") and "Traceback" not in told
    assert not (tmp_path / ".psjob").exists()


@pytest.mark.parametrize("command", [[], ["run"], ["render"], ["crd"], ["version"], ["suspend"], ["resume"]])
def test_help_has_an_example(command: list[str]) -> None:
    shown = CliRunner().invoke(main.cli, [*command, "--help"])
    assert shown.exit_code == 0 and "Example" in shown.output and "psjob" in shown.output


STAGES = """spec.stages=[{name: a, replicas: 2}, {name: b, cut: head, template: {spec: {hostAliases: [], containers: [
{name: main, command: [python, %s], env: [{name: A, value: "2"}]}]}}}]"""


def test_each_stage_has_its_own_command(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "stage.py").write_text("")
    job = read_job(path, (STAGES % "stage.py", "spec.workers.replicas=null"))
    commands = worker_commands(job, tmp_path)
    assert [command.argv[1] for command in commands] == ["train.py", "train.py", "stage.py"]
    assert [command.env.get("A") for command in commands][2] == "2" and commands[0] is commands[1]
    assert "hostAliases of the pod" in commands[0].unused and len(set(commands[0].unused)) == len(commands[0].unused)


def test_what_a_stage_lacks_is_named_in_its_own_template(tmp_path: Path) -> None:
    job = read_job(write(tmp_path), (STAGES % "gone.py", "spec.workers.replicas=null"))
    with pytest.raises(BadInput, match=r"spec\.stages\[1\]\.template\.spec\.containers\[\]\.command: there is no gone\.py"):
        worker_commands(job, tmp_path)


def test_the_manifest_as_written_leaves_the_number_of_workers_to_the_stages(tmp_path: Path) -> None:
    job = read_job(write(tmp_path), (STAGES % "train.py", "spec.workers.replicas=3"))
    assert job.spec.workers.replicas == 3 and "replicas" not in as_written(job)["spec"]["workers"]
    assert as_written(read_job(write(tmp_path)))["spec"]["workers"]["replicas"] == 3
