"""The chart as text: strict values, restricted pods, exactly the rights the operator uses, the same bytes twice."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import promql_parser
import pytest
import yaml

from psjob_operator.api.template import FOLDER
from psjob_operator.cluster.metrics import METRICS, Metric
from psjob_operator.render.pod import SOURCE, inject
from tests.support.chart import ALL_SEEN, CHART, HELM, ROOT, SEEN, deployment, helm, objects, of_kind, render, template

CRD = "pstrainingjobs.psjob.dev"

if HELM is None:
    pytest.skip("helm is neither in .venv/bin nor on PATH: `make install` brings it on Linux", allow_module_level=True)


def test_strict_lint_holds() -> None:
    answer = helm("lint", "--strict", str(CHART))
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_two_renders_are_the_same_bytes() -> None:
    assert render() == render()


def test_no_hook_but_helm_tests_own_and_nothing_that_asks_the_cluster() -> None:
    sources = "".join(path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())
    hooks = [document["metadata"] for document in objects() if "helm.sh/hook" in document["metadata"].get("annotations", {})]
    assert [(found["name"], found["annotations"]["helm.sh/hook"]) for found in hooks] == [("x-psjob-test", "test")]
    assert sources.count("helm.sh/hook:") == 1
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
        ('jobPolicy="privileged"', "jobPolicy"),
        ('watchNamespaces="team-a"', "watchNamespaces"),
        ('watchNamespaces=["team-a","team-a"]', "watchNamespaces"),
        ('watchNamespaces=["Team_A"]', "watchNamespaces"),
        ('excludeNamespaces="kube-system"', "excludeNamespaces"),
        ('excludeNamespaces=["Kube_System"]', "excludeNamespaces"),
        ('crds.keep="yes"', "keep"),
        ('commonLabels={"app.kubernetes.io/name":"other"}', "commonLabels"),
        ('podLabels={"app.kubernetes.io/name":"other"}', "podLabels"),
        ('extraEnv=[{"value":"x"}]', "extraEnv"),
        ('networkPolicy.statusFrom=[{"cidr":"192.0.2.0/28"}]', "statusFrom"),
        ("networkPolicy.statusFrom=[{}]", "statusFrom"),
        ("replicas=-1", "replicas"),
        ("leaderElection.noSuchKey=1", "noSuchKey"),
        ("leaderElection.enabled=false", "replicas"),
        ("metrics.noSuchKey=1", "noSuchKey"),
        ("metrics.service.noSuchKey=1", "noSuchKey"),
        ('metrics.podMonitor.interval="often"', "interval"),
        ("metrics.prometheusRule.apiErrorShare=2", "apiErrorShare"),
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
    "namespaceOverride": '"other"',
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
    "shardUser": "1000660000",
    "crds.enabled": "false",
    "crds.keep": "false",
    "crds.annotations": '{"wave":"-2"}',
    "watchNamespaces": '["a"]',
    "serviceAccount.create": "false",
    "serviceAccount.name": '"other"',
    "serviceAccount.annotations": '{"team":"a"}',
    "rbac.create": "false",
    "rbac.aggregateClusterRoles": "false",
    "rbac.extraRules": '[{"apiGroups":["x"],"resources":["y"],"verbs":["get"]}]',
    "jobPolicy": '"restricted"',
    "excludeNamespaces": "[]",
    "mesh.encrypts": "true",
    "networkPolicy.enabled": "false",
    "networkPolicy.statusFrom": '[{"ipBlock":{"cidr":"192.0.2.0/28"}}]',
    "logLevel": '"debug"',
    "logFormat": '"text"',
    "logTails": "false",
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
    "topologySpreadConstraints": '[{"maxSkew":2}]',
    "networkPolicy.operator": "false",
    "replicas": "3",
    "leaderElection.enabled": "false",
    "podDisruptionBudget.enabled": "false",
    "priorityClassName": '"high"',
    "hostNetwork": "true",
    "dnsPolicy": '"Default"',
    "extraObjects": '[{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"x"}}]',
    "extraEnv": '[{"name":"A","value":"b"}]',
    "extraArgs": '["--debug"]',
    "extraVolumes": '[{"name":"v","emptyDir":{}}]',
    "extraVolumeMounts": '[{"name":"tmp","mountPath":"/v"}]',
}


OF_SEEN = {
    "metrics.service.port": "9090",
    "metrics.service.annotations": '{"prometheus.io/scrape":"true"}',
    "metrics.podMonitor.interval": '"1m"',
    "metrics.podMonitor.labels": '{"release":"p"}',
    "metrics.serviceMonitor.interval": '"1m30s"',
    "metrics.serviceMonitor.labels": '{"release":"p"}',
    "networkPolicy.operatorFrom": '[{"podSelector":{}}]',
    "metrics.prometheusRule.runbookUrl": '""',
    "metrics.prometheusRule.labels": '{"release":"p"}',
    "metrics.prometheusRule.checkpointAgeSeconds": "60",
    "metrics.prometheusRule.restartsPerHour": "3",
    "metrics.prometheusRule.interruptedSeconds": "300",
    "metrics.prometheusRule.queueSeconds": "20",
    "metrics.prometheusRule.apiErrorShare": "0.5",
    "metrics.dashboard.labels": '{"dashboards":"yes"}',
    "metrics.dashboard.annotations": '{"folder":"ml"}',
}
"""Values that do something where metrics are seen."""


def test_every_value_is_read() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    nested = {"image", "runtimeImage", "crds", "serviceAccount", "rbac", "leaderElection", "podDisruptionBudget", "mesh", "networkPolicy"}
    leaves = {f"{key}.{part}" for key in nested for part in values[key]} | (set(values) - nested - {"metrics"})
    leaves |= {f"metrics.{part}.{key}" for part, keys in values["metrics"].items() for key in keys}
    assert leaves == set(OTHER_VALUES) | set(SEEN) | set(OF_SEEN)
    sources = "".join(path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())
    assert [leaf for leaf in leaves if f".{leaf.rpartition('.')[2]}" not in sources] == []


@pytest.mark.rotating
def test_every_value_does_something() -> None:
    plain, seen = template(), template(*ALL_SEEN)
    for key, other in (OTHER_VALUES | SEEN).items():
        also = ["replicas=1"] if key == "leaderElection.enabled" else []
        assert template(f"{key}={other}", *also) != (template(*also) if also else plain), f"{key} changes nothing"
    for key, other in OF_SEEN.items():
        assert template(*ALL_SEEN, f"{key}={other}") != seen, f"{key} changes nothing"


def test_metrics_are_off_by_value_and_each_part_comes_alone() -> None:
    usual = {document["kind"] for document in objects()}
    kinds = {
        "service": {"Service"},
        "podMonitor": {"PodMonitor"},
        "serviceMonitor": {"Service", "ServiceMonitor"},
        "prometheusRule": {"PrometheusRule"},
        "dashboard": {"ConfigMap"},
    }
    for part, more in kinds.items():
        found = {document["kind"] for document in objects(f"metrics.{part}.enabled=true")}
        assert found - usual == more and not usual & more, part


def test_monitors_reach_the_operators_port_and_keep_the_jobs_labels() -> None:
    (service,), (pods,), (services,) = (of_kind(kind, *ALL_SEEN) for kind in ("Service", "PodMonitor", "ServiceMonitor"))
    labels = deployment()["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for port in deployment()["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert service["spec"]["selector"].items() <= labels.items() and pods["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert services["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,), (scraped,) = pods["spec"]["podMetricsEndpoints"], services["spec"]["endpoints"]
    assert endpoint["port"] in ports and service["spec"]["ports"][0]["targetPort"] in ports
    assert scraped["port"] == service["spec"]["ports"][0]["name"]
    for one in (endpoint, scraped):
        assert one["path"] == "/metrics" and one["honorLabels"] is True, "else Prometheus calls them exported_job and exported_namespace"


def test_the_dashboard_is_json_for_the_sidecar() -> None:
    (found,) = of_kind("ConfigMap", "metrics.dashboard.enabled=true")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    board = json.loads(found["data"]["psjob.json"])
    numbers = [panel["id"] for panel in board["panels"]]
    assert board["uid"] == "psjob" and len(numbers) == len(set(numbers)) > 20
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(places) == len(set(places)) and all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in board["panels"])


class Asked:
    """The names and labels that expressions of Prometheus ask for, and the durations that they look back."""

    def __init__(self) -> None:
        self.selectors: list[tuple[str, set[str]]] = []

    def look(self, text: str) -> None:
        for variable, stands_for in (("$__rate_interval", "5m"), ("$__range", "1h")):
            text = text.replace(variable, stands_for)
        self._walk(promql_parser.parse(text))

    def _walk(self, node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            self.selectors.append((node.name, {matcher.name for matcher in node.matchers.matchers}))
        for part in ("expr", "lhs", "rhs", "vector_selector", "vs", "param"):
            inner = getattr(node, part, None)
            if isinstance(inner, promql_parser.Expr):
                self._walk(inner)
        for inner in getattr(node, "args", None) or ():
            self._walk(inner)


FOREIGN = {"process_cpu_seconds_total", "process_resident_memory_bytes"}


def known(name: str) -> Metric | None:
    """The metric whose series has this name."""
    for metric in METRICS:
        if name == metric.name or (metric.kind == "histogram" and re.fullmatch(f"{metric.name}_(bucket|sum|count)", name)):
            return metric
    return None


def assert_exposed(asked: Asked, where: str) -> None:
    assert asked.selectors, where
    for name, labels in asked.selectors:
        metric = known(name)
        assert metric is not None or name in FOREIGN, f"{where} names {name}, which the operator does not expose"
        assert metric is None or metric.kind != "histogram" or name != metric.name, f"{where}: {name} is a histogram"
        assert metric is None or labels <= {*metric.labels, "le"}, f"{where}: {name} has no label {labels}"


def test_alerts_ask_for_what_the_operator_exposes() -> None:
    (found,) = of_kind("PrometheusRule", *ALL_SEEN)
    rules = [rule for group in found["spec"]["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 8
    for rule in rules:
        asked = Asked()
        asked.look(rule["expr"])
        assert_exposed(asked, rule["alert"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        for text in rule["annotations"].values():
            used = set(re.findall(r"\$labels\.(\w+)", text))
            assert all(used <= {*(known(name) or METRICS[0]).labels} for name, _ in asked.selectors), f"{rule['alert']}: {text}"
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert all(f"`{rule['alert']}`" in page for rule in rules), "docs/metrics.md tells what to do about each alert"


def test_the_dashboard_asks_for_what_the_operator_exposes() -> None:
    board = json.loads((CHART / "dashboards" / "psjob.json").read_text())
    shown: set[str] = set()
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            asked = Asked()
            asked.look(target["expr"])
            assert_exposed(asked, panel["title"])
            shown |= {metric.name for name, _ in asked.selectors if (metric := known(name)) is not None}
    for variable in board["templating"]["list"][1:]:
        name = re.match(r"label_values\((\w+)", variable["query"]["query"])
        assert name is not None and known(name[1]) is not None
    unseen = {metric.name for metric in METRICS} - shown
    assert unseen <= UNSEEN, f"the dashboard leaves out {unseen - UNSEEN}"


UNSEEN = {
    "psjob_operator_info", "psjob_operator_ready", "psjob_operator_watch_events_total", "psjob_job_phase", "psjob_job_shards",
    "psjob_job_shards_ready", "psjob_job_failures_counted", "psjob_job_checkpoint_step", "psjob_job_checkpoint_bytes",
    "psjob_job_progress_age_seconds", "psjob_job_completion_time_seconds", "psjob_job_checkpoint_interval_seconds", "psjob_job_contended",
    "psjob_operator_namespace_refused",
}  # fmt: skip


def test_an_expression_that_names_nothing_is_found() -> None:
    for text in (
        "sum(rate(psjob_no_such_total[5m]))",
        'psjob_jobs{color="red"}',
        "psjob_recovery_seconds > 3",
        "absent(psjob_nothing == 1)",
    ):
        asked = Asked()
        asked.look(text)
        with pytest.raises(AssertionError):
            assert_exposed(asked, "this")


def test_the_readme_tells_every_value_and_its_default() -> None:
    text = (CHART / "README.md").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for key in (*OTHER_VALUES, *SEEN, *OF_SEEN):
        default = values
        for part in key.split("."):
            default = default[part]
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
    ("", "secrets"): {"create"},
    ("", "persistentvolumeclaims"): {"create", "get", "list", "watch"},
    ("", "events"): {"list"},
    ("", "limitranges"): {"list"},
    ("networking.k8s.io", "networkpolicies"): {"create", "get", "list", "watch", "patch"},
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


def test_the_operators_key_is_mounted_and_never_rendered() -> None:
    spec = deployment()["spec"]["template"]["spec"]
    (volume,) = [volume for volume in spec["volumes"] if "secret" in volume]
    assert volume == {"name": "key", "secret": {"secretName": "x-psjob-key", "optional": True}}
    (container,) = spec["containers"]
    assert {"name": "key", "mountPath": "/etc/psjob-operator", "readOnly": True} in container["volumeMounts"]
    assert {"--key-file=/etc/psjob-operator/key", "--key-secret=x-psjob-key"} <= set(container["args"])
    assert not of_kind("Secret")
    named = {role["metadata"]["name"]: role for role in of_kind("Role", 'watchNamespaces=["a"]', "crds.enabled=false")}
    assert named["x-psjob-key"]["metadata"]["namespace"] == "home"
    assert rights(named["x-psjob-key"]) == {("", "secrets"): {"create"}}


def test_watched_namespaces_get_roles_and_nothing_cluster_wide() -> None:
    setting = 'watchNamespaces=["a","b"]'
    found = objects(setting, "crds.enabled=false")
    kinds = {"ServiceAccount", "Role", "RoleBinding", "Deployment", "PodDisruptionBudget", "NetworkPolicy", "Pod"}
    assert {document["kind"] for document in found} == kinds
    (test,) = (document for document in found if document["kind"] == "Pod")
    assert test["spec"]["containers"][0]["args"][-2:] == ["--namespace=a", "--namespace=b"]
    roles = {role["metadata"]["namespace"]: role for role in found if role["kind"] == "Role"}
    assert set(roles) == {"a", "b", "home"}
    assert rights(roles["a"]) == rights(roles["b"]) == JOB_RIGHTS
    for binding in (document for document in found if document["kind"] == "RoleBinding"):
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "x-psjob", "namespace": "home"}]
    args = deployment(setting)["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--namespace=a", "--namespace=b"} <= set(args)


def test_the_job_policy_judges_jobs_at_create_and_update_and_fails_closed() -> None:
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    (policy, pins), (binding, pinning) = (of_kind(kind, "excludeNamespaces=[]") for kind in kinds)
    assert policy["metadata"]["name"] == binding["metadata"]["name"] == binding["spec"]["policyName"] == "home.x-psjob"
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert rule == {"apiGroups": ["psjob.dev"], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"], "resources": ["pstrainingjobs"]}
    assert policy["spec"]["failurePolicy"] == "Fail" and binding["spec"]["validationActions"] == ["Deny"]
    assert "matchResources" not in binding["spec"], "every namespace"
    assert pins["metadata"]["name"] == pinning["metadata"]["name"] == pinning["spec"]["policyName"] == "home.x-psjob.status"
    (rule,) = pins["spec"]["matchConstraints"]["resourceRules"]
    assert rule == {"apiGroups": ["psjob.dev"], "apiVersions": ["*"], "operations": ["UPDATE"], "resources": ["pstrainingjobs/status"]}
    assert pins["spec"]["failurePolicy"] == "Fail" and pinning["spec"]["validationActions"] == ["Deny"]
    assert all(it["reason"] == "Forbidden" and it["messageExpression"] for it in policy["spec"]["validations"])
    for setting in ('jobPolicy="none"', 'watchNamespaces=["a"]'):
        assert not any(of_kind(kind, setting, "excludeNamespaces=[]") for kind in kinds)


def test_kube_system_takes_no_job_where_nobody_says_otherwise() -> None:
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    for settings, names in (((), ["kube-system"]), (('excludeNamespaces=["kube-system","infra"]',), ["kube-system", "infra"])):
        (policy,), (binding,) = (of_kind(kind, 'jobPolicy="none"', *settings) for kind in kinds)
        assert policy["metadata"]["name"] == binding["spec"]["policyName"] == "home.x-psjob.namespaces"
        (selected,) = binding["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"]
        assert selected == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": names}
        assert policy["spec"]["failurePolicy"] == "Fail" and binding["spec"]["validationActions"] == ["Deny"]
    assert not any(of_kind(kind, 'watchNamespaces=["a"]') for kind in kinds)


def test_the_status_port_is_for_the_operators_own_pods_and_whom_values_name() -> None:
    def peers(*settings: str) -> list[dict[str, Any]]:
        args = deployment(*settings)["spec"]["template"]["spec"]["containers"][0]["args"]
        return [json.loads(arg.removeprefix("--network-policy=")) for arg in args if arg.startswith("--network-policy")]

    (own,) = peers()
    assert own["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "home"}}
    assert own["podSelector"]["matchLabels"] == deployment()["spec"]["selector"]["matchLabels"]
    extra = {"ipBlock": {"cidr": "192.0.2.0/28"}}
    assert peers(f"networkPolicy.statusFrom=[{json.dumps(extra)}]") == [own, extra]
    assert peers("networkPolicy.enabled=false") == []
    assert "networkpolicies" in template() and "networkpolicies" not in template("networkPolicy.enabled=false")


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
    assert all(set(volume) <= {"name", "emptyDir", "secret"} for volume in spec["volumes"])
    (container,) = spec["containers"]
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False and context["capabilities"]["drop"] == ["ALL"]
    assert context["readOnlyRootFilesystem"] is True
    assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]


@pytest.mark.parametrize(
    "name", ["podLabels", "podAnnotations", "commonLabels", "commonAnnotations", "serviceAccount.annotations", "crds.annotations",
             "metrics.service.annotations", "metrics.dashboard.annotations"],
)  # fmt: skip
def test_a_map_that_is_null_is_an_empty_one(name: str) -> None:
    """As a key without a value in a parent chart or a GitOps engine's values."""
    rest = ("metrics.service.enabled=true", "metrics.dashboard.enabled=true")
    assert template(f"{name}=null", *rest) == template(*rest)


