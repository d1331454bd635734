"""What a stranger's pod tries at a shard, only by the standard library: prints, for each attempt, the hex digits of what it heard.

Each attempt is made in clear text and over TLS, with whatever certificate the shard shows.

Arguments: host of a shard, the run, and for each attempt with keys `name=role:index:number:key` (hex digits).
"""

import hashlib
import hmac
import json
import os
import socket
import ssl
import struct
import sys

HOST, RUN = sys.argv[1:3]
DIGEST = hashlib.blake2b(RUN.encode(), digest_size=16).digest()
WIRE = 3
TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
TLS.check_hostname, TLS.verify_mode = False, ssl.CERT_NONE


def greeting(role, index, number, digest=DIGEST, version=WIRE):
    return struct.pack("<4sHBxII16s32s", b"PSJA", version, role, index, number, digest, os.urandom(32))


def frame(kind, body=b"", worker=0):
    head = struct.pack(
        "<4sHHBBH16sIIiIIqIIHHIQIQQI16s",
        b"PSJ1", WIRE, 124, kind, 0, 0, DIGEST, 1, 1, worker, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, len(body), 0, bytes(16),
    )  # fmt: skip
    return head + struct.pack("<I", __import__("zlib").crc32(head)) + body


def tried(*said, proof=None, tls=False):
    heard = b""
    with socket.create_connection((HOST, 7070), timeout=10) as plain:
        try:
            sock = TLS.wrap_socket(plain) if tls else plain
            for part in said:
                sock.sendall(part)
            if proof is not None:
                answer = b""
                while len(answer) < 84 and (part := sock.recv(84 - len(answer))):
                    answer += part
                heard += answer
                if answer.startswith(b"PSJA"):
                    sock.sendall(proof(said[0] + answer))
                    sock.sendall(frame(1, json.dumps({"role": "worker", "fresh": True}).encode()) + frame(8))
            socket.socket.shutdown(sock, socket.SHUT_WR)  # that of an SSLSocket would end TLS with it
            while part := sock.recv(65536):
                heard += part
        except OSError:
            pass
    return heard.hex()


def attempt(name, *said, proof=None):
    for tls in (False, True):
        found[f"{name} {'over TLS' if tls else 'in clear text'}"] = tried(*said, proof=proof, tls=tls)


def proven(key):
    return lambda said: hmac.digest(key, b"psjob dialler\0" + said, "sha256")


HELLO = frame(1, json.dumps({"role": "worker", "fresh": True, "term": 0, "restore_id": 0}).encode())
found = {}
attempt("hello without a handshake", HELLO)
attempt("pull without a handshake", HELLO, frame(8))
attempt("push without a handshake", HELLO, frame(6, bytes(64)))
attempt("leave without a handshake", HELLO, frame(11), frame(11, worker=1))
attempt("stop without a handshake", HELLO, frame(20, b"{}"))
attempt("a shard's early word", frame(1, json.dumps({"role": "shard", "index": 1, "attempt": 9, "term": 10**17, "early": True}).encode()))
attempt("version 1", greeting(0, 0, 1, version=1))
attempt("no key", greeting(0, 0, 1), proof=proven(b""))
attempt("the run as key", greeting(0, 0, 1), proof=proven(RUN.encode()))
attempt("the proof sent back", greeting(0, 0, 1), proof=lambda said: said[-32:])
attempt("as a shard", greeting(1, 1, 1), proof=proven(bytes(32)))
attempt("garbage", os.urandom(4096))
for word in sys.argv[3:]:
    name, _, rest = word.partition("=")
    role, index, number, key = rest.split(":")
    attempt(name, greeting(int(role), int(index), int(number)), proof=proven(bytes.fromhex(key)))
print(json.dumps(found))
