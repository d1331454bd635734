"""What a stranger's pod tries at a shard, by the standard library alone: prints, for each attempt, the hex digits of what it heard.

Arguments: host of a shard, the run, and for each attempt with keys `name=role:index:number:key` (hex digits).
"""

import hashlib
import hmac
import json
import os
import socket
import struct
import sys

HOST, RUN = sys.argv[1:3]
DIGEST = hashlib.blake2b(RUN.encode(), digest_size=16).digest()
WIRE = 2


def greeting(role, index, number, digest=DIGEST, version=WIRE):
    return struct.pack("<4sHBxII16s32s", b"PSJA", version, role, index, number, digest, os.urandom(32))


def frame(kind, body=b"", worker=0):
    head = struct.pack(
        "<4sHHBBH16sIIiIIqIIHHIQIQQI16s",
        b"PSJ1", WIRE, 124, kind, 0, 0, DIGEST, 1, 1, worker, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, len(body), 0, bytes(16),
    )  # fmt: skip
    return head + struct.pack("<I", __import__("zlib").crc32(head)) + body


def tried(*said, proof=None):
    heard = b""
    with socket.create_connection((HOST, 7070), timeout=10) as sock:
        try:
            for part in said:
                sock.sendall(part)
            if proof is not None:
                answer = sock.recv(84, socket.MSG_WAITALL)
                heard += answer
                sock.sendall(proof(said[0] + answer))
                sock.sendall(frame(1, json.dumps({"role": "worker", "fresh": True}).encode()) + frame(8))
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(65536):
                heard += part
        except OSError:
            pass
    return heard.hex()


def proven(key):
    return lambda said: hmac.digest(key, b"psjob dialler\0" + said, "sha256")


HELLO = frame(1, json.dumps({"role": "worker", "fresh": True, "view": 0, "recovery": 0}).encode())
found = {
    "hello without a handshake": tried(HELLO),
    "pull without a handshake": tried(HELLO, frame(8)),
    "push without a handshake": tried(HELLO, frame(6, bytes(64))),
    "leave without a handshake": tried(HELLO, frame(11), frame(11, worker=1)),
    "stop without a handshake": tried(HELLO, frame(20, b"{}")),
    "a shard's early word": tried(
        frame(1, json.dumps({"role": "shard", "index": 1, "attempt": 9, "view": 10**17, "early": True}).encode())
    ),
    "version 1": tried(greeting(0, 0, 1, version=1)),
    "no key": tried(greeting(0, 0, 1), proof=proven(b"")),
    "the run as key": tried(greeting(0, 0, 1), proof=proven(RUN.encode())),
    "the proof sent back": tried(greeting(0, 0, 1), proof=lambda said: said[-32:]),
    "as a shard": tried(greeting(1, 1, 1), proof=proven(bytes(32))),
    "garbage": tried(os.urandom(4096)),
}
for word in sys.argv[3:]:
    name, _, rest = word.partition("=")
    role, index, number, key = rest.split(":")
    found[name] = tried(greeting(int(role), int(index), int(number)), proof=proven(bytes.fromhex(key)))
print(json.dumps(found))
