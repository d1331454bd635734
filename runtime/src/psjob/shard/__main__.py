"""The process of a shard: `python -m psjob.shard`, started by the planner with contract's environment."""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import threading
from typing import Any

from psjob import contract
from psjob.process import supervise, system
from psjob.process.config import ProcessContext, place
from psjob.process.errors import Refused, exit_refused, refused_after
from psjob.protocol.streams import most_streams
from psjob.shard import keeper
from psjob.shard.acceptor import Acceptor, announce
from psjob.wire import tcp
from psjob.wire.auth import GREETING_BYTES
from psjob.wire.stream_pool import StreamPool

MORE_STREAMS = 512
"""Beside one of each worker's and shard's: those that are dialled again before the old ones are closed."""
TRIAL_SECONDS = 120.0
"""For the import and the trial of a reduction of the user's own."""
PORT_SECONDS = 15.0
"""A killed predecessor on this host holds its port until the kernel has freed its memory, which takes a second for gigabytes."""
M_ARENA_MAX = -8
COLLECT_EVERY = 20_000
"""Objects made and not freed, after which the youngest are looked through for circles."""


def main() -> int:
    """Serve, in a process that a keeper replaces if it is killed, where one can. Returns the exit status."""
    if keeper.possible_here():
        return keeper.Keeper(load_server).run(serve)
    return serve(None, None)


def load_server() -> None:
    """Import what `serve` imports late, torch with it."""
    importlib.import_module("psjob.shard.server")


def serve(keeping: keeper.Keeping | None, held: keeper.LeftMemory | None) -> int:
    """Tell the others that we come, then import torch, then serve. Returns the exit status."""
    logging.basicConfig(level=os.environ.get("PSJOB_LOG", "INFO"), format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    _few_arenas()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    supervise.guard()
    try:
        here = _checked(place())
        each = here.config.streams or most_streams(here.config.workers, system.cores())
        files = system.open_files(here.config.workers, each, len(here.config.shards))
    except Refused as refused:
        exit_refused(str(refused))
        raise
    peer = here.config.shards[here.index]
    try:
        listener = tcp.listening_socket(here.bind, peer.port, PORT_SECONDS)
    except OSError as error:
        print(f"psjob: {error}", file=sys.stderr)
        return contract.EXIT_RETRY
    acceptor = Acceptor(here)
    streams = here.config.workers * each + len(here.config.shards) + MORE_STREAMS
    StreamPool("shard").accept(listener, acceptor.serve, min(streams, files - system.OWN_FILES), GREETING_BYTES)
    if held is None:
        announce(here)

    import torch

    torch.set_num_threads(1)
    from psjob.rules.reduction import ReductionProblem
    from psjob.shard.server import Server, exit_now
    from psjob.shard.state_memory import Untaken
    from psjob.shard.status_server import last_words, serve_status

    assert here.checkpoints is not None
    stuck = f"training.sync.reduction {here.config.reduction}: its import and trial took more than {TRIAL_SECONDS:.0f} s; it must return"
    try:
        with refused_after(TRIAL_SECONDS, stuck):
            server = Server(here, here.checkpoints / here.run, keeping)
            if held is not None:
                server.take_up(held)
    except ReductionProblem as problem:
        exit_refused(str(problem))
        raise
    except Untaken as problem:
        print(f"psjob: shard {here.index} is restored from a checkpoint: {problem}", file=sys.stderr)
        return supervise.EXIT_BROKEN
    _collect_seldom()
    serve_status(server, here.bind, peer.status_port)
    acceptor.open(server.meet, server.refuse, server.hello_room)
    supervise.guard(lambda sentence: _break_off(server, sentence))
    supervise.start_thread(_pass_on, "sigterm", stop, server)
    try:
        code = server.run_until_gone()
    except Exception as error:
        supervise.thread_broken("control", error)
        raise
    last_words(server)
    exit_now(code)
    return code


def _break_off(server: Any, sentence: str) -> None:
    """A thread broke: leave the reason with the last status, and count as a crash."""
    from psjob.shard.server import exit_now
    from psjob.shard.status_server import last_words

    print(f"psjob: {sentence}", file=sys.stderr, flush=True)
    server.termination_message["problem"] = sentence
    try:
        last_words(server)
    finally:
        exit_now(supervise.EXIT_BROKEN)


def _few_arenas() -> None:
    """Each thread would keep a heap of its own: measured 3 MiB after 1,000 bad connections that had a thread each, so 0.5."""
    try:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)
    except (OSError, AttributeError):  # another C library
        pass


def _collect_seldom() -> None:
    """What was imported stays; and pushes that wait for others are many objects that live for long, which a collector walks for nothing."""
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, 20, 20)


def _pass_on(stop: threading.Event, server: Any) -> None:
    stop.wait()
    server.stop()


def _checked(found: ProcessContext | None) -> ProcessContext:
    if found is None or found.role != "shard":
        raise Refused("python -m psjob.shard is started by the operator or by `psjob run`, not by hand")
    if found.checkpoints is None:
        raise Refused(f"{contract.ENV_CHECKPOINTS} is not set: a shard needs a folder for its checkpoints")
    if found.term < 1:
        raise Refused(f"{contract.ENV_TERM} is not set")
    return found


if __name__ == "__main__":
    sys.exit(main())
