"""psjob itself: shards and workers as processes of this machine, one step of an attached optimizer a cycle.

`--device cuda`: the model lies on the first GPU. `--what unkept`: what a shard holds does not outlive its process.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import clock
import job
import torch
from on_device import device_of, wait_for

import psjob

UNKEPT = "unkept"


def main() -> None:
    if UNKEPT in sys.argv:
        os.environ["PS_FORK_SERVER"] = "never"
    device_of(clock.asked(__doc__))
    job.measure(__doc__, work)


def work(words: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    each = words.megabytes * 250_000 // words.tensors
    device = device_of(words)
    model = torch.nn.ParameterList([torch.zeros(each, device=device) for _ in range(words.tensors)])
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    attached, optimizer = psjob.attach(model, kinds[words.optimizer](model.parameters(), lr=clock.RATE))
    for parameter in attached.parameters():
        parameter.grad = torch.ones_like(parameter)

    def step() -> None:
        optimizer.step()
        wait_for(device)

    found = clock.cycles(step, words.seconds) if words.workers == 1 else clock.rounds(step)
    job.check_road()
    if words.optimizer == "sgd":
        wanted = words.factor * clock.moved(found)
        clock.check((float(parameter[at].detach()) for parameter in attached.parameters() for at in (0, -1)), wanted)
    clock.answer(found)


if __name__ == "__main__":
    main()
