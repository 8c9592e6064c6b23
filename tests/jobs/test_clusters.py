"""Files for Kubernetes and Ray's launcher: fields of their APIs, the versions of the repository, a valid command.

Pods and claims are compared with the classes of Kubernetes' own client. KubeRay's fields are those of its API reference
(ray.io/v1, KubeRay 1.6), PodMonitor's those of the Prometheus operator's (monitoring.coreos.com/v1).
"""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes.client.models as models
import pytest
import yaml

from raypipe.dashboards.install import contents
from raypipe.runfile.run_file import read_runfile
from tests.sources import ROOT

pytestmark = [pytest.mark.core, pytest.mark.slow]  # half a second for the classes of Kubernetes' client

CLUSTERS = ROOT / "jobs" / "clusters"


def read(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((CLUSTERS / name).read_text("utf-8")))


CLUSTER, JOB, CLAIM = read("raycluster.yaml"), read("rayjob.yaml"), read("storage.yaml")
SPECS = {"raycluster": CLUSTER["spec"], "rayjob": JOB["spec"]["rayClusterSpec"]}

META = "apiVersion:str kind:str metadata:V1ObjectMeta"
FIELDS = {
    "RayCluster": f"{META} spec:RayClusterSpec",
    "RayClusterSpec": "authOptions:AuthOptions autoscalerOptions:AutoscalerOptions enableInTreeAutoscaling:bool "
    "headGroupSpec:HeadGroupSpec rayVersion:str workerGroupSpecs:List[WorkerGroupSpec]",
    "AuthOptions": "enableK8sTokenAuth:bool mode:str secretName:str",
    "AutoscalerOptions": "env:List[V1EnvVar] idleTimeoutSeconds:int resources:V1ResourceRequirements "
    "securityContext:V1SecurityContext upscalingMode:str version:str",
    "HeadGroupSpec": "rayStartParams:Dict[str,str] serviceType:str template:V1PodTemplateSpec",
    "WorkerGroupSpec": "groupName:str maxReplicas:int minReplicas:int rayStartParams:Dict[str,str] replicas:int "
    "template:V1PodTemplateSpec",
    "RayJob": f"{META} spec:RayJobSpec",
    "RayJobSpec": "entrypoint:str rayClusterSpec:RayClusterSpec shutdownAfterJobFinishes:bool submissionMode:str "
    "submitterPodTemplate:V1PodTemplateSpec suspend:bool ttlSecondsAfterFinished:int",
    "PersistentVolumeClaim": f"{META} spec:V1PersistentVolumeClaimSpec",
    "PodMonitor": f"{META} spec:PodMonitorSpec",
    "PodMonitorSpec": "jobLabel:str podMetricsEndpoints:List[PodMetricsEndpoint] selector:V1LabelSelector",
    "PodMetricsEndpoint": "interval:str path:str port:str",
}
REQUIRED = {
    "RayClusterSpec": ("headGroupSpec",),
    "HeadGroupSpec": ("template",),
    "WorkerGroupSpec": ("groupName", "maxReplicas", "minReplicas", "template"),
    "PodMonitorSpec": ("podMetricsEndpoints", "selector"),
}
ONE_OF = {
    "mode": ("disabled", "token"),
    "upscalingMode": ("Default", "Aggressive", "Conservative"),
    "submissionMode": ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
}
PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}


def problems(value: Any, kind: str, at: str = "") -> list[str]:
    """List mistakes with their places: unknown fields, values of another type, missing fields.

    Args:
        kind: a name of FIELDS, of a class of Kubernetes' client, or a type as that client writes it: "List[V1EnvVar]".
    """
    at = at or kind
    if inner := re.fullmatch(r"List\[(.*)\]", kind):
        assert isinstance(value, list), at
        return [line for n, one in enumerate(value) for line in problems(one, inner[1], f"{at}[{n}]")]
    if inner := re.fullmatch(r"Dict\[str, ?(.*)\]", kind):
        return [line for key, one in value.items() for line in problems(one, inner[1], f"{at}.{key}")]
    if kind in PLAIN:
        wrong = not isinstance(value, PLAIN[kind]) or (kind != "bool" and isinstance(value, bool))
        return [f"{at}: {value!r} is no {kind}"] if wrong else []
    if kind == "object":
        return []
    known, required = fields_of(kind)
    lines = [f"{at}: {name} is missing" for name in required if name not in value]
    for name, one in value.items():
        if name not in known:
            lines.append(f"{at}: no field {name}")
        elif kind in FIELDS and one not in ONE_OF.get(name, (one,)):
            lines.append(f"{at}.{name}: {one!r} is none of {ONE_OF[name]}")
        else:
            lines += problems(one, known[name], f"{at}.{name}")
    return lines


