"""hack/cluster: which Kubernetes it builds, and what a build elsewhere is told of this machine's pip.

- Who waits for whom while the programs of a test cluster are built.
- KUBEBUILDER_ASSETS: what is taken from envtest's folder, what is built beside it, and what is said where it cannot be.
- The stand-in enforcer of hack/cluster: who is selected, what is let in, and what it refuses.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster import build, dockerfile, paths
from hack.cluster.paths import ASSETS, REPO, ClusterError, Part, Unavailable
from hack.cluster.pipsettings import merged
from hack.cluster.policies import Source, compile_policies, ruleset


def minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.removeprefix("v").split(".")[:2])


def test_the_chart_allows_what_is_tested_and_no_older() -> None:
    allowed = yaml.safe_load((REPO / "charts" / "psjob" / "Chart.yaml").read_text())["kubeVersion"]
    found = re.fullmatch(r">=(\d+\.\d+)\.0-0", allowed)
    assert found is not None and minor(paths.pinned()[0]) == minor(found[1])
    assert paths.pinned()[-1] == paths.NEWEST


@pytest.mark.parametrize("version", paths.pinned())
def test_a_pinned_version_has_modules_of_that_version_alone(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSJOB_KUBERNETES", version.removeprefix("v"))
    (plane,) = (part for part in paths.parts("integration") if part.name == "control-plane")
    assert f"gitVersion={version} " in plane.ldflags
    modules = (paths.MODULES / plane.module / "go.mod").read_text()
    assert f"k8s.io/kubernetes {version}" in modules
    assert set(re.findall(r"=> k8s.io/\S+ (\S+)", modules)) == {f"v0.{version.partition('.')[2]}"}


def test_versions_share_what_is_not_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PSJOB_KUBERNETES", raising=False)
    newest = {part.name: part.folder for part in paths.parts()}
    monkeypatch.setenv("PSJOB_KUBERNETES", paths.pinned()[0])
    oldest = {part.name: part.folder for part in paths.parts()}
    assert {name for name in newest if newest[name] != oldest[name]} == {"control-plane", "node"}


def test_a_version_that_is_not_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSJOB_KUBERNETES", "1.30.1")
    with pytest.raises(ClusterError, match=r"v1\.30\.1 is not pinned .* known: v1\.33\.13, "):
        paths.parts()


def test_a_machine_without_buildah_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"need the commands buildah, mmdebstrap; install them with: python -m hack.cluster deps"):
        dockerfile.check()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="need root"):
        dockerfile.check()


def test_pip_is_told_what_this_machine_s_is(tmp_path: Path) -> None:
    site, user = tmp_path / "site.conf", tmp_path / "user.conf"
    site.write_text("[global]\nindex-url = https://a.example/simple\ncert = /ca.pem\n[list]\nformat = json\n")
    user.write_text("[global]\nindex_url = https://b.example/simple\n[install]\nfind-links =\n  /one\n  /two\n")
    environment = {"PIP_TIMEOUT": "9", "PIP_NO_BINARY": "x", "HOME": "/h"}
    assert merged(environment, [site, tmp_path / "absent.conf", user]) == {
        "index-url": "https://b.example/simple",
        "find-links": "/one /two",
        "cert": "/ca.pem",
        "timeout": "9",
    }
    assert merged({"PIP_INDEX_URL": "https://c.example"}, [site])["index-url"] == "https://c.example"


def test_what_is_compiled_from_c_is_refused_before_the_build_with_the_next_step() -> None:
    runc, etcd = (next(part for part in paths.parts() if part.name == name) for name in ("runc", "etcd"))
    with pytest.raises(Unavailable, match=r"runc is compiled .* libseccomp-dev pkg-config; install them with: python -m hack.cluster deps"):
        build.check_compiler([etcd, runc], ["libseccomp-dev", "nftables", "pkg-config"])
    build.check_compiler([etcd], ["libseccomp-dev"])
    build.check_compiler([etcd, runc], ["nftables"])


def test_parts_of_a_release_are_built_on_demand_alone() -> None:
    of_release = {part.name for part in paths.parts("release")}
    assert of_release == {"registry", "helm3"} and not of_release & {part.name for part in paths.parts()}
    with pytest.raises(ClusterError, match=r"known: .*helm3.*registry"):
        paths.program("helm4")


def test_a_part_that_another_process_builds_is_waited_for_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PSJOB_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "find_go", lambda *words: "go")
    made: list[str] = []
    held, begun = threading.Event(), threading.Event()

    def slow(part: Part, go: str, quiet: bool) -> None:
        made.append(part.name)
        begun.set()
        held.wait(60)
        part.folder.mkdir()

    monkeypatch.setattr(build, "_build_part", slow)
    first = threading.Thread(target=build.build, args=("kwok",))
    first.start()
    assert begun.wait(60)
    second = threading.Thread(target=build.build, args=("kwok",), kwargs={"quiet": True})
    second.start()
    said = ""
    while "\n" not in said:
        held.wait(0.01)
        said += capsys.readouterr().out
    assert said == "another process builds kwok; waiting for it\n"
    held.set()
    first.join(60)
    second.join(60)
    assert made == ["kwok"] and not build.missing("kwok")


def test_the_control_plane_waits_for_no_part_of_real_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSJOB_CACHE", str(tmp_path))
    for part in paths.parts("integration"):
        part.folder.mkdir(parents=True)
    monkeypatch.setattr(build, "_build_part", lambda *words: pytest.fail("nothing is to be built"))
    build.build("integration")
    assert not build.missing("integration") and "node" in build.missing("e2e")


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with envtest's programs, on a machine where nothing is built."""
    folder = tmp_path / "assets"
    folder.mkdir()
    for name in ASSETS:
        (folder / name).touch()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(folder))
    monkeypatch.setenv("PSJOB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PSJOB_KUBERNETES", raising=False)
    return folder


