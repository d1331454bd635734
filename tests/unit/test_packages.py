"""Which torch `make install` takes, and what it tells uv of pip's settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hack import packages
from hack.packages import UNUSED, choose, for_uv, gpu

PINS = {"torch": "9.1.0", "torchmetrics": "1.0", "numpy": "2.0", "triton": "5.0", "nvidia-cublas": "1.0", "cuda-bindings": "1.0"}
CPU = "9.1.0+cpu"
WITH_CUDA = ("torch", "triton", "nvidia-cublas", "cuda-bindings")


def never(requirement: str) -> bool:
    raise AssertionError(f"the index is asked for {requirement}, which decides nothing")


@pytest.mark.parametrize(
    ("platform", "has_gpu", "there", "offers", "left_out", "beside", "again", "told"),
    [
        (
            "linux",
            False,
            None,
            lambda word: word == f"torch=={CPU}",
            ("torch", "triton", "nvidia-cublas", "cuda-bindings"),
            CPU,
            False,
            "2 GB",
        ),
        ("linux", False, "9.0.0+cpu", lambda _: True, WITH_CUDA, CPU, False, "not pinned"),
        ("linux", False, CPU, never, WITH_CUDA, CPU, False, "2 GB"),
        ("linux", False, None, lambda _: False, UNUSED, None, False, "UV_EXTRA_INDEX_URL="),
        ("linux", False, "9.1.0", never, UNUSED, None, False, "into .venv"),
        ("linux", True, None, never, (), None, False, "all of CUDA"),
        ("linux", True, CPU, never, (), None, True, "all of CUDA"),
        ("darwin", False, None, never, (), None, False, "2 GB"),
    ],
)
def test_the_torch_of_a_machine(
    platform: str,
    has_gpu: bool,
    there: str | None,
    offers: Callable[[str], bool],
    left_out: tuple[str, ...],
    beside: str | None,
    again: bool,
    told: str,
) -> None:
    choice = choose(PINS, platform, has_gpu, there, offers)
    assert choice.left_out == left_out
    assert choice.beside == (beside and f"torch=={beside}")
    assert choice.again is again and told in choice.told


@pytest.mark.parametrize(
    ("said", "seen", "wanted"), [("", True, True), ("", False, False), ("1", False, True), ("0", True, False), ("yes", True, True)]
)
def test_a_gpu_that_is_seen_or_asked_for(said: str, seen: bool, wanted: bool) -> None:
    assert gpu({"PSJOB_GPU": said}, seen) is wanted


def test_uv_gets_the_settings_of_pip(tmp_path: Path) -> None:
    settings = {"index-url": "https://a/simple", "extra-index-url": "https://b https://c", "cert": "/ca", "retries": "3"}
    assert for_uv({}, settings) == {
        "UV_DEFAULT_INDEX": "https://a/simple",
        "UV_EXTRA_INDEX_URL": "https://b https://c",
        "SSL_CERT_FILE": "/ca",
    }
    assert for_uv({}, {"find-links": f"{tmp_path} {tmp_path}/gone https://d/x"}) == {"UV_FIND_LINKS": f"{tmp_path},https://d/x"}
    assert for_uv({}, {"find-links": f"{tmp_path}/gone"}) == {}


def test_what_a_person_tells_uv_comes_before_the_settings_of_pip() -> None:
    settings = {"index-url": "https://a/simple", "extra-index-url": "https://b", "cert": "/ca"}
    assert for_uv({"UV_INDEX_URL": "x", "UV_INDEX": "y", "SSL_CERT_FILE": "z"}, settings) == {}


def test_what_is_left_out_is_pinned() -> None:
    pins = packages.pinned()
    assert set(UNUSED) < set(pins) and {"torch", "cuda-toolkit", "nvidia-nccl-cu13"} < set(pins)
    cpu = choose(pins, "linux", False, None, lambda _: True).left_out
    assert set(UNUSED) < set(cpu) and not {"torchmetrics", "numpy", "tritonclient"} & set(cpu)
