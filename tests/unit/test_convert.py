"""What becomes of other operators' jobs, what is told about the rest, and that it always passes validation."""

from __future__ import annotations

import contextlib
import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob_client.cli.main import cli
from psjob_client.convert.draft import Converted, Wishes
from psjob_client.convert.sources import from_text, from_words, yaml_of
from psjob_client.problems import BadInput
from psjob_operator.api.load import load_document, load_job
from tests.support.typed import CliRunner
from tests.unit.convert_sources import MX_GPU, PYTORCH_ELASTIC, PYTORCH_NCCL, PYTORCH_SHELL, SOURCES, TF_MNIST, TRAIN_V2


def one(text: str, **wishes: Any) -> Converted:
    (job,), _ = from_text(text, Wishes(**wishes))
    return job


def told(job: Converted, field: str) -> str:
    """All that is told of a field."""
    return " | ".join(str(note) for note in job.notes if note.field.startswith(field))


def worker(job: Converted) -> dict[str, Any]:
    containers: list[dict[str, Any]] = job.manifest["spec"]["workers"]["template"]["spec"]["containers"]
    return next(item for item in containers if item["name"] == "worker")


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_written_passes_validation_and_holds_its_notes(name: str) -> None:
    job = one(SOURCES[name])
    text = yaml_of([job])
    read, problems = load_job(text)
    assert problems == [] and read is not None
    assert yaml.safe_load(text) == job.manifest
    comments = " ".join(line.lstrip("# -") for line in text.splitlines() if line.startswith("#"))
    assert all(note.field in comments and note.remedy.split()[0] in comments for note in job.notes)


def test_masters_and_workers_are_workers() -> None:
    job = one(PYTORCH_NCCL)
    spec = job.manifest["spec"]
    assert (spec["workers"]["replicas"], spec["shards"]) == (4, {"replicas": 1})
    assert job.manifest["metadata"] == {"name": "dist-mnist-nccl", "namespace": "team-a", "labels": {"app": "mnist"}}
    assert worker(job)["args"] == ["--backend", "nccl"] and worker(job)["command"] == ["python", "train.py"]
    assert worker(job)["resources"] == {"limits": {"nvidia.com/gpu": 1}} and "ports" not in worker(job)
    assert spec["workers"]["template"]["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
    assert "--command" in told(job, "spec.pytorchReplicaSpecs.Worker.template.spec.containers[0].command")
    assert "ps.attach" in told(job, "script") and "init_process_group" in told(job, "script")
    assert worker(one(PYTORCH_NCCL, command=("python", "/app/mnist.py")))["command"] == ["python", "/app/mnist.py"]


def test_processes_of_a_pod_become_workers_with_their_share() -> None:
    job = one(PYTORCH_ELASTIC)
    spec = job.manifest["spec"]
    assert spec["workers"]["replicas"] == 8
    assert worker(job)["command"] == ["python", "./imagenet.py", "--arch=resnet18"]
    assert worker(job)["resources"] == {"requests": {"cpu": "1500m", "memory": "2560Mi"}, "limits": {"nvidia.com/gpu": 1}}
    assert worker(job)["env"] == [{"name": "LOGLEVEL", "value": "DEBUG"}, {"name": "EPOCHS", "value": "3"}]
    assert spec["runPolicy"] == {"cleanPodPolicy": "None", "ttlSecondsAfterFinished": 600, "backoffLimit": 100}
    assert spec["suspend"] is True
    pod = spec["workers"]["template"]["spec"]
    assert pod["priorityClassName"] == "high" and pod["nodeSelector"] == {"pool": "gpu"} and "restartPolicy" not in pod
    assert [item["name"] for item in pod["containers"]] == ["worker", "sidecar"]
    for field in ("spec.elasticPolicy.minReplicas", "spec.elasticPolicy.rdzvBackend", "spec.runPolicy.schedulingPolicy.queue"):
        assert told(job, field), field
    assert "MASTER_ADDR" in told(job, "spec.pytorchReplicaSpecs.Worker.template.spec.containers[0].env")
    assert "ExitCode" in told(job, "spec.pytorchReplicaSpecs.Worker.restartPolicy")


def test_names_and_places_of_psjob_are_freed() -> None:
    job = one(PYTORCH_SHELL)
    assert job.manifest["metadata"]["name"] == "fine-tune" and "Fine_Tune." in told(job, "metadata.name")
    assert worker(job)["command"] == ["python", "tune.py", "--lr", "0.1"]
    assert worker(job)["volumeMounts"] == [{"name": "data", "mountPath": "/data"}]
    assert worker(job)["resources"]["limits"] == {"nvidia.com/gpu": 1, "memory": "1536Mi", "cpu": "1500m"}
    pod = job.manifest["spec"]["workers"]["template"]["spec"]
    assert pod["volumes"][0]["name"] == "data" and pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert job.manifest["spec"]["workers"]["replicas"] == 2
    assert "--tee" in told(job, "spec.pytorchReplicaSpecs.Master.template.spec.containers[].command")


def test_parameter_servers_become_shards() -> None:
    job = one(TF_MNIST)
    spec = job.manifest["spec"]
    assert (spec["shards"]["replicas"], spec["workers"]["replicas"]) == (2, 5)
    assert spec["shards"]["template"]["spec"] == {
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "containers": [{"name": "shard", "resources": {"requests": {"cpu": 2}}}],
    }
    assert spec["runPolicy"] == {"cleanPodPolicy": "All", "backoffLimit": 3, "successPolicy": "FirstWorker"}
    assert "TensorFlow" in told(job, "script") and "DistributedDataParallel" not in told(job, "script")
    for field in ("Evaluator", "Chief", "PS.restartPolicy", "PS.template.spec.containers"):
        assert told(job, f"spec.tfReplicaSpecs.{field}"), field
    assert one(TF_MNIST, shards=7).manifest["spec"]["shards"]["replicas"] == 7


def test_an_mxjob_keeps_servers_and_drops_the_scheduler() -> None:
    job = one(MX_GPU)
    spec = job.manifest["spec"]
    assert (spec["shards"], spec["workers"]["replicas"]) == ({"replicas": 2}, 3)
    assert worker(job)["command"] == ["python"] and worker(job)["args"][0] == "/example/train_mnist.py"
    assert "MXNet" in told(job, "script") and told(job, "spec.mxReplicaSpecs.Scheduler")


def test_a_trainjob_says_what_stands_in_its_runtime() -> None:
    job = one(TRAIN_V2)
    assert job.manifest["spec"]["workers"]["replicas"] == 4
    assert worker(job)["command"] == ["python", "/workspace/mnist.py", "--epochs=1"]
    assert worker(job)["resources"] == {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"nvidia.com/gpu": 1}}
    assert "hf://imdb" in told(job, "spec.initializer.dataset") and told(job, "spec.runtimePatches") and told(job, "spec.runtimeRef")
    with pytest.raises(BadInput, match="--image"):
        one(TRAIN_V2.replace("image: registry.example.com/mnist:2", "{}"[0:0]))