def test_only_what_envtest_lacks_is_built(assets: Path) -> None:
    wanted = {name for part in paths.parts("integration") for name in part.programs}
    assert wanted == {"kube-controller-manager", "kube-scheduler", "kwok"}
    assert [paths.program(name) for name in ASSETS] == [assets / name for name in ASSETS]
    with pytest.raises(ClusterError, match="kube-scheduler is not built yet"):
        paths.program("kube-scheduler")


def test_a_control_plane_that_is_built_is_not_built_again(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBEBUILDER_ASSETS")
    whole = paths.parts("integration")
    for part in whole:
        part.folder.mkdir(parents=True)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets))
    assert paths.parts("integration") == whole and not build.missing("integration")
    assert paths.program("etcd") == assets / "etcd"


def test_a_named_version_is_built(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSJOB_KUBERNETES", paths.pinned()[0])
    assert set(ASSETS) < {name for part in paths.parts("integration") for name in part.programs}


def test_a_folder_that_lacks_a_program_is_refused(assets: Path) -> None:
    (assets / "etcd").unlink()
    with pytest.raises(ClusterError, match=r"KUBEBUILDER_ASSETS=\S+ lacks etcd; name a folder with kube-apiserver, etcd, kubectl"):
        paths.parts()


def test_without_go_the_programs_that_are_lacking_are_named(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *words, **more: None)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path != Path("/usr/local/go/bin/go") and exists(path))
    with pytest.raises(Unavailable, match=r"beside them \(kube-controller-manager, kube-scheduler, kwok\) is built .* no go command"):
        build.build("integration")


NAMESPACES = [{"metadata": {"name": name, "labels": {"team": name, "kubernetes.io/metadata.name": name}}} for name in ("a", "b")]


def pod(name: str, address: str, namespace: str = "a", phase: str = "Running", spec: dict[str, Any] | None = None) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "labels": {"app": name}}
    return {"metadata": metadata, "spec": spec or {}, "status": {"phase": phase, "podIP": address}}


PODS = [pod("web", "10.0.0.1"), pod("db", "10.0.0.2"), pod("web", "10.0.0.3", "b"), pod("job", "10.0.0.1", phase="Succeeded")]


