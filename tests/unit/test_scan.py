"""What `make lint` makes of checkov's findings: each is an error or has its exception, and each exception has its finding."""

from __future__ import annotations

from hack.scan.__main__ import Excused, Finding, exceptions, judge

TOKEN = Finding("CKV_K8S_38", "Ensure that Service Account Tokens are only mounted where necessary", "chart.yaml:Deployment.home.x")
EXCUSED = Excused("CKV_K8S_38", "chart*.yaml:Deployment.*", "it calls the API server")


def test_a_finding_without_an_exception_is_named() -> None:
    assert judge([TOKEN], []) == [f"chart.yaml:Deployment.home.x: CKV_K8S_38 {TOKEN.name}"]


def test_an_exception_covers_its_own_check_and_place_alone() -> None:
    assert judge([TOKEN], [EXCUSED]) == []
    elsewhere = Finding(TOKEN.check, TOKEN.name, "job.yaml:Pod.home.x")
    other = Finding("CKV_K8S_16", "Container should not be privileged", TOKEN.place)
    assert len(judge([TOKEN, elsewhere, other], [EXCUSED])) == 2


def test_an_exception_that_excuses_nothing_is_named() -> None:
    (told,) = judge([], [EXCUSED])
    assert told == "hack/scan/exceptions.toml: CKV_K8S_38 at chart*.yaml:Deployment.* excuses nothing; remove it"


def test_every_exception_has_its_reason() -> None:
    assert exceptions() and all(len(exception.reason.split()) >= 5 for exception in exceptions())