def fields_of(kind: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the types of all fields by their names in files, and the required ones."""
    if kind in FIELDS:
        return dict(field.split(":") for field in FIELDS[kind].split(" ")), REQUIRED.get(kind, ())  # type: ignore[misc]
    model = getattr(models, kind)
    in_files = dict(model.attribute_map)
    required = (in_files[name] for name, field in model.model_fields.items() if field.is_required())
    return {in_files[name]: kept for name, kept in model.openapi_types.items()}, tuple(required)


def pods(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Pod specs of head and workers."""
    templates = {"head": spec["headGroupSpec"], "worker": spec["workerGroupSpecs"][0]}
    return {role: group["template"]["spec"] for role, group in templates.items()}


def pinned(package: str) -> str:
    line = re.search(rf"^{package}(?:\[.*\])?==(\S+)$", (ROOT / "requirements.txt").read_text("utf-8"), re.MULTILINE)
    assert line is not None, package
    return line[1]


@pytest.mark.parametrize("content", [CLUSTER, JOB, CLAIM], ids=lambda content: content["kind"])
def test_every_field_is_one_that_the_api_has(content: dict[str, Any]) -> None:
    assert problems(content, content["kind"]) == []


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_pods_have_no_root_and_leave_before_they_are_killed(spec: dict[str, Any]) -> None:
    assert spec["authOptions"] == {"mode": "token", "secretName": "raypipe-token"}
    for role, pod in pods(spec).items():
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
        python, script, argument, _, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (python, argument) == ("python", role)
        assert (ROOT / Path(script).relative_to("/raypipe")).exists()
        assert int(seconds) + 5 < pod["terminationGracePeriodSeconds"] <= 120, "AWS announces it two minutes before"


def test_raypipe_takes_the_command_of_the_job() -> None:
    """It has the workers of the cluster, survives failures and writes to the pods' folder; quotes would get lost."""
    entrypoint = JOB["spec"]["entrypoint"]
    assert not set(entrypoint) & set("'\"\n")
    raypipe, train, file, *sets = entrypoint.split()
    assert (raypipe, train) == ("raypipe", "train")
    settings = read_runfile(ROOT / Path(file).relative_to("/raypipe"), sets[1::2])
    assert settings.values["scaling_config"]["num_workers"] == [2, SPECS["rayjob"]["workerGroupSpecs"][0]["replicas"]]
    assert settings.values["run_config"]["failure_config"] == {"max_failures": -1}
    mounted = pods(SPECS["rayjob"])["worker"]["containers"][0]["volumeMounts"][0]["mountPath"]
    assert all(Path(place).is_relative_to(mounted) for place in re.findall(r"=(/\S+)", entrypoint))


def test_prometheus_scrapes_the_port_of_the_pods() -> None:
    monitor = yaml.safe_load(contents(Path("/nowhere"), "http://prometheus", "")["kuberay/podmonitor.yaml"])
    assert problems(monitor, "PodMonitor") == []
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for spec in SPECS.values():
        groups = (spec["headGroupSpec"], spec["workerGroupSpecs"][0])
        for group, pod in zip(groups, pods(spec).values(), strict=True):
            ports = {one["name"]: one["containerPort"] for one in pod["containers"][0]["ports"]}
            assert str(ports[endpoint["port"]]) == group["rayStartParams"]["metrics-export-port"]


def test_versions_are_those_of_the_repository() -> None:
    pins = read("runtime_env.yaml")["pip"]
    assert pins == [f"{line.split('==')[0]}=={pinned(line.split('==')[0])}" for line in pins]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {re.split(r"[\[><=]", line)[0] for line in project["dependencies"]}
    assert {line.split("==")[0] for line in pins} == needed - {"ray", "pyyaml"}, "Ray's images have these two"
    assert {spec["rayVersion"] for spec in SPECS.values()} == {pinned("ray")}


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_ray_s_launcher_takes_a_cluster_with_spot_workers(cloud: str) -> None:
    ray = importlib.util.find_spec("ray")  # reads a file of Ray's, and does not import it
    assert ray is not None
    assert ray.origin is not None
    schema = json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text("utf-8"))
    cluster = read(f"{cloud}.yaml")
    jsonschema.validate(cluster, schema)
    assert cluster["provider"]["type"] == cloud
    head, spot = (cluster["available_node_types"][name] for name in ("head", "spot"))
    assert (cluster["head_node_type"], head["resources"]) == ("head", {"CPU": 0})
    assert (spot["min_workers"], spot["max_workers"]) == (0, cluster["max_workers"])
    node = spot["node_config"]
    assert node.get("InstanceMarketOptions") == {"MarketType": "spot"} or node["scheduling"] == [{"preemptible": True}]
    commands = " ".join(cluster["head_start_ray_commands"]), " ".join(cluster["worker_start_ray_commands"])
    assert all("RAY_AUTH_MODE=token" in command and "--metrics-export-port=8080" in command for command in commands)