def policy(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": "a"}, "spec": {"podSelector": {"matchLabels": {"app": "db"}}, **spec}}


def sources(peer: dict[str, Any]) -> Source:
    made = compile_policies([policy(ingress=[{"from": [peer]}])], PODS, NAMESPACES)
    assert not made.refused and made.isolated == ("10.0.0.2",)
    (rule,) = made.rules
    assert rule.to == ("10.0.0.2",) and rule.ports is None
    return rule.source


@pytest.mark.parametrize(
    ("peer", "addresses"),
    [
        ({"podSelector": {"matchLabels": {"app": "web"}}}, ("10.0.0.1",)),
        ({"podSelector": {}}, ("10.0.0.1", "10.0.0.2")),
        ({"namespaceSelector": {"matchLabels": {"team": "b"}}}, ("10.0.0.3",)),
        ({"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "web"}}}, ("10.0.0.1", "10.0.0.3")),
        ({"namespaceSelector": {"matchLabels": {"team": "c"}}}, ()),
        ({"podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["db"]}]}}, ("10.0.0.2",)),
        ({"podSelector": {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["db"]}]}}, ("10.0.0.1",)),
        ({"podSelector": {"matchExpressions": [{"key": "x", "operator": "Exists"}]}}, ()),
        ({"podSelector": {"matchExpressions": [{"key": "x", "operator": "DoesNotExist"}]}}, ("10.0.0.1", "10.0.0.2")),
    ],
)
def test_a_peer_is_the_pods_that_it_selects(peer: dict[str, Any], addresses: tuple[str, ...]) -> None:
    assert sources(peer).within == addresses


def test_ranges_ports_and_the_policy_without_a_rule() -> None:
    assert sources({"ipBlock": {"cidr": "10.1.0.0/16", "except": ["10.1.2.0/24"]}}) == Source(("10.1.0.0/16",), ("10.1.2.0/24",))
    ports = [{"port": 80}, {"port": 90, "endPort": 95, "protocol": "UDP"}, {"protocol": "SCTP"}]
    (rule,) = compile_policies([policy(ingress=[{"ports": ports}])], PODS, NAMESPACES).rules
    assert rule.ports == ("tcp dport 80", "udp dport 90-95", "ip protocol sctp") and rule.source == Source(None)
    nothing = compile_policies([policy()], PODS, NAMESPACES)
    assert nothing.isolated == ("10.0.0.2",) and not nothing.rules
    assert not compile_policies([], PODS, NAMESPACES).isolated


def test_pods_that_have_ended_and_pods_of_the_nodes_network_have_no_address_of_their_own() -> None:
    pods = [pod("db", "10.0.0.9", phase="Failed"), pod("db", "10.243.0.11", spec={"hostNetwork": True}), pod("db", "")]
    assert not compile_policies([policy()], pods, NAMESPACES).isolated


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"policyTypes": ["Ingress", "Egress"]}, "Egress"),
        ({"egress": [{}]}, "Egress"),
        ({"ingress": [{"ports": [{"port": "http"}]}]}, "spec.ingress[0].ports.port: http"),
        ({"ingress": [{"from": [{"ipBlock": {"cidr": "fd00::/8"}}]}]}, "only IPv4"),
        ({"ingress": [{"from": [{"serviceSelector": {}}]}]}, "serviceSelector"),
        ({"priority": 7}, "spec: priority"),
        ({"podSelector": {"matchExpressions": [{"key": "app", "operator": "Like"}]}}, "operator Like"),
    ],
)
def test_what_it_does_not_understand_is_refused_by_its_field_and_lets_nothing_in(spec: dict[str, Any], field: str) -> None:
    made = compile_policies([policy(**spec)], PODS, NAMESPACES)
    assert field in made.refused["a", "p"]
    assert "10.0.0.2" in made.isolated and not made.rules


def test_the_rules_replace_those_before_and_say_that_they_are_a_stand_in() -> None:
    text = ruleset(
        compile_policies([policy(ingress=[{"from": [{"podSelector": {}}], "ports": [{"port": 80}]}])], PODS, NAMESPACES), "10.9.0.0/24"
    )
    assert text.startswith("table ip psjob_policies_stand_in {}\ndelete table ip psjob_policies_stand_in\n")
    chain = text.partition("chain forward {")[2]
    words = [
        "ip saddr 10.9.0.0/24 accept",
        "ip daddr != @isolated accept",
        "ip daddr @to0 ip saddr @from0 tcp dport 80 accept",
        "counter drop",
    ]
    assert [chain.index(word) for word in words] == sorted(chain.index(word) for word in words)
