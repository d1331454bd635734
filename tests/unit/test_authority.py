"""The certificates of a run."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from psjob.process.config import encryption
from psjob_operator.authority import certificates


def test_each_shard_has_a_certificate_of_its_own_name_that_only_its_runs_authority_signed() -> None:
    run, other = certificates(2), certificates(2)
    assert set(run) == {"ca.pem", "shard-0.pem", "shard-1.pem"}
    assert b"PRIVATE" not in run["ca.pem"], "nobody can sign with it again"
    assert len(set(run.values()) | set(other.values())) == 6
    for index in range(2):
        certificate = x509.load_pem_x509_certificate(run[f"shard-{index}.pem"])
        assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
        for name, authority, right in (
            (f"shard-{index}", run, True),
            (f"shard-{1 - index}", run, False),
            (f"shard-{index}", other, False),
        ):
            store = Store([x509.load_pem_x509_certificate(authority["ca.pem"])])
            verifier = PolicyBuilder().store(store).build_server_verifier(x509.DNSName(name))
            if right:
                assert len(verifier.verify(certificate, [])) == 2
            else:
                with pytest.raises(VerificationError):
                    verifier.verify(certificate, [])


def test_workers_have_certificates_of_their_own_names_where_they_listen() -> None:
    made = certificates(1, 2)
    assert set(made) == {"ca.pem", "shard-0.pem", "worker-0.pem", "worker-1.pem"}
    store = Store([x509.load_pem_x509_certificate(made["ca.pem"])])
    for name, right in (("worker-1", True), ("worker-0", False), ("shard-1", False)):
        verifier = PolicyBuilder().store(store).build_server_verifier(x509.DNSName(name))
        certificate = x509.load_pem_x509_certificate(made["worker-1.pem"])
        if right:
            assert len(verifier.verify(certificate, [])) == 2
        else:
            with pytest.raises(VerificationError):
                verifier.verify(certificate, [])


def test_all_certificates_of_the_largest_job_fit_into_one_secret() -> None:
    made = certificates(1, 1)
    sizes = {name: len(text) for name, text in made.items()}
    assert 256 * (sizes["shard-0.pem"] + sizes["worker-0.pem"] + 64) < 1 << 20, "what a Secret holds at most"


def test_the_standard_library_takes_them_and_nothing_before_tls_1_3(tmp_path: Path) -> None:
    for name, text in certificates(1).items():
        (tmp_path / name).write_bytes(text)
    made = encryption("tls", tmp_path / "ca.pem", tmp_path / "shard-0.pem")
    assert made.dials is not None and made.accepts is not None
    assert made.dials.verify_mode is ssl.CERT_REQUIRED and made.dials.check_hostname
    assert {context.minimum_version for context in (made.dials, made.accepts)} == {ssl.TLSVersion.TLSv1_3}
    assert encryption("none", tmp_path / "no", None).dials is None
    assert encryption("auto", tmp_path / "ca.pem", None).accepts is None
    with pytest.raises(OSError, match="no"):
        encryption("tls", tmp_path / "no", None)