@pytest.mark.parametrize(
    ("line", "replicas", "command"),
    [
        ("torchrun train.py", 1, ["python", "train.py"]),
        ("torchrun --nproc_per_node=4 --nnodes=2 train.py --nnodes 9", 8, ["python", "train.py", "--nnodes", "9"]),
        ("/opt/bin/torchrun --standalone --nproc-per-node 3 -m pkg.train -x", 3, ["python", "-m", "pkg.train", "-x"]),
        ("A=1 B='x y' python3 -u -m torch.distributed.launch --nproc_per_node=2 a/b.py", 2, ["python3", "a/b.py"]),
        ("torchrun --no-python --nproc-per-node=2 ./go", 2, ["./go"]),
        ("torchrun --nnodes=1:3 --max-restarts=3 --rdzv-endpoint=h:1 t.py", 3, ["python", "t.py"]),
    ],
)
def test_a_torchrun_line(line: str, replicas: int, command: list[str]) -> None:
    job = one(line + "\n")
    assert job.manifest["spec"]["workers"]["replicas"] == replicas
    assert worker(job)["command"] == command
    assert load_job(yaml_of([job]))[1] == []
    assert worker(job).get("env", []) == ([{"name": "A", "value": "1"}, {"name": "B", "value": "x y"}] if line.startswith("A=") else [])
    assert ("runPolicy" in job.manifest["spec"]) == ("--max-restarts" in line)


