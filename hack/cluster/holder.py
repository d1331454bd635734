"""The one process that a cluster hangs from: it starts everything, starts again what dies, and takes everything down with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType

from hack.cluster import kwok, network, nodes, plane, storage
from hack.cluster.options import Options, Ready
from hack.cluster.paths import ClusterError, program
from hack.cluster.proc import Keeper, alive, started_at


class _Asked(BaseException):
    """SIGTERM came."""


def detach(state: Path) -> None:
    """Continue in a process whose parent is not who asked for the cluster: what the cluster computes is none of that one's. It is noted."""
    pid = os.fork()
    if pid:
        (state / "holder.pid").write_text(f"{pid} {started_at(pid)}\n")
        os._exit(0)


def hold(options: Options) -> int:
    """Bring the cluster up, say so in cluster.json, keep it until SIGTERM or until its owner is gone, tear it down."""
    signal.signal(signal.SIGTERM, _ask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        claimed = network.claim(options.wait) if options.nodes else None
    except (ClusterError, _Asked) as error:
        (options.state / "error").write_text(f"{error}\n")
        remove_state(options.state)
        return 1
    _start_reaper(options)  # it inherits the claim: the machine is free again when both have ended
    keeper = Keeper(options.state)
    status = 0
    try:
        connected: dict[int, int] = {}
        ready = _bring_up(options, keeper, connected)
        ready.save()
        _keep(options, keeper, connected)
    except _Asked:
        pass
    except ClusterError as error:
        (options.state / "error").write_text(f"{error}\n")
        status = 1
    except Exception:  # whatever it is, the person who waits at `up` must see it
        (options.state / "error").write_text(traceback.format_exc())
        status = 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (options.state / "cluster.json").unlink(missing_ok=True)
        keeper.stop()
        if claimed is not None:
            claimed.close()
    return status


def _bring_up(options: Options, keeper: Keeper, connected: dict[int, int]) -> Ready:
    started = time.monotonic()
    if options.nodes:
        network.create()
    made = plane.start(options, keeper)
    if options.nodes:
        connected |= nodes.start(options, keeper, made)
    storage.prepare(made.api)
    keeper.start("storage", _ourselves("storage", options))
    if options.kwok or not options.nodes:
        kwok.start(options, keeper, made.url, made.authority)
        kwok.add_nodes(made.api, [kwok.node(f"kwok-{index}", tainted=options.nodes > 0) for index in range(options.kwok)])
    if options.nodes:
        keeper.start("policies", _ourselves("policies", options))
        nodes.wait_ready(options, keeper, made.api)
    return Ready(
        state=str(options.state),
        holder=os.getpid(),
        url=made.url,
        kubeconfig=str(made.kubeconfig),
        kubectl=str(program("kubectl")),
        ca=str(made.authority.ca.cert),
        cert=str(made.admin.cert),
        key=str(made.admin.key),
        nodes=options.nodes,
        audit=str(options.state / "audit.log") if options.audit else None,
        seconds=round(time.monotonic() - started, 2),
    )


def _keep(options: Options, keeper: Keeper, connected: dict[int, int]) -> None:
    while options.owner is None or alive(options.owner, options.owner_started):
        keeper.revive()
        with contextlib.suppress(ClusterError):  # a node that dies again meanwhile is connected at a later turn
            nodes.connect(options, connected)
        time.sleep(0.25)
    print(f"process {options.owner}, which this cluster belongs to, is gone; going too", flush=True)


def _start_reaper(options: Options) -> None:
    """A second process that waits for our end, however it comes, and removes what the kernel does not remove by itself."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reading)  # pipes are not inherited by what is started later, so our end is the only writing one
        (options.state / "reaper.pid").write_text(f"{pid} {started_at(pid)}\n")
        return
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(writing)
        while os.read(reading, 1):
            pass
        clean(options)
    finally:
        os._exit(0)


def clean(options: Options) -> None:
    """Remove bridge, cgroups and everything in the state folder but logs; safe to call again, by who has the machine's claim."""
    if options.nodes:
        nodes.clean()
        network.remove()
    remove_state(options.state)


def remove_state(state: Path) -> None:
    # The reaper's pid goes last: as long as it is there, `down` waits for the reaper.
    for entry in sorted(state.iterdir(), key=lambda entry: entry.name == "reaper.pid") if state.exists() else ():
        if entry.name in ("logs", "error"):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _ourselves(command: str, options: Options) -> list[str]:
    main = Path(__file__).resolve().parent
    return [sys.executable, str(main), command, "--state", str(options.state)]


def _ask(number: int, frame: FrameType | None) -> None:
    raise _Asked
