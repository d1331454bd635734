"""What `psjob convert` knows of torchrun's options is what torchrun's own parser takes."""

from __future__ import annotations

from typing import Any

from psjob_client.convert import launcher
from psjob_client.convert.draft import Converted, Wishes
from psjob_client.convert.write import from_words


def worker(job: Converted) -> dict[str, Any]:
    containers: list[dict[str, Any]] = job.manifest["spec"]["workers"]["template"]["spec"]["containers"]
    return next(item for item in containers if item["name"] == "worker")


def test_torchruns_own_parser_has_no_option_that_is_not_known() -> None:
    from torch.distributed.run import get_args_parser

    for action in get_args_parser()._actions:
        for option in action.option_strings:
            if option in ("-h", "--help", "--print-completion", "--print_completion"):
                continue
            value = [] if action.nargs == 0 else ["1"]
            assert worker(from_words_of([option, *value]))["command"][-1] == "train.py"


def from_words_of(options: list[str]) -> Converted:
    return from_words(["torchrun", *options, "train.py"], Wishes())


def test_what_is_known_of_accelerate_is_what_its_own_parser_takes() -> None:
    from accelerate.commands.launch import launch_command_parser

    kinds = {option.lstrip("-"): action.nargs == 0 for action in launch_command_parser()._actions for option in action.option_strings}
    assert {name: kinds.get(name) for name in launcher.TAKEN_FLAGS} == dict.fromkeys(launcher.TAKEN_FLAGS, True)
    valued = (*launcher.TAKEN_VALUES, *launcher.DROPPED_VALUES)
    assert {name: kinds.get(name) for name in valued} == dict.fromkeys(valued, False)
    assert kinds["m"]
