"""The chart as text: strict values, restricted pods, exactly the rights the operator uses, the same bytes twice."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from psjob_operator.api.template import FOLDER
from psjob_operator.render.inject import SOURCE, inject

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "psjob"
HELM = shutil.which("helm", path=f"{ROOT / '.venv' / 'bin'}:/usr/local/bin:/usr/bin")
CRD = "pstrainingjobs.psjob.dev"

if HELM is None:
    pytest.skip("helm is neither in .venv/bin nor on PATH: `make install` brings it on Linux", allow_module_level=True)


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HELM), *args], capture_output=True, text=True, timeout=60)


def template(*settings: str, files: tuple[str, ...] = ()) -> str:
    flags = [part for setting in settings for part in ("--set-json", setting)] + [part for file in files for part in ("-f", file)]
    answer = helm("template", "x", str(CHART), "-n", "home", *flags)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def objects(*settings: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(template(*settings)) if document]


def of_kind(kind: str, *settings: str) -> list[dict[str, Any]]:
    return [document for document in objects(*settings) if document["kind"] == kind]


def deployment(*settings: str) -> dict[str, Any]:
    (found,) = of_kind("Deployment", *settings)
    return found


def test_strict_lint_holds() -> None:
    answer = helm("lint", "--strict", str(CHART))
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_two_renders_are_the_same_bytes() -> None:
    assert template() == template()


def test_no_hooks_and_nothing_that_asks_the_cluster() -> None:
    sources = "".join(path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())
    assert "helm.sh/hook" not in sources
    for word in ("randAlpha", "genCA", "genSigned", "now ", "lookup "):
        assert "{{ " + word not in sources and "{{- " + word not in sources, word


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("noSuchKey=1", "noSuchKey"),
        ("image.noSuchKey=1", "noSuchKey"),
        ("crds.noSuchKey=1", "noSuchKey"),
        ("rbac.noSuchKey=1", "noSuchKey"),
        ("serviceAccount.noSuchKey=1", "noSuchKey"),
        ('image.pullPolicy="Sometimes"', "pullPolicy"),
        ('image.digest="latest"', "digest"),
        ('image.repository=""', "repository"),
        ('logLevel="loud"', "logLevel"),
        ('watchNamespaces="team-a"', "watchNamespaces"),
        ('watchNamespaces=["team-a","team-a"]', "watchNamespaces"),
        ('watchNamespaces=["Team_A"]', "watchNamespaces"),
        ('crds.keep="yes"', "keep"),
        ('commonLabels={"app.kubernetes.io/name":"other"}', "commonLabels"),
        ('podLabels={"app.kubernetes.io/name":"other"}', "podLabels"),
        ('extraEnv=[{"value":"x"}]', "extraEnv"),
    ],
)
def test_a_wrong_value_is_refused_by_name(setting: str, names: str) -> None:
    answer = helm("template", "x", str(CHART), "--set-json", setting)
    assert answer.returncode != 0
    assert names in answer.stderr


def test_values_and_schema_name_the_same_keys_and_describe_each() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["$schema"].startswith("http://json-schema.org/draft-07/")

    def compare(value: dict[str, Any], node: dict[str, Any], path: str) -> None:
        assert node["additionalProperties"] is False, path
        assert set(value) | {"global"} == set(node["properties"]) | {"global"}, path
        for key, child in node["properties"].items():
            assert child.get("description"), f"{path}{key}"
            if "properties" in child and key in value and key != "resources":
                compare(value[key], child, f"{path}{key}.")

    compare(values, schema, "")


OTHER_VALUES = {
    "nameOverride": '"other"',
    "fullnameOverride": '"other"',
    "commonLabels": '{"team":"a"}',
    "commonAnnotations": '{"team":"a"}',
    "image.registry": '"registry.example"',
    "image.repository": '"other"',
    "image.tag": '"9"',
    "image.digest": f'"sha256:{"a" * 64}"',
    "image.pullPolicy": '"Never"',
    "imagePullSecrets": '[{"name":"pull"}]',
    "runtimeImage.registry": '"registry.example"',
    "runtimeImage.repository": '"other"',
    "runtimeImage.tag": '"9"',
    "runtimeImage.digest": f'"sha256:{"b" * 64}"',
    "crds.enabled": "false",
    "crds.keep": "false",
    "watchNamespaces": '["a"]',
    "serviceAccount.create": "false",
    "serviceAccount.name": '"other"',
    "serviceAccount.annotations": '{"team":"a"}',
    "rbac.create": "false",
    "rbac.aggregateClusterRoles": "false",
    "rbac.extraRules": '[{"apiGroups":["x"],"resources":["y"],"verbs":["get"]}]',
    "logLevel": '"debug"',
    "logFormat": '"text"',
    "turns": "3",
    "qps": "50.5",
    "resources": '{"requests":{"cpu":"1"}}',
    "podLabels": '{"team":"a"}',
    "podAnnotations": '{"team":"a"}',
    "podSecurityContext": '{"runAsUser":1}',
    "securityContext": '{"runAsUser":1}',
    "nodeSelector": '{"disk":"ssd"}',
    "tolerations": '[{"operator":"Exists"}]',
    "affinity": '{"nodeAffinity":{}}',
    "priorityClassName": '"high"',
    "extraEnv": '[{"name":"A","value":"b"}]',
    "extraArgs": '["--debug"]',
    "extraVolumes": '[{"name":"v","emptyDir":{}}]',
    "extraVolumeMounts": '[{"name":"tmp","mountPath":"/v"}]',
}


def test_every_value_does_something() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    nested = {"image", "runtimeImage", "crds", "serviceAccount", "rbac"}
    leaves = {f"{key}.{part}" for key in nested for part in values[key]} | (set(values) - nested)
    assert leaves == set(OTHER_VALUES)
    plain = template()
    for key, other in OTHER_VALUES.items():
        assert template(f"{key}={other}") != plain, f"{key} changes nothing"


def test_the_readme_tells_every_value_and_its_default() -> None:
    text = (CHART / "README.md").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for key in OTHER_VALUES:
        top, _, part = key.partition(".")
        default = values[top][part] if part else values[top]
        assert f"| `{key}` | `{json.dumps(default)}` |" in text, key


def test_the_crd_is_the_generated_one_and_stays() -> None:
    (crd,) = of_kind("CustomResourceDefinition")
    assert crd["metadata"]["name"] == CRD
    assert crd["metadata"]["annotations"].pop("helm.sh/resource-policy") == "keep"
    source = yaml.safe_load((ROOT / "crds" / "psjob.dev_pstrainingjobs.yaml").read_text())
    assert crd["spec"] == source["spec"]
    (unkept,) = of_kind("CustomResourceDefinition", "crds.keep=false")
    assert "helm.sh/resource-policy" not in unkept["metadata"].get("annotations", {})
    assert not of_kind("CustomResourceDefinition", "crds.enabled=false")


def test_no_link_leaves_the_chart() -> None:
    assert not [path for path in CHART.rglob("*") if path.is_symlink()]


JOB_RIGHTS = {
    ("psjob.dev", "pstrainingjobs"): {"get", "list", "watch", "delete"},
    ("psjob.dev", "pstrainingjobs/status"): {"patch"},
    ("psjob.dev", "pstrainingjobs/finalizers"): {"update"},
    ("", "pods"): {"create", "delete", "get", "list", "watch"},
    ("", "services"): {"create", "get", "list", "watch", "patch"},
    ("", "configmaps"): {"create", "get", "list", "watch", "patch"},
    ("", "persistentvolumeclaims"): {"create", "get", "list", "watch"},
    ("", "events"): {"list"},
    ("events.k8s.io", "events"): {"create"},
}
CLUSTER_RIGHTS = {("", "nodes"): {"get"}}


def rights(role: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                assert (group, resource) not in found
                found[group, resource] = set(rule["verbs"])
    return found


def test_the_cluster_role_is_exact() -> None:
    (role,) = [role for role in of_kind("ClusterRole") if role["metadata"]["name"] == "home:x-psjob"]
    assert rights(role) == JOB_RIGHTS | CLUSTER_RIGHTS


def test_watched_namespaces_get_roles_and_nothing_cluster_wide() -> None:
    setting = 'watchNamespaces=["a","b"]'
    found = objects(setting, "crds.enabled=false")
    assert {document["kind"] for document in found} == {"ServiceAccount", "Role", "RoleBinding", "Deployment"}
    roles = [document for document in found if document["kind"] == "Role"]
    assert {role["metadata"]["namespace"] for role in roles} == {"a", "b"}
    assert all(rights(role) == JOB_RIGHTS for role in roles)
    for binding in (document for document in found if document["kind"] == "RoleBinding"):
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "x-psjob", "namespace": "home"}]
    args = deployment(setting)["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--namespace=a", "--namespace=b"} <= set(args)


def test_no_wildcard_anywhere() -> None:
    for role in of_kind("ClusterRole"):
        assert "*" not in json.dumps(role["rules"])


def test_users_of_the_built_in_roles_reach_jobs_but_never_write_status() -> None:
    roles = {role["metadata"]["name"]: role for role in of_kind("ClusterRole")}
    view, edit = roles["home:x-psjob-view"], roles["home:x-psjob-edit"]
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit["metadata"]["labels"]
    assert {resource for _, resource in rights(edit)} == {"pstrainingjobs"}


def test_the_operator_pod_meets_the_restricted_level() -> None:
    spec = deployment()["spec"]["template"]["spec"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    pod = spec["securityContext"]
    assert pod["runAsNonRoot"] is True and pod["runAsUser"] > 0 and pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert all(set(volume) <= {"name", "emptyDir"} for volume in spec["volumes"])
    (container,) = spec["containers"]
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False and context["capabilities"]["drop"] == ["ALL"]
    assert context["readOnlyRootFilesystem"] is True
    assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]


def test_one_replica_is_replaced_never_doubled() -> None:
    spec = deployment()["spec"]
    assert spec["replicas"] == 1 and spec["strategy"] == {"type": "Recreate"}


def test_pod_labels_do_not_change_with_the_chart_version() -> None:
    template = deployment()["spec"]["template"]["metadata"]["labels"]
    assert "helm.sh/chart" not in template and "app.kubernetes.io/version" not in template
    assert deployment()["spec"]["selector"]["matchLabels"].items() <= template.items()


def test_digest_beats_tag_and_the_default_tag_is_the_app_version() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    container = deployment()["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == f"psjob-operator:{version}"
    assert f"--runtime-image=psjob-runtime:{version}" in container["args"]
    digest = "sha256:" + "c" * 64
    exact = deployment(f'image={{"registry":"r.example","repository":"o","tag":"1","digest":"{digest}"}}')
    assert exact["spec"]["template"]["spec"]["containers"][0]["image"] == f"r.example/o@{digest}"


def test_the_chart_and_both_distributions_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    versions = {tomllib.loads((ROOT / part / "pyproject.toml").read_text())["project"]["version"] for part in ("operator", "runtime")}
    assert {chart["version"], chart["appVersion"]} == versions


def test_the_runtime_image_lies_where_the_init_container_looks() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stage = text[text.index("FROM scratch AS runtime") : text.index("AS operator")]
    assert f"COPY --from=layout {SOURCE} {SOURCE}\n" in stage
    pod: dict[str, Any] = {}
    container: dict[str, Any] = {"command": ["python", "train.py"]}
    inject(pod, container, "r")
    (copier,) = pod["initContainers"]
    assert copier["command"][0] == f"{SOURCE}/bin/busybox" and f"cp /bin/busybox {copier['command'][0]}" in text
    assert container["command"][0] == f"{FOLDER}/bin/sh" and f"ln -s busybox {SOURCE}/bin/sh" in text
    assert f"PYTHONPATH={FOLDER}/lib$" in container["command"][2] and f"runtime/src/psjob {SOURCE}/lib/psjob" in text


def test_the_notes_warn_where_jobs_could_be_lost() -> None:
    def notes(*settings: str) -> str:
        flags = [part for setting in settings for part in ("--set-json", setting)]
        answer = helm("install", "x", str(CHART), "-n", "home", "--dry-run=client", *flags)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.split("NOTES:")[1]

    assert "WARNING" not in notes()
    assert "WARNING" in notes("crds.keep=false")
    assert "must be installed by someone else" in notes("crds.enabled=false")
