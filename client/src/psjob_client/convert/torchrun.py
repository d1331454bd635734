"""The command line of torchrun or `accelerate launch` as a PSTrainingJob."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from psjob_client.convert import launcher, pods
from psjob_client.convert.draft import Converted, Draft, Wishes, note_backend, note_framework
from psjob_client.problems import BadInput


def convert(words: Sequence[str], wishes: Wishes) -> Converted:
    """The command `words` as a PSTrainingJob: one worker for each of its processes.

    Raises:
        BadInput: it is no command of a launcher, or names no script.
    """
    launch = launcher.taken_apart(words)
    draft = Draft(shlex.join(words), wishes)
    draft.call(_word(launch.script))
    draft.notes.clear()  # the name is ours to choose: nothing of the source is lost
    nodes, each = _nodes(draft, launch.nodes), _each(draft, launch)
    draft.replicas = nodes * each
    image = wishes.image or f"registry.example.com/{draft.name}:1"
    if wishes.image is None:
        draft.note("image", None, f"{image} stands for yours, which holds torch and the script; give --image")
    env = [{"name": name, "value": value} for name, value in launch.env]
    container = {"name": "worker", "image": image, "command": list(launch.command), **({"env": env} if env else {})}
    draft.template = pods.worker_template(draft, {"spec": {"containers": [container]}}, "command", "worker")
    if launch.restarts is not None:
        draft.policy["backoffLimit"] = min(launch.restarts, 1000)
    for option, value, remedy in launch.dropped:
        draft.note(option, value or None, remedy)
    note_backend(draft, "command", launch.command)
    draft.note_shards()
    draft.note("resources", None, "the manifest asks for none: add requests and limits, such as nvidia.com/gpu: 1, before you submit it")
    note_framework(draft, "PyTorch")
    return draft.finish()


def _word(script: str) -> str:
    """A word for the job: the last part of the script's or the module's name."""
    last = script.rpartition("/")[2]
    return last.removesuffix(".py").rpartition(".")[2] or "job"


def _nodes(draft: Draft, written: str | None) -> int:
    if written is None:
        return 1
    low, _, high = written.partition(":")
    if not all(part.isascii() and part.isdigit() and int(part) >= 1 for part in (low, high or low)):
        raise BadInput(f"torchrun: --nnodes {written}: must be a number of at least 1, or two as 1:4")
    if high and high != low:
        draft.note(
            "--nnodes", written, f"the number of workers is fixed, and {high} nodes are taken; a lost worker is replaced and continues"
        )
    return int(high or low)


def _each(draft: Draft, launch: launcher.Launch) -> int:
    written = launch.processes
    if written is None:
        return 1
    words = () if launch.by_accelerate else ("auto", "gpu", "cpu")
    if written in words:
        draft.note("--nproc-per-node", written, "depends on the machine; one worker a node is taken: set spec.workers.replicas")
        return 1
    if not (written.isascii() and written.isdigit() and int(written) >= 1):
        if launch.by_accelerate:
            raise BadInput(f"accelerate launch: --num_processes {written}: must be a number of at least 1")
        raise BadInput(f"torchrun: --nproc-per-node {written}: must be a number of at least 1, or auto, gpu or cpu")
    return int(written)