@pytest.mark.parametrize(
    ("line", "replicas", "command", "env"),
    [
        ("accelerate launch --num_processes 4 train.py --lr 1", 4, ["python", "train.py", "--lr", "1"], []),
        ("accelerate-launch --num-processes=2 --multi_gpu -m mine.train", 2, ["python", "-m", "mine.train"], []),
        (
            "accelerate launch --mixed_precision bf16 --num_machines 2 --num_processes 8 --machine_rank 0 train.py", 8,
            ["python", "train.py"], [{"name": "ACCELERATE_MIXED_PRECISION", "value": "bf16"}],
        ),
        ("A=1 python -m accelerate.commands.launch train.py", 1, ["python", "train.py"], [{"name": "A", "value": "1"}]),
    ],
)  # fmt: skip
def test_an_accelerate_line(line: str, replicas: int, command: list[str], env: list[dict[str, str]]) -> None:
    for job in (
        (one(line, image="me/x:1"), from_words(line.split(), Wishes(image="me/x:1")))
        if "accelerate launch" in line
        else (from_words(line.split(), Wishes(image="me/x:1")),)
    ):
        assert job.manifest["spec"]["workers"]["replicas"] == replicas
        assert worker(job)["command"] == command and worker(job).get("env", []) == env
        assert ("is not given" in told(job, "--num_processes")) == ("num" not in line)
        assert ("leave it out" in told(job, "--machine_rank")) == ("--machine_rank" in line)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("accelerate launch --use_fsdp train.py", ["--use_fsdp is an option that psjob cannot carry over", "docs/accelerate.md"]),
        ("accelerate launch --num_processes 2", ["names no script"]),
        ("accelerate launch --num_processes", ["--num_processes has no value"]),
        ("accelerate launch --num_processes many train.py", ["accelerate launch: --num_processes many", "at least 1"]),
        ("accelerate config", ["begins with accelerate", "accelerate launch"]),
    ],
)
def test_an_accelerate_line_that_cannot_be_converted_is_said(line: str, words: list[str]) -> None:
    with pytest.raises(BadInput) as refused:
        from_words(line.split(), Wishes())
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    "line", ["torchrun --nproc-per-node=2 train.py", "accelerate launch --num_processes 2 'my train.py'", "A=1 torchrun t.py"]
)
def test_a_launchers_command_may_be_one_word(line: str) -> None:
    apart = CliRunner().invoke(cli, ["convert", "--image", "me/x:1", "--", *shlex.split(line)])
    quoted = CliRunner().invoke(cli, ["convert", "--image", "me/x:1", line])
    assert quoted.exit_code == 0 and quoted.stdout == apart.stdout and "kind: PSTrainingJob" in quoted.stdout


@pytest.mark.parametrize("word", ["my file.yaml", "'torchrun", "python train.py"])
def test_another_word_with_a_blank_is_a_file(word: str) -> None:
    done = CliRunner().invoke(cli, ["convert", word])
    assert isinstance(done.exception, BadInput) and f"{word}: cannot be read" in str(done.exception)


def test_a_backend_in_the_arguments_is_told() -> None:
    assert "--backend nccl" in told(one(PYTORCH_NCCL), "spec.pytorchReplicaSpecs.Worker.template.spec.containers[].args")
    for line in ("torchrun t.py --backend=gloo", "torchrun t.py --dist-backend nccl"):
        assert "psjob starts no process group" in told(from_words(line.split(), Wishes()), "command")
    assert "process group; take it out" not in told(from_words(["torchrun", "t.py", "--backend", "tensorboard"], Wishes()), "command")


def test_what_only_the_master_says_is_named() -> None:
    text = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: mnist}
spec:
  pytorchReplicaSpecs:
    Master:
      template:
        spec:
          containers:
          - name: pytorch
            image: me/mnist:1
            command: [python, train.py, --log]
            env: [{name: WANDB_MODE, value: online}, {name: SAME, value: x}, {name: KEY, valueFrom: {secretKeyRef: {name: k, key: k}}}]
    Worker:
      template:
        spec:
          containers:
          - {name: pytorch, image: me/mnist:1, command: [python, train.py], env: [{name: SAME, value: x}, {name: MASTER_ADDR, value: y}]}
