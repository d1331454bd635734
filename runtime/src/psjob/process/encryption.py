"""What streams of this process are encrypted with: TLS 1.3, by the certificates that it was handed."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Encryption:
    """`word`: all streams are encrypted (tls), none is, or those between two hosts (auto)."""

    word: str = "none"
    dials: ssl.SSLContext | None = None
    accepts: ssl.SSLContext | None = None


def encryption(word: str, authority: Path, certificate: Path | None) -> Encryption:
    """`authority`: the PEM file of the run's CA; `certificate`: of a shard, its private key and its certificate in one PEM file.

    Raises OSError where a file cannot be read, and ssl.SSLError, which is one, where it is none of the kind.
    """
    if word == "none":
        return Encryption()
    dials = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    dials.minimum_version = ssl.TLSVersion.TLSv1_3
    dials.load_verify_locations(authority)
    accepts = None
    if certificate is not None:
        accepts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        accepts.minimum_version = ssl.TLSVersion.TLSv1_3
        accepts.num_tickets = 0  # no stream is resumed, and the last word of the handshake is the dialler's
        accepts.load_cert_chain(certificate)
        # Of the groups that OpenSSL offers by default the largest takes 100 ms of a shard's thread, for whoever dials.
        try:
            accepts.set_ecdh_curve("X25519")
        except (ValueError, ssl.SSLError):
            accepts.set_ecdh_curve("prime256v1")
    return Encryption(word, dials, accepts)
