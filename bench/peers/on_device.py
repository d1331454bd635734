"""The device on which a program of this folder has its model: `--device cuda` is the first GPU, cpu proves the same lines without one."""

from __future__ import annotations

import argparse

import torch

NO_GPU = "this machine has no GPU that torch can use, so the row cannot be made here (torch.cuda.is_available() is false)"


def device_of(words: argparse.Namespace) -> torch.device:
    """The device that is asked for. Raises RuntimeError if this machine lacks it."""
    if words.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(NO_GPU)
    return torch.device(words.device)


def wait_for(device: torch.device) -> None:
    """Until all that was begun on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