"""
    said = told(one(text), "spec.pytorchReplicaSpecs.Master.template.spec.containers[]")
    assert "env: WANDB_MODE=online: is dropped" in said and "env: KEY: is dropped" in said and "command" in said
    assert "SAME" not in said and "MASTER_ADDR" not in said and "image" not in said
    assert worker(one(text))["env"] == [{"name": "SAME", "value": "x"}]


def test_a_script_of_the_shell_with_one_torchrun_command() -> None:
    job = one("#!/bin/bash\nset -e\n# torchrun old.py\nexec torchrun \\\n  --nproc-per-node 2 \\\n  new.py\n")
    assert worker(job)["command"] == ["python", "new.py"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torchrun --nproc_per_node=$N train.py", ["$N", "write its value"]),
        ("torchrun a.py && echo done", ["'&&'", "give only the torchrun command"]),
        ("torchrun a.py\ntorchrun b.py", ["2 torchrun commands"]),
        ("torchrun --nproc-per-node=4", ["names no script"]),
        ("torchrun --nproc-per-node=x t.py", ["--nproc-per-node x", "number"]),
        ("torchrun --nnodes=0 t.py", ["--nnodes 0"]),
        ("torchrun --no-such t.py", ["--no-such"]),
        ("torchrun 'a.py", ["close its quotes"]),
        ("", ["holds no job"]),
        ("a: [", ["not YAML"]),
        ("kind: ConfigMap\napiVersion: v1\nmetadata: {name: x}", ["ConfigMap x", "TFJob"]),
        ("kind: MPIJob\napiVersion: kubeflow.org/v1", ["MPIJob", "psjob init"]),
        ("kind: PSTrainingJob\napiVersion: psjob.dev/v1alpha1", ["already"]),
        (MX_GPU.replace("MXTrain", "MXTune"), ["spec.jobMode", "MXTune"]),
        ("kind: TFJob\napiVersion: kubeflow.org/v1\nspec: 3", ["spec: ", "must be an object"]),
        ("kind: TFJob\napiVersion: kubeflow.org/v1\nspec: {tfReplicaSpecs: {PS: {}}}", ["Worker", "nothing trains"]),
        ("kind: PyTorchJob\napiVersion: kubeflow.org/v1\nspec: {pytorchReplicaSpecs: {Worker: {}}}", ["containers"]),
        (PYTORCH_NCCL.replace("replicas: 3", "replicas: many"), ["Worker.replicas", "whole number"]),
        (PYTORCH_NCCL.replace("replicas: 3", "replicas: 9000"), ["spec.workers.replicas", "1..4000"]),
        (PYTORCH_ELASTIC.replace('"4"', "some"), ["nprocPerNode", "auto"]),
    ],
)
def test_what_cannot_be_converted_is_said(text: str, words: list[str]) -> None:
    with pytest.raises(BadInput) as refused:
        from_text(text, Wishes())
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_other_objects_are_left_aside_and_several_jobs_are_taken() -> None:
    text = f"{MX_GPU}\n---\nkind: ConfigMap\napiVersion: v1\nmetadata: {{name: data}}\n---\n{TF_MNIST}"
    jobs, aside = from_text(text, Wishes())
    assert [job.source.split()[0] for job in jobs] == ["MXJob", "TFJob"]
    assert "ConfigMap data" in aside[0]
    assert len([part for part in yaml.safe_load_all(yaml_of(jobs)) if part]) == 2


def test_what_the_user_asks_for_is_judged_too() -> None:
    for wishes in ({"shards": 0}, {"name": "Not A Name"}, {"command": ("python train.py",)}):
        with pytest.raises(BadInput, match="is refused"):
            one(PYTORCH_NCCL, **wishes)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 5000), st.text(max_size=5), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2), st.sampled_from(["psjob-x", "torchrun", "/psjob", "auto", "1.5Gi"]),
)  # fmt: skip


@settings(max_examples=25)
@given(st.sampled_from(sorted(SOURCES)), st.data())
def test_whatever_stands_in_a_field_it_is_converted_or_refused_in_a_sentence(name: str, data: st.DataObject) -> None:
    raw, _ = load_document(SOURCES[name], "job")
    raw = yaml.safe_load(yaml.dump(raw["spec"]))
    part = raw
    while True:
        step = data.draw(st.sampled_from(sorted(part) if isinstance(part, dict) else range(len(part))))
        if not isinstance(part[step], dict | list) or not part[step] or data.draw(st.integers(0, 5)) == 0:
            part[step] = data.draw(JUNK)
            break
        part = part[step]
    source = yaml.safe_load(SOURCES[name])
    source["spec"] = raw
    with contextlib.suppress(BadInput):
        (job,), _ = from_text(yaml.safe_dump(source), Wishes())
        assert load_job(yaml_of([job]))[1] == []
