"""What a target of the Makefile says before it starts.

- Which torch `make install` takes, and what it tells uv of pip's settings.
- Images that others make are taken by version: the one that the SDK names, and what the Dockerfile installs.
- What `make lint` makes of checkov's findings: each is an error or has its exception, and each exception has its finding.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hack import needs, packages
from hack.cluster.paths import ASSETS, REPO
from hack.needs import Need, Target, told
from hack.packages import UNUSED, choose, for_uv, gpu
from hack.scan.__main__ import Excused, Finding, exceptions, judge
from psjob_client.sdk.manifest import IMAGE

HERE = Need("tea", lambda: True, "boil water")
GONE = Need("milk", lambda: False, "buy milk")
SAID_OTHERWISE = ("deps", "test-all")
"""The first says itself what it lacks; the second calls others, which do."""
OTHER = Need("sugar", lambda: False, "ask next door")


@pytest.mark.parametrize(("target", "lines", "works"), [
    (Target((HERE,)), ["make x needs tea: all there."], True),
    (Target(may=(HERE,)), ["make x does all of its work with tea: all there."], True),
    (Target((HERE, GONE)), ["make x needs tea, milk.", "missing: milk. Next step: buy milk."], False),
    (Target((HERE,), (GONE,)), ["make x needs tea. make x does all of its work with milk.",
        "not here: milk; what needs it is left out or skipped, by name. To have it, buy milk."], True),
    (Target((GONE,), (OTHER,)), None, False),
    (Target(), ["make x needs nothing that `make install` does not bring."], True),
])  # fmt: skip
def test_what_is_missing_comes_with_the_next_step(target: Target, lines: list[str] | None, works: bool) -> None:
    said, can = told("x", target)
    assert can is works
    assert said == lines if lines else len(said) == 3 and "buy milk" in said[1] and "ask next door" in said[2]


def test_targets_with_needs_say_them_before_they_start() -> None:
    rules = re.findall(r"^([a-z0-9-]+):[^\n]*\n((?:\t.*\n)*)", (REPO / "Makefile").read_text(), re.MULTILINE)
    first = {name: body.strip().partition("\n")[0].strip() for name, body in rules}
    for name, target in needs.TARGETS.items():
        if (target.must or target.may) and name not in SAID_OTHERWISE:
            assert first[name] == f"@python -m hack.needs {name}", f"make {name} does not say first what it needs"
        else:
            assert name in first, f"there is no make {name}"
    for name, line in first.items():
        said = re.match(r"@python -m hack\.needs (\S+)", line)
        assert said is None or said[1] in needs.TARGETS, f"make {name} asks for the needs of {said and said[1]}"


@pytest.mark.parametrize(("assets", "go", "can"), [("", True, True), ("", False, False), ("envtest", False, True), ("envtest", True, True)])
def test_an_api_server_is_built_by_go_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assets: str, go: bool, can: bool) -> None:
    for name in ASSETS:
        (tmp_path / "envtest").mkdir(exist_ok=True)
        (tmp_path / "envtest" / name).touch()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / assets) if assets else "")
    monkeypatch.setenv("PSJOB_CACHE", str(tmp_path))
    monkeypatch.delenv("PSJOB_KUBERNETES", raising=False)
    monkeypatch.setattr(needs, "_go", lambda: go)
    lines, works = told("test-cluster", needs.TARGETS["test-cluster"])
    assert works is can
    assert can or "KUBEBUILDER_ASSETS" in lines[1]


def test_an_unknown_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert needs.main(["tea"]) == 2
    assert "tea: name one of test-unit, test, test-cluster" in capsys.readouterr().err


PINS = {"torch": "9.1.0", "torchmetrics": "1.0", "numpy": "2.0", "triton": "5.0", "nvidia-cublas": "1.0", "cuda-bindings": "1.0"}
CPU = "9.1.0+cpu"
WITH_CUDA = ("torch", "triton", "nvidia-cublas", "cuda-bindings")


def never(requirement: str) -> bool:
    raise AssertionError(f"the index is asked for {requirement}, which decides nothing")


@pytest.mark.parametrize(("platform", "has_gpu", "there", "offers", "left_out", "beside", "again", "told"), [
    ("linux", False, None, lambda word: word == f"torch=={CPU}", ("torch", "triton", "nvidia-cublas", "cuda-bindings"), CPU, False, "2 GB"),
    ("linux", False, "9.0.0+cpu", lambda _: True, WITH_CUDA, CPU, False, "not pinned"),
    ("linux", False, CPU, never, WITH_CUDA, CPU, False, "2 GB"),
    ("linux", False, None, lambda _: False, UNUSED, None, False, "UV_EXTRA_INDEX_URL="),
    ("linux", False, "9.1.0", never, UNUSED, None, False, "into .venv"),
    ("linux", True, None, never, (), None, False, "all of CUDA"),
    ("linux", True, CPU, never, (), None, True, "all of CUDA"),
    ("darwin", False, None, never, (), None, False, "2 GB"),
])  # fmt: skip
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


ROOT = Path(__file__).resolve().parents[2]


def pinned(name: str) -> str:
    """The version of that package in requirements/runtime.txt."""
    found = re.search(rf"^{name}==([\w.]+)", (ROOT / "requirements" / "runtime.txt").read_text(), re.MULTILINE)
    assert found, name
    return found[1]


def test_the_image_of_the_sdk_has_the_torch_that_is_pinned() -> None:
    cuda = ".".join(pinned("cuda-toolkit").split(".")[:2])
    cudnn = pinned(r"nvidia-cudnn-cu\d+").split(".")[0]
    assert f"pytorch/pytorch:{pinned('torch')}-cuda{cuda}-cudnn{cudnn}-runtime" == IMAGE


def test_no_page_and_no_code_takes_whatever_torch_is_the_latest() -> None:
    files = [path for folder in ("docs", "examples", "charts", "client/src") for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = {path: path.read_text(errors="ignore") for path in files if path.suffix in (".md", ".py", ".yaml", ".yml", ".ipynb")}
    assert len(texts) > 100 and not [str(path) for path, text in texts.items() if "pytorch/pytorch:latest" in text]


def test_the_dockerfile_installs_no_package_of_debian_without_a_version() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    packages = [word for words in re.findall(r"apt-get install ([^|&;]+)", text) for word in words.split() if not word.startswith("-")]
    assert packages == ['"busybox-static=${BUSYBOX}"']
    (version,) = re.findall(r"^ARG BUSYBOX=(\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"\d+:\d+\.\d+\.\d+-\w+\+deb12u\d+\*", version), version
    assert re.search(r"^ARG PYTHON=python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}$", text, re.MULTILINE), "Debian 12, as that version is"


TOKEN = Finding("CKV_K8S_38", "Ensure that Service Account Tokens are only mounted where necessary", "chart.yaml:Deployment.home.x")
EXCUSED = Excused("CKV_K8S_38", "chart*.yaml:Deployment.*", "it calls the API server")


def test_a_finding_without_an_exception_is_named() -> None:
    assert judge([TOKEN], []) == [f"chart.yaml:Deployment.home.x: CKV_K8S_38 {TOKEN.name}"]


def test_an_exception_covers_its_own_check_and_place_alone() -> None:
    assert judge([TOKEN], [EXCUSED]) == []
    elsewhere = Finding(TOKEN.check, TOKEN.name, "job.yaml:Pod.home.x")
    other = Finding("CKV_K8S_16", "Container should not be privileged", TOKEN.place)
    assert len(judge([TOKEN, elsewhere, other], [EXCUSED])) == 2


def test_an_exception_that_excuses_nothing_is_named() -> None:
    (told,) = judge([], [EXCUSED])
    assert told == "hack/scan/exceptions.toml: CKV_K8S_38 at chart*.yaml:Deployment.* excuses nothing; remove it"


def test_every_exception_has_its_reason() -> None:
    assert exceptions() and all(len(exception.reason.split()) >= 5 for exception in exceptions())