def test_a_toleration_of_ones_own_takes_the_place_of_the_charts() -> None:
    key = "node.kubernetes.io/not-ready"
    own = {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
    found = deployment(f"tolerations={json.dumps([own])}")["spec"]["template"]["spec"]["tolerations"]
    assert [one for one in found if one["key"] == key] == [own]
    assert [one["tolerationSeconds"] for one in found if one["key"] != key] == [5]


def test_on_the_nodes_network_a_pod_goes_before_the_next_one_comes() -> None:
    assert deployment()["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert deployment("hostNetwork=true")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_one_replica_without_election_is_replaced_never_doubled() -> None:
    settings = ("leaderElection.enabled=false", "replicas=1")
    spec = deployment(*settings)["spec"]
    assert spec["replicas"] == 1 and spec["strategy"] == {"type": "Recreate"}
    assert not [argument for argument in spec["template"]["spec"]["containers"][0]["args"] if "lease" in argument]
    assert not of_kind("Role", *settings) and not of_kind("PodDisruptionBudget", *settings)


def test_two_replicas_by_a_lease_that_they_have_the_right_to() -> None:
    spec = deployment()["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert {"--lease=x-psjob", "--lease-namespace=home"} <= set(spec["template"]["spec"]["containers"][0]["args"])
    (role,) = of_kind("Role")
    assert role["metadata"]["namespace"] == "home"
    assert role["rules"] == [
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": ["x-psjob"], "verbs": ["get", "patch"]},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
    ]
    (binding,) = of_kind("RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "x-psjob", "namespace": "home"}]


def test_replicas_are_on_different_nodes_and_a_drain_takes_one_at_a_time() -> None:
    found = deployment()["spec"]
    labels = found["template"]["metadata"]["labels"]
    spread, zones = found["template"]["spec"]["topologySpreadConstraints"]
    assert (zones["topologyKey"], zones["whenUnsatisfiable"]) == ("topology.kubernetes.io/zone", "ScheduleAnyway")
    assert (spread["topologyKey"], spread["maxSkew"], spread["nodeTaintsPolicy"]) == ("kubernetes.io/hostname", 1, "Honor")
    (budget,) = of_kind("PodDisruptionBudget")
    for selector in (spread["labelSelector"], zones["labelSelector"], budget["spec"]["selector"]):
        assert selector["matchLabels"].items() <= labels.items()
    assert budget["spec"]["maxUnavailable"] == 1
    assert not of_kind("PodDisruptionBudget", "replicas=1"), "a budget of one pod would keep its node from ever being drained"


def test_a_fraction_may_come_by_set_which_makes_it_a_text() -> None:
    settings = {"qps": "0.5", "metrics.prometheusRule.enabled": "true", "metrics.prometheusRule.apiErrorShare": "0.25"}
    answer = helm("template", "x", str(CHART), *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")))
    assert answer.returncode == 0 and "--qps=0.5" in answer.stdout and "> 0.25" in answer.stdout, answer.stderr
    for key, value in (
        ("qps", "fast"),
        ("qps", "0.5.1"),
        *(("metrics.prometheusRule.apiErrorShare", bad) for bad in ("0.0", "1.5", "half")),
    ):
        answer = helm("template", "x", str(CHART), "--set", f"{key}={value}")
        assert answer.returncode != 0 and key.rpartition(".")[2] in answer.stderr, (key, value)


def test_the_operators_port_alone_takes_connections_and_its_start_has_time() -> None:
    (found,) = [it for it in of_kind("NetworkPolicy") if it["spec"]["policyTypes"] == ["Ingress"]]
    assert found["spec"]["ingress"] == [{"ports": [{"port": "health", "protocol": "TCP"}]}]
    (container,) = deployment()["spec"]["template"]["spec"]["containers"]
    start = container["startupProbe"]
    assert start["httpGet"] == container["livenessProbe"]["httpGet"] and start["periodSeconds"] * start["failureThreshold"] >= 60
    assert "initialDelaySeconds" not in container["livenessProbe"]


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


def test_shards_are_whom_openshift_makes_them_there_and_nobody_elsewhere() -> None:
    def user(*flags: str) -> str:
        answer = helm("template", "x", str(CHART), "-n", "home", *flags)
        assert answer.returncode == 0, answer.stderr
        (word,) = re.findall(r"--shard-user=(\S+)", answer.stdout)
        return str(word)

    assert user() == "65532"
    assert user("--api-versions", "security.openshift.io/v1") == "namespace"
    assert user("--api-versions", "security.openshift.io/v1", "--set", "shardUser=1000660000") == "1000660000"
    assert user("--set-json", "shardUser=1000660000") == "1000660000", "as a values file gives it: a number with a fraction, to helm"
    assert user("--set", "shardUser=namespace") == "namespace"
    for wrong in ("0", "root", "-1", "2147483648"):
        assert helm("template", "x", str(CHART), "--set", f"shardUser={wrong}").returncode != 0, wrong


def test_the_chart_and_both_distributions_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    versions = {tomllib.loads((ROOT / part / "pyproject.toml").read_text())["project"]["version"] for part in ("operator", "runtime")}
    assert {chart["version"], chart["appVersion"]} == versions


def test_the_runtime_image_lies_where_the_init_container_looks() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stage = text[text.index("FROM scratch AS runtime") : text.index("AS operator")]
    assert "COPY --from=layout /root.d /\n" in stage
    pod: dict[str, Any] = {}
    container: dict[str, Any] = {"command": ["python", "train.py"]}
    inject(pod, container, "r")
    (copier,) = pod["initContainers"]
    assert copier["command"][0] == f"{SOURCE}/bin/busybox" and f"/root.d /bin/busybox {copier['command'][0]}" in text
    assert container["command"][0] == f"{FOLDER}/bin/sh" and f"ln -s busybox /root.d{SOURCE}/bin/sh" in text
    assert f"PYTHONPATH={FOLDER}/lib$" in container["command"][2] and f"runtime/src/psjob /root.d{SOURCE}/lib/psjob" in text


def test_the_notes_warn_where_jobs_could_be_lost() -> None:
    def notes(*settings: str) -> str:
        flags = [part for setting in settings for part in ("--set-json", setting)]
        answer = helm("install", "x", str(CHART), "-n", "home", "--dry-run=client", *flags)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.split("NOTES:")[1]

    assert "WARNING" not in notes()
    assert "WARNING" in notes("crds.keep=false")
    assert "must be installed by someone else" in notes("crds.enabled=false")
    assert "Without them every replica takes turns" in notes("rbac.create=false")
    unasked = "whoever may create a PSTrainingJob may run any pod"
    assert unasked not in notes() and "jobPolicy is baseline" in notes()
    assert unasked in notes('jobPolicy="none"')
    without = notes('watchNamespaces=["a"]')
    assert unasked in without and "-s templates/jobpolicy.yaml | kubectl apply -f -" in without, "what cannot be checked, and who can help"
