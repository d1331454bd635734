"""The process of a shard: `python -m psjob.shard`, started by the planner with contract's environment."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from typing import Any

from psjob import contract
from psjob.process.config import Place, place
from psjob.process.errors import Refused, exit_refused, leave_message, refused_after
from psjob.shard.acceptor import Acceptor
from psjob.shard.early import announce
from psjob.wire import tcp

MAX_STREAMS = 4096
TRIAL_SECONDS = 120.0
"""For the import and the trial of a reduction of the user's own."""
M_ARENA_MAX = -8


def main() -> int:
    """Tell the others that we come, then import torch, then serve. Returns the exit status."""
    logging.basicConfig(level=os.environ.get("PSJOB_LOG", "INFO"), format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    _few_arenas()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        here = _checked(place())
    except Refused as refused:
        exit_refused(str(refused))
        raise
    peer = here.config.shards[here.index]
    try:
        listener = tcp.listen(here.bind, peer.port)
    except OSError as error:
        print(f"psjob: {error}", file=sys.stderr)
        return contract.EXIT_RETRY
    acceptor = Acceptor(here)
    tcp.accept_forever(listener, acceptor.serve, MAX_STREAMS, "shard")
    announce(here)

    import torch

    torch.set_num_threads(1)
    from psjob.checkpoint.disk import make_folder
    from psjob.checkpoint.problems import CheckpointProblem
    from psjob.rules.reduction import ReductionProblem
    from psjob.shard.server import Server, exit_now, last_words
    from psjob.shard.statusport import serve_status

    assert here.checkpoints is not None
    try:
        folder = here.checkpoints / here.run
        make_folder(folder)
    except CheckpointProblem as problem:
        print(f"psjob: {problem}", file=sys.stderr)
        leave_message({"problem": str(problem)[:1000]})
        return 1
    stuck = f"training.reduction {here.config.reduction}: its import and trial took more than {TRIAL_SECONDS:.0f} s; it must return"
    try:
        with refused_after(TRIAL_SECONDS, stuck):
            server = Server(here, folder)
    except ReductionProblem as problem:
        exit_refused(str(problem))
        raise
    serve_status(server, here.bind, peer.status_port)
    acceptor.open(server.meet, server.refuse)
    threading.Thread(target=_pass_on, args=(stop, server), name="sigterm", daemon=True).start()
    code = server.run_until_gone()
    last_words(server)
    exit_now(code)
    return code


def _few_arenas() -> None:
    """Each stream is a thread, and each thread would keep a heap of its own: measured 3 MiB after 1,000 bad connections, so 0.5."""
    try:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)
    except (OSError, AttributeError):  # another C library
        pass


def _pass_on(stop: threading.Event, server: Any) -> None:
    stop.wait()
    server.stop()


def _checked(found: Place | None) -> Place:
    if found is None or found.role != "shard":
        raise Refused("python -m psjob.shard is started by the operator or by `psjob run`, not by hand")
    if found.checkpoints is None:
        raise Refused(f"{contract.ENV_CHECKPOINTS} is not set: a shard needs a folder for its checkpoints")
    if found.view < 1:
        raise Refused(f"{contract.ENV_VIEW} is not set")
    return found


if __name__ == "__main__":
    sys.exit(main())
