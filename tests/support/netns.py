"""Real networks for tests: every member has a network namespace, all links meet in one that routes between them, and faults are made there.

Nothing of the machine's own network is touched, so networks of tests that run side by side cannot meet. All ends with the process
that made it: a namespace lives as long as the process that holds it, and that one gets SIGKILL when its parent dies.

- Packets that arrive later: a tun device whose packets are read, kept and written back, since a kernel may be built without netem.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import json
import math
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from hack.cluster.proc import die_with_parent

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
LARGEST = 65536


def new_tun(device: str) -> int:
    """The open file of a new tun device in the caller's network namespace; the device goes when it is closed."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    return tun


class Delay:
    """Gives each packet back to the device `tun` when it has been here for so many seconds. `stop` closes it and drops the rest."""

    def __init__(self, tun: int, seconds: float) -> None:
        self.tun, self.seconds = tun, seconds
        self._held: collections.deque[tuple[float, bytes]] = collections.deque()
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._run, name="delay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        os.close(self._stopped)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._stop)
        os.close(self.tun)

    def _run(self) -> None:
        poll = select.poll()  # select takes no descriptor above 1,023
        for fd in (self.tun, self._stop):
            poll.register(fd, select.POLLIN)
        while True:
            wait = math.ceil(1000 * max(0.0, self._held[0][0] - time.monotonic())) if self._held else None
            ready = {fd for fd, _ in poll.poll(wait)}
            if self._stop in ready:
                return
            if self.tun in ready:
                self._take()
            while self._held and self._held[0][0] <= time.monotonic():
                os.write(self.tun, self._held.popleft()[1])

    def _take(self) -> None:
        due = time.monotonic() + self.seconds
        while True:
            try:
                self._held.append((due, os.read(self.tun, LARGEST)))
            except BlockingIOError:
                return


ROUTER = "10.77.0.1"
CLONE_NEWNET = 0x40000000
TUN_TABLE = 100
_LIBC = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


