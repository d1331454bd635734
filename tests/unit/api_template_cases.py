"""Pod templates to refuse and to take."""

from __future__ import annotations

from tests.unit.api_manifest import REMOVED, Case, each_refused, refused

POD = "spec.workers.template.spec"
WORKER = f"{POD}.containers.0"
SHARD_POD = "spec.shards.template"
_CLAIM = "spec.checkpoint.volumeClaimTemplate"
_TYPE = "must be of type "
_KEYS = "digits-key-0a1b2c3d-1"
_ONE = [{"name": "worker", "command": ["python"]}]

TEMPLATES_REFUSED: list[Case] = [
    # -- pod templates
    *(Case(f"twice-{at}", {f"{at}": [one, one]}, f"{field}[1]", f"Duplicate value: {words}", server_sentence="Duplicate value: {")
        for at, one, field, words in (
            (f"{WORKER}.env", {"name": "A", "value": "1"}, f"{POD}.containers[0].env", '{"name":"A"}'),
            (f"{WORKER}.volumeMounts", {"name": "v", "mountPath": "/a"}, f"{POD}.containers[0].volumeMounts", '{"mountPath":"/a"}'),
            (f"{POD}.imagePullSecrets", {"name": "s"}, f"{POD}.imagePullSecrets", '{"name":"s"}'),
            (f"{POD}.topologySpreadConstraints", {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
                f"{POD}.topologySpreadConstraints", '{"topologyKey":"zone","whenUnsatisfiable":"DoNotSchedule"}'),
        )),
    *(Case(f"unknown-{at}", {at: value}, field, f'unknown field "{field}"; did you mean {field.rpartition(".")[0]}.{meant}?', server=False)
        for at, value, field, meant in (
            (f"{POD}.tolerationz", [], f"{POD}.tolerationz", "tolerations"),
            (f"{WORKER}.envv", [{"name": "A"}], f"{POD}.containers[0].envv", "env"),
            ("spec.workers.template.metadata", {"annotationz": {}}, "spec.workers.template.metadata.annotationz", "annotations"),
            ("spec.checkpoint.volume", {"persistentVolumeClaims": {}}, "spec.checkpoint.volume.persistentVolumeClaims",
                "persistentVolumeClaim"),
            (_CLAIM, {"spec": {"volumeModes": "Filesystem"}}, f"{_CLAIM}.spec.volumeModes", "volumeMode"),
            (_CLAIM, {"spec": {"dataSource": {"kind": "a", "name": "b", "apigroup": "c"}}}, f"{_CLAIM}.spec.dataSource.apigroup",
                "apiGroup"),
            ("spec.checkpoint.volume", {"nfs": {"server": "a", "path": "/", "readonly": True}}, "spec.checkpoint.volume.nfs.readonly",
                "readOnly"),
            (f"{SHARD_POD}.spec", {"afinity": {}}, f"{SHARD_POD}.spec.afinity", "affinity"),
            (f"{WORKER}.livenessProbe", {"httpGet": {"port": 1, "pth": "/"}}, f"{POD}.containers[0].livenessProbe.httpGet.pth", "path"),
            ("spec.stages", [{"name": "a", "template": {"spec": {"containers": _ONE, "nodeselector": {}}}},
                {"name": "b", "cut": "1", "replicas": 3}], "spec.stages[0].template.spec.nodeselector", "nodeSelector"),
        )),
    Case("unknown-anywhere", {f"{POD}.securityContexts": None, f"{POD}.colour": "red"}, f"{POD}.colour",
        f'unknown field "{POD}.colour"; pods of Kubernetes 1.37 have no such field', server=False),
    *(Case(f"type-{at}", {at: value}, field, sentence, server=False)
        for at, value, field, sentence in (
            (f"{POD}.securityContext", "x", f"{POD}.securityContext", _TYPE + "object"),
            (f"{WORKER}.securityContext", "x", f"{POD}.containers[0].securityContext", _TYPE + "object"),
            (f"{WORKER}.securityContext", {"capabilities": "ALL"}, f"{POD}.containers[0].securityContext.capabilities", _TYPE + "object"),
            (f"{WORKER}.securityContext", {"seccompProfile": "x"}, f"{POD}.containers[0].securityContext.seccompProfile", _TYPE + "object"),
            (f"{SHARD_POD}.spec", {"securityContext": {"runAsUser": "0"}}, f"{SHARD_POD}.spec.securityContext.runAsUser",
                _TYPE + "integer"),
            (f"{POD}.terminationGracePeriodSeconds", "x", f"{POD}.terminationGracePeriodSeconds", _TYPE + "integer"),
            (f"{POD}.terminationGracePeriodSeconds", 1.5, f"{POD}.terminationGracePeriodSeconds", _TYPE + "integer"),
            (f"{POD}.priority", 2**31, f"{POD}.priority", "must be -2147483648..2147483647; it is an int32"),
            (f"{POD}.nodeSelector", {"gpu": True}, f"{POD}.nodeSelector[gpu]", _TYPE + 'string; write it in quotes: "true"'),
            (f"{POD}.tolerations", {}, f"{POD}.tolerations", _TYPE + "array; begin each item with a dash"),
            (f"{WORKER}.resources", {"requests": {"memory": "2 GB"}}, f"{POD}.containers[0].resources.requests[memory]",
                "must be a quantity; "),
            (f"{WORKER}.imagePullPolicy", "always", f"{POD}.containers[0].imagePullPolicy",
                'Unsupported value: "always": supported values: "Always", "IfNotPresent", "Never"; did you mean Always?'),
            (f"{WORKER}.ports", [{"name": "http"}], f"{POD}.containers[0].ports[0].containerPort", "Required value"),
            (f"{WORKER}.ports", [{"containerPort": "http"}], f"{POD}.containers[0].ports[0].containerPort", _TYPE + "integer"),
        )),
    *(refused(f"variable-{name!r}", f"{WORKER}.env", [{"name": name, "value": "1"}],
          "must be printable ASCII without '=', and not empty; ", below="[0].name", server=False)
        for name in ("", "A=B", "A\0", "größe", "A\n")),
    *(Case(f"nul-{at}", {f"{WORKER}.{at}": value}, f"{POD}.containers[0].{path}", "must not hold a NUL character; ", server=False)
        for at, value, path in (
            ("env", [{"name": "A", "value": "a\0"}], "env[0].value"),
            ("command", ["python", "a\0"], "command"),
            ("args", ["\0"], "args"),
        )),
    refused("no-container", f"{POD}.containers", [], "must have at least 1 item", server_sentence="should have at least 1 items"),
    refused("containers-missing", f"{POD}.containers", REMOVED, "Required value", server_sentence="Required value"),
    refused("no-pod-spec", "spec.workers.template", {}, "Required value", below=".spec", server_sentence="Required value"),
    refused("nameless", f"{POD}.containers", [{"command": ["a"]}], "Required value", below="[0].name", server_sentence="Required value"),
    refused("twice", f"{POD}.containers", _ONE * 2, 'Duplicate value: {"name":"worker"}', below="[1]",
        server_sentence='Duplicate value: {"name":"worker"}'),
    refused("no-worker", f"{POD}.containers", [{"name": "a", "command": ["x"]}, {"name": "b"}],
        "must have a container named worker where there are several; "),
    Case("no-command", {f"{WORKER}.command": REMOVED}, f"{POD}.containers",
        "the container worker, or the only one, must have a command; what its image"),
    Case("empty-command", {f"{WORKER}.command": []}, f"{POD}.containers",
        "the container worker, or the only one, must have a command; what its image"),
    refused("command-elsewhere", f"{POD}.containers", [{"name": "worker"}, {"name": "b", "command": ["x"]}],
        "the container worker, or the only one, must have a command; "),
    refused("command-text", f"{WORKER}.command", "python train.py", _TYPE + "array", server_sentence=_TYPE + "array"),
    *each_refused("restart", f"{POD}.restartPolicy", ("Always", "OnFailure", "never", ""),
        "must be Never, or left out; psjob restarts what failed; "),
    Case("container-restart", {f"{WORKER}.restartPolicy": "Always"}, f"{POD}.containers",
        "must not have a restartPolicy other than Never; "),
    *(refused(field_, f"{POD}.{field_}", "x", "must be left out; psjob names its pods") for field_ in ("hostname", "subdomain")),
    refused("dns-default", f"{POD}.dnsPolicy", "Default", "must not be Default; the node's resolver does not know"),
    refused("dns-none", f"{POD}.dnsPolicy", "None", "must not be None without dnsConfig.nameservers; ", server=False),
    Case("host-network", {f"{POD}.hostNetwork": True}, f"{POD}.dnsPolicy", "must be ClusterFirstWithHostNet with hostNetwork: true; "),
    Case("host-dns", {f"{POD}.hostNetwork": True, f"{POD}.dnsPolicy": "ClusterFirst"}, f"{POD}.dnsPolicy",
        "must be ClusterFirstWithHostNet with hostNetwork: true; "),
    refused("host-text", f"{POD}.hostNetwork", "true", _TYPE + "boolean; write it without quotes", server_sentence=_TYPE + "boolean"),
    refused("env", f"{WORKER}.env", [{"name": "A"}, {"name": "PSJOB_ROLE", "value": "x"}],
        "must not begin with PSJOB_; psjob sets those; ", below="[1].name"),
    refused("env-map", f"{WORKER}.env", {"A": "b"}, _TYPE + "array",
        server_sentence='unknown field "spec.workers.template.spec.containers[0].env.A"'),
    refused("env-of-init", f"{POD}.initContainers", [{"name": "get", "env": [{"name": "PSJOB_RUN"}]}], "must not begin with PSJOB_; ",
        below="[0].env[0].name"),
    refused("env-many", f"{WORKER}.env", [{"name": f"A{i}"} for i in range(5000)], "Too many: 5000: must have at most 1000 items",
        server_sentence="Too many: 5000: must have at most 1000 items"),
    refused("volume", f"{POD}.volumes", [{"name": "psjob-lib", "emptyDir": {}}], "must not begin with psjob-; those are psjob's own",
        below="[0].name"),
    refused("container-name", f"{POD}.containers", [{"name": "psjob-x", "command": ["a"]}], "must not begin with psjob-; ",
        below="[0].name"),
    refused("init-name", f"{POD}.initContainers", [{"name": "psjob-runtime"}], "must not begin with psjob-; ", below="[0].name"),
    refused("mount", f"{WORKER}.volumeMounts", [{"name": "v", "mountPath": "/psjob/lib"}],
        "must not be in /psjob, /psjob-keys, /psjob-secret; ", below="[0].mountPath"),
    *(refused(f"mount-{path}", f"{WORKER}.volumeMounts", [{"name": "v", "mountPath": path}],
          "must not be in /psjob, /psjob-keys, /psjob-secret; ", below="[0].mountPath")
        for path in ("/psjob-secret", "/psjob-keys/keys")),
    refused("init-mount", f"{POD}.initContainers", [{"name": "a", "volumeMounts": [{"name": "v", "mountPath": "/psjob-keys"}]}],
        "must not be in /psjob, /psjob-keys, /psjob-secret; ", below="[0].volumeMounts[0].mountPath"),
    *(refused(f"{part}-mounts-{volume}", f"{POD}.{part}", [{**_ONE[0], "volumeMounts": [{"name": volume, "mountPath": "/x"}]}],
          "must not be psjob-keys or psjob-secret; ", below="[0].volumeMounts[0].name", server=False)
        for part, volume in (("containers", "psjob-secret"), ("initContainers", "psjob-keys"))),
    *(refused(f"{part}-of-{at}-read-{volume}", f"{at}.{part}",
          [{**one, "env": [{"name": "K", "valueFrom": {"fileKeyRef": {"volumeName": volume, "path": "keys", "key": "K"}}}]}],
          "must not be psjob-keys or psjob-secret; ", below="[0].env[0].valueFrom.fileKeyRef.volumeName", server=False)
        for at, one in ((POD, _ONE[0]), (f"{SHARD_POD}.spec", {"name": "shard"}))
        for part, volume in (("containers", "psjob-keys"), ("initContainers", "psjob-secret"))),
    *(Case(f"key-by-{name}", {f"{POD}.{at}": value}, "spec.workers.template", "must not name the Secret of a run's keys, ", server=False)
        for name, at, value in (
            ("volume", "volumes", [{"name": "v", "secret": {"secretName": _KEYS}}]),
            ("projection", "volumes", [{"name": "v", "projected": {"sources": [{"secret": {"name": _KEYS}}]}}]),
            ("environment", "containers.0.envFrom", [{"secretRef": {"name": _KEYS}}]),
            ("variable", "containers.0.env", [{"name": "K", "valueFrom": {"secretKeyRef": {"name": _KEYS, "key": "workers"}}}]),
        )),
    Case("key-in-a-shard", {f"{SHARD_POD}.spec.volumes": [{"name": "v", "secret": {"secretName": _KEYS}}]}, SHARD_POD,
        "must not name the Secret of a run's keys, ", server=False),
    refused("key-as-checkpoints", "spec.checkpoint.volume", {"secret": {"secretName": _KEYS}},
        "must not name the Secret of a run's keys, ", server=False),
    refused("label", "spec.workers.template.metadata.labels", {"psjob.dev/job": "other"},
        "must not have keys that begin with psjob.dev/; "),
    *(refused(f"annotation-{at}", f"{at}.metadata.annotations", {"psjob.dev/waited-seconds": "300"},
          "must not have keys that begin with psjob.dev/; those are psjob's own")
        for at in ("spec.workers.template", SHARD_POD)),
    *(refused(f"metadata-{name}", f"{at}.metadata", {name: "mine"}, "must be left out; psjob names its pods itself",
          below=f".{name}")
        for at, name in (("spec.workers.template", "name"), (SHARD_POD, "generateName"), ("spec.workers.template", "namespace"))),
    *(refused(f"metadata-{name}", "spec.workers.template.metadata", {name: value}, "must not have ownerReferences, managedFields, uid, ",
          server=False)
        for name, value in (
            ("ownerReferences", [{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "a"}]),
            ("creationTimestamp", "2026-01-01T00:00:00Z"),
            ("uid", "a"),
        )),
    *(refused(f"ephemeral-{at}", f"{at}.ephemeralContainers", [{"name": "debug", "image": "busybox"}],
          "must be left out; Kubernetes takes them only for a pod that exists; use kubectl debug")
        for at in (POD, f"{SHARD_POD}.spec")),
    *(Case(f"above-its-limit-{number}", {f"{at}.resources": {"requests": {name: request}, "limits": {name: limit}}},
          f"{at.replace('.0', '[0]')}.resources", "must not have requests above their limits; raise the limit, or lower the request",
          server=False)
        for number, (at, name, request, limit) in enumerate(((WORKER, "cpu", "500m", 0.25), (WORKER, "memory", "2Gi", "2G"),
            (WORKER, "nvidia.com/gpu", 1, 2), (POD, "memory", "2Gi", "1Gi")))),
    refused("shard-label", f"{SHARD_POD}.metadata.labels", {"psjob.dev/job": "other"}, "must not have keys that begin with psjob.dev/; "),
    refused("shard-env", f"{SHARD_POD}.spec.containers", [{"name": "shard", "env": [{"name": "PSJOB_X"}]}], "must not begin with PSJOB_; ",
        below="[0].env[0].name"),
    *(refused(f"{number}-gpus", f"{WORKER}.resources.limits", {"nvidia.com/gpu": number}, "must be of type integer or string; such as 1; ",
          below=".nvidia.com/gpu", server_sentence="must be of type integer")
        for number in (0.5, True)),
    *(refused(f"{number!r}-gpus", f"{WORKER}.resources.limits", {name: number}, "must ask for whole GPUs; such as 1; ", server=False)
        for name, number in (("nvidia.com/gpu", "0.5"), ("amd.com/gpu", "1500m"), ("nvidia.com/gpu", -1), ("nvidia.com/mig-1g.5gb", 0.5))),
    refused("shard-gpu", f"{SHARD_POD}.spec.containers", [{"name": "shard", "resources": {"limits": {"nvidia.com/gpu": 1}}}],
        "must not ask for GPUs; shards compute on the CPU", below="[0].resources.limits"),
    refused("shard-mig", f"{SHARD_POD}.spec.containers", [{"name": "shard", "resources": {"limits": {"nvidia.com/mig-1g.5gb": 1}}}],
        "must not ask for GPUs; ", below="[0].resources.limits", server=False),
    refused("shard-command", f"{SHARD_POD}.spec.containers", [{"name": "x", "command": ["y"]}], "must not have command or args; "),
    refused("shard-several", f"{SHARD_POD}.spec.containers", [{"name": "x"}, {"name": "y"}],
        "must have a container named shard where there are several; "),
    refused("shard-restart", f"{SHARD_POD}.spec.restartPolicy", "Always", "must be Never, or left out; "),
    *(Case(f"shard-{containers}-port-{number}{protocol or ''}",
          {f"{SHARD_POD}.spec.containers": [{"name": "shard"}],
          f"{SHARD_POD}.spec.{containers}": [{"name": "shard"}, {"name": "x", "ports": [{"containerPort": 9000}, port]}][skip:]},
          f"{SHARD_POD}.spec", "must not have containerPort 7070 or 7071 in a container beside the shard's; ", server=False)
        for containers, skip in (("containers", 0), ("initContainers", 1))
        for number, protocol in ((7070, None), (7071, "TCP"))
        for port in ({"containerPort": number} | ({"protocol": protocol} if protocol else {}),)),
    *(Case(f"shard-{word}", {f"{SHARD_POD}.spec.{word}": True}, f"{SHARD_POD}.spec", "must not have hostPID or hostIPC; ", server=False)
        for word in ("hostPID", "hostIPC")),
    *(refused(f"shard-{containers}-{word}", f"{SHARD_POD}.spec.{containers}", [{"name": "shard", "securityContext": {word: value}}],
          "must not add powers: ", below="[0].securityContext", server=False)
        for containers in ("containers", "initContainers")
        for word, value in (
            ("privileged", True),
            ("procMount", "Unmasked"),
            ("allowPrivilegeEscalation", True),
            ("capabilities", {"add": ["NET_BIND_SERVICE", "SYS_ADMIN"]}),
            ("seccompProfile", {"type": "Unconfined"}),
        )),
    refused("shard-host", f"{SHARD_POD}.spec.hostname", "x", "must be left out; "),
    refused("command-in-one-word", f"{WORKER}.command", ["python train.py"],
        "must begin with a program, each argument an item of its own; ", server=False),
    *(Case(f"shell-in-{words}", {f"{WORKER}.command": ["python"], f"{WORKER}.{words}": ["python", "train.py", "&&", "echo"]},
          f"{POD}.containers[0].{words}", "must not hold a word of the shell as an item: && 2>&1 >> ||; no shell reads it; ", server=False)
        for words in ("command", "args")),
    refused("env-number", f"{WORKER}.env", [{"name": "A", "value": 1}], _TYPE + 'string; write it in quotes: "1"', below="[0].value",
        server_sentence=_TYPE + "string"),
    Case("large", {f"{WORKER}.image": "x" * 120_000}, "spec", "at most 102400 are taken; put scripts and data", server=False),
]  # fmt: skip

TEMPLATES_PASSED: list[Case] = [
    Case("other-name", {f"{WORKER}.name": "main"}),
    Case("sidecar", {f"{POD}.containers": [{"name": "log"}, {"name": "worker", "command": ["a"]}]}),
    Case("shell", {f"{WORKER}.command": ["sh", "-c", "python train.py && echo done > log"]}),
    Case("program-with-a-space", {f"{WORKER}.command": ["/opt/my tools/train", "--sep", "|"]}),
    Case("variable-of-a-file", {f"{POD}.volumes": [{"name": "made", "emptyDir": {}}],
        f"{WORKER}.env": [{"name": "A", "valueFrom": {"fileKeyRef": {"volumeName": "made", "path": "env", "key": "A"}}}]}),
    Case("never", {f"{POD}.restartPolicy": "Never", f"{WORKER}.restartPolicy": "Never"}),
    Case("sidecar-init", {f"{POD}.initContainers": [{"name": "log", "restartPolicy": "Always", "image": "x"}]}),
    Case("host-network", {f"{POD}.hostNetwork": True, f"{POD}.dnsPolicy": "ClusterFirstWithHostNet"}),
    Case("env-like-ours", {f"{WORKER}.env": [{"name": "A", "value": "1"}, {"name": "XPSJOB_"}]}),
    Case("spread-over-two", {f"{POD}.topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": when}
        for when in ("DoNotSchedule", "ScheduleAnyway")]}),
    Case("dns-cluster", {f"{POD}.dnsPolicy": "ClusterFirst"}),
    Case("dns-own", {f"{POD}.dnsPolicy": "None", f"{POD}.dnsConfig": {"nameservers": ["192.0.2.10"]}}),
    Case("everything-of-a-pod", {f"{WORKER}.resources": {"requests": {"cpu": "500m", "memory": "1024Mi", "x.io/y": 2},
        "limits": {"nvidia.com/gpu": 1, "cpu": 0.5, "memory": "1Gi", "x.io/y": "2"}}, f"{POD}.tolerations": [{"operator": "Exists"}],
        f"{POD}.volumes": [{"name": "data", "nfs": {"server": "a", "path": "/"}}],
        f"{WORKER}.volumeMounts": [{"name": "data", "mountPath": "/psjobs"}], f"{POD}.ephemeralContainers": [],
        "spec.workers.template.metadata": {"labels": {"team": "a", "app.kubernetes.io/name": "digits"}, "annotations": {"x": "y"},
        "finalizers": ["example.com/keep"], "creationTimestamp": None}}),
    Case("shard-template", {SHARD_POD: {"spec": {"nodeSelector": {"a": "b"},
        "containers": [{"name": "shard", "resources": {"limits": {"cpu": 2}}}]}}}),
    Case("shard-restricted", {f"{SHARD_POD}.spec": {"hostPID": False, "initContainers": [{"name": "a", "securityContext": None}],
        "containers": [{"name": "shard", "securityContext": {"privileged": False, "capabilities": {"add": ["NET_BIND_SERVICE"]}}}]}}),
    Case("shard-plain", {SHARD_POD: {"spec": {"tolerations": []}}}),
    Case("shard-ports", {f"{SHARD_POD}.spec.containers": [{"name": "shard", "ports": [{"containerPort": 7070, "name": "data"}]},
        {"name": "x", "ports": [{"containerPort": 7070, "protocol": "UDP"}, {"containerPort": 9000}]}]}),
    Case("shard-own-ports", {f"{SHARD_POD}.spec.containers": [{"name": "x", "ports": [{"containerPort": 7071}]}]}),
    Case("shard-empty", {SHARD_POD: {}}),
    Case("one-shard-on-host", {"spec.shards": {"replicas": 1,
        "template": {"spec": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}}}}),
]  # fmt: skip
