"""`docker build` and `docker push` on a machine without Docker or a registry: images as hack/cluster makes them, pushed into its nodes.

A build with `--target` is one of the project's Dockerfile.

python -m tests.e2e.docker_here STATE build [--target operator|runtime] -t NAME FOLDER
python -m tests.e2e.docker_here STATE push NAME
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hack.cluster import dockerfile, nodes, pack
from hack.cluster.options import Ready
from hack.cluster.paths import Unavailable


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("state", type=Path)
    verbs = parser.add_subparsers(dest="verb", required=True)
    build = verbs.add_parser("build")
    build.add_argument("--target", choices=["operator", "runtime"])
    build.add_argument("-t", dest="name", required=True)
    build.add_argument("folder", type=Path)
    push = verbs.add_parser("push")
    push.add_argument("name")
    asked = parser.parse_args(words)
    archive = asked.state / f"docker-{asked.name.replace('/', '-')}.tar"
    if asked.verb == "push":
        ready = Ready.load(asked.state)
        assert ready is not None
        nodes.load(asked.state, ready.nodes, archive)
        archive.unlink()
        return
    assert (asked.folder / "Dockerfile").is_file()
    if asked.target:
        try:
            (built,) = dockerfile.build({asked.target: asked.name}, asked.state / "docker")
            built.rename(archive)
        except Unavailable:
            pack.pack(archive, **{asked.target: asked.name})
    else:
        pack.pack(archive, workers={asked.name: asked.folder})


if __name__ == "__main__":
    main(sys.argv[1:])
