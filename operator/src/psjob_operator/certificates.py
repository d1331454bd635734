"""The certificates of one run (X.509, RFC 5280): a CA, whose private key is forgotten at once, and one for each process that listens."""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from psjob_operator.contract import AUTHORITY, CERTIFICATE, SHARD_NAME, WORKER_CERTIFICATE, WORKER_NAME

BEGIN, END = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""A run's certificates go with its Secret, and no node's clock shall refuse them; the end is RFC 5280's for one that has none."""


def certificates(shards: int, workers: int = 0) -> dict[str, bytes]:
    """PEM files by name: contract.AUTHORITY, and for each shard contract.CERTIFICATE with its private key and its certificate. `workers`:
    how many listen, each with contract.WORKER_CERTIFICATE."""
    key = generate_private_key(SECP256R1())
    name = _name("psjob run")
    authority = _builder(name, name, key).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    authority = authority.add_extension(_usage(signs=True), critical=True)
    made = {AUTHORITY: authority.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)}
    for count, file, host in ((shards, CERTIFICATE, SHARD_NAME), (workers, WORKER_CERTIFICATE, WORKER_NAME)):
        for index in range(count):
            made[file.format(index=index)] = _listener(host.format(index=index), name, key)
    return made


def _listener(name: str, issuer: x509.Name, authority: EllipticCurvePrivateKey) -> bytes:
    key = generate_private_key(SECP256R1())
    builder = _builder(_name(name), issuer, key)
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([x509.DNSName(name)]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False),
    ):
        builder = builder.add_extension(extension, critical)
    certificate = builder.sign(authority, hashes.SHA256()).public_bytes(Encoding.PEM)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate


def _builder(subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number(), BEGIN, END)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _usage(signs: bool) -> x509.KeyUsage:
    """Of the CA's key, which signs certificates, or of a listener's, which signs handshakes."""
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
