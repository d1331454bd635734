"""The file of the operator's own key: made once, whole, for only its user; anything else in it is refused with a sentence.

- The certificates of a run.
- Rights and audit events are compared resource by resource, subresources included.
"""

from __future__ import annotations

import os
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from psjob.process.config import encryption_of
from psjob_operator import keys
from psjob_operator.__main__ import app
from psjob_operator.certificates import certificates
from psjob_operator.cluster.operator_key import KeyFileError, KeySecret, OperatorKey, default_file
from tests.support.rights import Right, granted, unused, used
from tests.support.typed import CliRunner


def loaded(file: Path, secret: KeySecret | None = None) -> OperatorKey:
    made = OperatorKey(file, secret)
    made.load()
    return made


def test_a_missing_file_is_made_for_its_user_alone_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "state" / "psjob" / "key"
    first = loaded(file).questions("run-1")
    assert first is not None and first == loaded(file).questions("run-1") != loaded(file).questions("run-2")
    assert first == keys.mac(bytes.fromhex(file.read_text()), "questions:run-1")
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o077 == 0
    assert os.listdir(file.parent) == ["key"], "nothing half written is left"


def test_operators_that_start_together_have_one_key(tmp_path: Path) -> None:
    file, found, gate = tmp_path / "key", list[bytes | None](), threading.Barrier(8)

    def start() -> None:
        gate.wait()
        found.append(loaded(file).questions("run"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1 and os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize("content", [b"", b"abc", b"00" * 31, b"00" * 33, b"zz" * 32, b"\xff" * 64], ids=repr)
def test_what_is_no_key_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(KeyFileError, match=r"--key-file .*/key does not hold 64 hex digits; remove it"):
        loaded(file)
    assert file.read_bytes() == content


def test_a_place_that_takes_no_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "key", tmp_path):
        with pytest.raises(KeyFileError, match=f"--key-file {place} cannot be (made|read): "):
            loaded(place)


def test_a_file_that_is_mounted_from_a_secret_is_never_made(tmp_path: Path) -> None:
    waiting = loaded(tmp_path / "key", KeySecret("home", "own"))
    assert waiting.questions("run") is None and str(tmp_path / "key") in waiting.problem and not os.listdir(tmp_path)


def test_without_a_name_it_lies_among_the_users_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_file() == tmp_path / "psjob-operator" / "key"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_file() == Path("/home/me/.local/state/psjob-operator/key")


@pytest.mark.parametrize(("options", "sentence"), [
    (["--key-secret=own", "--lease-namespace=home"], "--key-secret own: give --key-file too, where the Secret is mounted"),
    (["--key-secret=own", "--key-file=/k"], "--key-secret own: give --lease-namespace too;"),
], ids=["no file", "no namespace"])  # fmt: skip
def test_options_that_lack_another_are_refused(options: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["run", *options])
    assert done.exit_code == 2 and sentence in done.output


def test_each_shard_has_a_certificate_of_its_own_name_that_only_its_runs_authority_signed() -> None:
    run, other = certificates(2), certificates(2)
    assert set(run) == {"ca.pem", "shard-0.pem", "shard-1.pem"}
    assert b"PRIVATE" not in run["ca.pem"], "nobody can sign with it again"
    assert len(set(run.values()) | set(other.values())) == 6
    for index in range(2):
        certificate = x509.load_pem_x509_certificate(run[f"shard-{index}.pem"])
        assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
        for name, authority, right in ((f"shard-{index}", run, True), (f"shard-{1 - index}", run, False), (f"shard-{index}", other, False)):
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
    made = encryption_of("tls", tmp_path / "ca.pem", tmp_path / "shard-0.pem")
    assert made.dials is not None and made.accepts is not None
    assert made.dials.verify_mode is ssl.CERT_REQUIRED and made.dials.check_hostname
    assert {context.minimum_version for context in (made.dials, made.accepts)} == {ssl.TLSVersion.TLSv1_3}
    assert encryption_of("none", tmp_path / "no", None).dials is None
    assert encryption_of("auto", tmp_path / "ca.pem", None).accepts is None
    with pytest.raises(OSError, match="no"):
        encryption_of("tls", tmp_path / "no", None)


RULES = [
    {"apiGroups": ["psjob.dev"], "resources": ["pstrainingjobs/status", "pstrainingjobs/finalizers"], "verbs": ["patch", "update"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},
]
STATUS = {"verb": "patch", "objectRef": {"apiGroup": "psjob.dev", "resource": "pstrainingjobs", "subresource": "status", "name": "j"}}


def test_what_is_granted_and_never_used_is_named() -> None:
    assert used([STATUS, {"verb": "get", "requestURI": "/readyz"}]) == {Right("psjob.dev", "pstrainingjobs/status", "patch")}
    left = unused(RULES, [STATUS])
    assert left == {
        Right("psjob.dev", "pstrainingjobs/status", "update"),
        Right("psjob.dev", "pstrainingjobs/finalizers", "patch"),
        Right("", "pods", "get"),
    }, "update of finalizers is never called"
    assert len(granted(RULES)) == 5
