"""`python -m hack.packages UV`: the pinned requirements, the three distributions, helm and kubectl into .venv; hack/install.sh calls it.

On Linux the pinned wheel of torch has CUDA. A machine without a GPU gets torch's CPU wheel where the package index in use has it.
Elsewhere it gets the pinned wheel without the packages that torch imports only on a GPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hack import tools
from hack.cluster import pipsettings

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements" / "dev.txt"
GPUS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""One of them is there where a process can reach an NVIDIA GPU; the second is that of Windows' Linux."""
CUDA = re.compile(r"nvidia-|cuda-|triton$")
UNUSED = ("triton", "nvidia-cusolver", "nvidia-nvtx", "nvidia-cuda-cccl", "cuda-bindings", "cuda-pathfinder")
"""What torch never loads without a GPU. The other CUDA libraries are loaded with torch itself: `readelf -d libtorch_cuda.so` lists them."""
SELDOM = (
    r"/(tests?|testing|_inductor|onnx)/"
    r"|/site-packages/(databricks|fontTools|kubernetes|matplotlib|mlflow|mypyc?|networkx|playwright|sympy|transformers|wandb)/"
)
"""Of which a process imports a small part, if any: two thirds of all Python in .venv."""
OF_PIP = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
}
"""Settings of pip, and the variables that tell uv the same."""
SAME = {"UV_DEFAULT_INDEX": ("UV_INDEX_URL",), "UV_EXTRA_INDEX_URL": ("UV_INDEX",)}
"""Other names of those variables: where one is set, pip's setting is left alone."""


@dataclass(frozen=True)
class Choice:
    """Which torch goes into .venv: the pins that are left out, a requirement beside them, and what the person is told."""

    left_out: tuple[str, ...]
    beside: str | None
    told: str
    again: bool = False
    """The torch that is there is of another kind."""


def main(words: list[str]) -> int:
    """The exit status."""
    if len(words) != 1:
        print("packages: give the path of uv", file=sys.stderr)
        return 2
    uv = words[0]
    os.environ.update(for_uv(os.environ, pipsettings.settings()))
    choice = choose(
        pinned(), sys.platform, gpu(os.environ, any(path.exists() for path in GPUS)), installed(), lambda word: offered(uv, word)
    )
    print(choice.told, flush=True)
    install(uv, choice)
    return tools.main(uv)


def choose(pins: Mapping[str, str], platform: str, has_gpu: bool, there: str | None, offered: Callable[[str], bool]) -> Choice:
    """The torch for this machine; `there` is the version in .venv, and `offered` asks the index in use for a requirement."""
    pin = pins["torch"]
    cpu = f"{pin}+cpu"
    if platform != "linux":
        return Choice((), None, "installing the pinned requirements into .venv (2 GB)")
    if has_gpu:
        return Choice((), None, "installing the pinned requirements into .venv, with all of CUDA (7 GB)", again=there == cpu)
    if there == cpu or (there != pin and offered(f"torch=={cpu}")):
        left_out = ("torch", *(name for name in pins if CUDA.match(name)))
        told = f"installing the pinned requirements into .venv, and torch=={cpu}, whose hash is not pinned (2 GB)"
        return Choice(left_out, f"torch=={cpu}", told)
    if there == pin:
        return Choice(UNUSED, None, "installing the pinned requirements into .venv")
    told = (
        "installing the pinned requirements into .venv: 5 GB, because torch loads its CUDA libraries without a GPU too "
        f"and the package index in use has no torch=={cpu}. With an index that has it 2 GB suffice: "
        "make clean install UV_EXTRA_INDEX_URL=ADDRESS"
    )
    return Choice(UNUSED, None, told)


def gpu(environment: Mapping[str, str], seen: bool) -> bool:
    """Whether packages for a GPU are wanted: PSJOB_GPU says so, else whether one is `seen`."""
    return {"1": True, "0": False}.get(environment.get("PSJOB_GPU", ""), seen)


def for_uv(environment: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The variables that give uv pip's settings, less those that the person has set."""
    chosen = {}
    for name, variable in OF_PIP.items():
        value = settings.get(name, "")
        if name == "find-links":
            value = ",".join(word for word in value.split() if "://" in word or Path(word).is_dir())
        if value and not any(environment.get(word) for word in (variable, *SAME.get(variable, ()))):
            chosen[variable] = value
    return chosen


def pinned() -> dict[str, str]:
    """The version of each package in dev.txt."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", PINS.read_text(), re.MULTILINE))


def installed() -> str | None:
    """The version of torch in this environment."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def offered(uv: str, requirement: str) -> bool:
    """Whether the index in use has a wheel of it for this Python; no answer is no."""
    words = ["--dry-run", "--no-deps", "--only-binary", ":all:", "--index-strategy", "unsafe-best-match", requirement]
    try:
        return subprocess.run([*into(uv), *words], capture_output=True, timeout=120).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def install(uv: str, choice: Choice) -> None:
    """Put everything into .venv. Raises CalledProcessError if uv fails, which has said why."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as left_out:
        left_out.write("\n".join(choice.left_out) + "\n")
        left_out.flush()
        # Hashes hold whichever index a file comes from.
        words = ["--require-hashes", "--index-strategy", "unsafe-best-match", "-r", str(PINS), "--excludes", left_out.name]
        words += ["--reinstall-package", "torch"] if choice.again else []
        _run([*into(uv), *words])
    if choice.beside:
        _run([*into(uv), "--no-deps", "--index-strategy", "unsafe-best-match", choice.beside])
    _run([*into(uv), "--no-deps", "--no-build-isolation", "-e", "operator", "-e", "runtime", "-e", "client"])
    # Compiled here once, by all cores: where PYTHONDONTWRITEBYTECODE is set, each of the many processes of a test run would compile torch.
    # Its exit status says only that some package has a file for another Python.
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j", "0", "-x", SELDOM, sysconfig.get_path("purelib")], check=False)


def into(uv: str) -> list[str]:
    """The command that installs into this environment."""
    return [uv, "pip", "install", "-q", "--python", sys.executable]


def _run(command: list[str]) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd[:3])} ended with {error.returncode}; what it said stands above")