def require() -> None:
    """Skip the test where this machine cannot have such networks."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    lacking = [word for word in ("ip", "nft", "tc", "ss", "unshare", "nsenter") if shutil.which(word) is None]
    if lacking:
        pytest.skip(f"these commands are not installed: {', '.join(lacking)}; `python -m hack.cluster deps` brings them")
    if not Path("/dev/net/tun").exists():
        pytest.skip("this machine has no /dev/net/tun, which delays packets")


@dataclass
class Dropped:
    """What a fault has dropped so far."""

    network: Network
    table: str

    @property
    def packets(self) -> int:
        """How many packets. Only while the fault holds."""
        told = json.loads(self.network.router.run("nft", "-j", "list", "table", "inet", self.table))
        return sum(part["counter"]["packets"] for rule in _rules(told) for part in rule if "counter" in part)


@dataclass
class Space:
    """A network namespace."""

    name: str
    address: str
    holder: subprocess.Popen[bytes]

    @property
    def enter(self) -> tuple[str, ...]:
        """Words before a command that run it, in place, in this namespace."""
        return ("nsenter", f"--net={self.path}", "--")

    @property
    def path(self) -> str:
        return f"/proc/{self.holder.pid}/ns/net"

    def run(self, *words: str, stdin: str | None = None) -> str:
        """Standard output of a command that is run here. Raises AssertionError if it fails."""
        done = subprocess.run([*self.enter, *words], input=stdin, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{' '.join(words)} in {self.name} failed: {done.stderr.strip()}"
        return done.stdout

    def set(self, setting: str, value: str) -> None:
        """Give a value to a setting of net.ipv4 here."""
        self.call(lambda: Path("/proc/sys/net/ipv4", setting).write_text(value))

    def processes(self) -> set[int]:
        """The processes that run here, but for the one that holds the namespace."""
        here, found = os.readlink(self.path), set()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns/net") == here:
                    found.add(int(entry.name))
        return found - {self.holder.pid}

    def call(self, function: Callable[[], T]) -> T:
        """The result of `function`, called by a thread of this namespace: sockets that it makes are of here, wherever they are used."""
        result: list[T] = []
        problem: list[BaseException] = []

        def inside() -> None:
            try:
                with open(self.path) as there:
                    if _LIBC.setns(there.fileno(), CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), "setns")
                result.append(function())
            except BaseException as error:
                problem.append(error)

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if problem:
            raise problem[0]
        return result[0]


@dataclass
class Network:
    """Namespaces `names`, each with one interface eth0, and `router`, to which the other ends belong and which is fault-free itself.

    Use it as a context manager. Each fault is one too: it holds while its block runs, several may hold at once, and packets
    to and from the router are never hit, except by `limited`.
    """

    names: Sequence[str]
    spaces: dict[str, Space] = field(default_factory=dict)
    _faults: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ending: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Network:
        with contextlib.ExitStack() as stack:
            self.router = self._space(stack, "router", ROUTER)
            for setting, value in (("ip_forward", "1"), ("conf/all/rp_filter", "0"), ("conf/default/rp_filter", "0")):
                self.router.set(setting, value)
            for number, name in enumerate(self.names):
                self.spaces[name] = self._space(stack, name, f"10.77.0.{number + 10}")
                self._link(self.spaces[name])
            self._ending = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def __getitem__(self, name: str) -> Space:
        return self.spaces[name]

    # -- faults --------------------------------------------------------------------------------

    def cut(self, source: str, target: str) -> contextlib.AbstractContextManager[Dropped]:
        """No packet of `source` reaches `target`; those of the other direction do."""
        return self._drop((source, target))

    def partition(self, one: str, other: str) -> contextlib.AbstractContextManager[Dropped]:
        """No packet passes between the two."""
        return self._drop((one, other), (other, one))

    def loss(self, percent: int, *pairs: tuple[str, str]) -> contextlib.AbstractContextManager[Dropped]:
        """So many of a hundred packets between the two of a pair are dropped, by chance."""
        return self._drop(*pairs, *((other, one) for one, other in pairs), match=f"numgen random mod 100 < {percent}")

    def no_ends(self, *names: str) -> contextlib.AbstractContextManager[Dropped]:
        """No other member hears that a connection of `names` has ended: what has FIN or RST set is dropped on its way from them."""
        pairs = [(name, other) for name in names for other in self.names if other != name]
        return self._drop(*pairs, match="tcp flags & (fin | rst) != 0")

    @contextlib.contextmanager
    def limited(self, name: str, bits: int) -> Iterator[None]:
        """`name` sends and receives so many bits a second at most, all traffic together; 0.4 s of it wait in the link at most."""
        burst = max(4096, bits // 800)  # 10 ms: timers of some kernels tick no faster
        words = ("root", "tbf", "rate", f"{bits}bit", "burst", str(burst), "latency", "400ms")
        ends = ((self.spaces[name], "eth0"), (self.router, name))
        for space, device in ends:
            space.run("tc", "qdisc", "replace", "dev", device, *words)
        try:
            yield
        finally:
            for space, device in ends:
                space.run("tc", "qdisc", "delete", "dev", device, "root")

    @contextlib.contextmanager
    def delayed(self, seconds: float, *pairs: tuple[str, str]) -> Iterator[None]:
        """Each packet between the two of a pair arrives so much later, in both directions; none is lost and their order is kept."""
        with self._lock:
            self._faults += 1
            number = self._faults
        device, table = f"tun{number}", str(TUN_TABLE + number)
        delay = Delay(self.router.call(lambda: new_tun(device)), seconds)
        rules = [
            ("iif", one, "to", self.spaces[other].address, "lookup", table) for pair in pairs for one, other in (pair, (pair[1], pair[0]))
        ]
        try:
            self.router.run("ip", "link", "set", device, "up", "txqueuelen", "10000")
            self.router.run("ip", "route", "add", "default", "dev", device, "table", table)
            for rule in rules:
                self.router.run("ip", "rule", "add", *rule)
            delay.start()
            yield
        finally:
            for rule in rules:
                self.router.run("ip", "rule", "delete", *rule)
            delay.stop()

    def abort(self, name: str, other: str) -> int:
        """Destroy every connection that `name` has with `other`, as its kernel alone sees it; how many they were.

        The reset that tells the peer is sent; under `no_ends` it does not arrive.
        """
        told = self.spaces[name].run("ss", "-HKtn", "dst", self.spaces[other].address)
        return sum(bool(line.strip()) for line in told.splitlines())

    # -- inside --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _drop(self, *pairs: tuple[str, str], match: str = "") -> Iterator[Dropped]:
        with self._lock:
            self._faults += 1
            table = f"fault{self._faults}"
        rules = "\n".join(
            f"ip saddr {self.spaces[source].address} ip daddr {self.spaces[target].address} {match} counter drop"
            for source, target in pairs
        )
        chain = f"table inet {table} {{ chain forward {{ type filter hook forward priority 0;\n{rules}\n}}\n}}"
        self.router.run("nft", "-f", "-", stdin=chain)
        try:
            yield Dropped(self, table)
        finally:
            self.router.run("nft", "delete", "table", "inet", table)

    def _space(self, stack: contextlib.ExitStack, name: str, address: str) -> Space:
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)

        def end() -> None:
            holder.kill()
            holder.wait()

        stack.callback(end)
        space = Space(name, address, holder)
        ours, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + 10
        while os.readlink(space.path) == ours:
            assert holder.poll() is None and time.monotonic() < deadline, "unshare --net made no namespace"
            time.sleep(0.005)
        space.run("ip", "link", "set", "lo", "up")
        return space

    def _link(self, space: Space) -> None:
        self.router.run("ip", "link", "add", space.name, "type", "veth", "peer", "name", "eth0", "netns", str(space.holder.pid))
        # One packet at a time, none larger than the link takes: a rule that drops packets must see those that a wire would see.
        self.router.run("ip", "link", "set", space.name, "up", "gso_max_segs", "1")
        space.run("ip", "link", "set", "eth0", "up", "gso_max_segs", "1")
        self.router.run("ip", "address", "add", f"{ROUTER}/32", "dev", space.name)
        self.router.run("ip", "route", "add", space.address, "dev", space.name, "src", ROUTER)
        space.run("ip", "address", "add", f"{space.address}/32", "dev", "eth0")
        space.run("ip", "route", "add", ROUTER, "dev", "eth0")
        space.run("ip", "route", "add", "default", "via", ROUTER)
        # The one that every kernel has and allows here; the machine's own may be another on each.
        space.set("tcp_congestion_control", "reno")


def _rules(told: dict[str, list[dict[str, dict[str, object]]]]) -> list[list[dict[str, dict[str, int]]]]:
    return [part["rule"]["expr"] for part in told["nftables"] if "rule" in part]  # type: ignore[misc]
