"""What Kubernetes and KubeRay would say of a file: unknown fields, values of another type, what is missing.

Pods and claims are compared with the classes of Kubernetes' own client, which are made from its API. KubeRay's fields
are those of its API reference (ray.io/v1, KubeRay 1.6), PodMonitor's those of the Prometheus operator's
(monitoring.coreos.com/v1), as far as our files could want them.
"""

from __future__ import annotations

import re
from typing import Any

import kubernetes.client.models as models

__all__ = ["problems"]

HEAD = {
    "apiVersion": "str",
    "kind": "str",
    "metadata": "V1ObjectMeta",
}
FIELDS: dict[str, dict[str, str]] = {
    "RayCluster": {**HEAD, "spec": "RayClusterSpec"},
    "RayClusterSpec": {
        "authOptions": "AuthOptions",
        "autoscalerOptions": "AutoscalerOptions",
        "enableInTreeAutoscaling": "bool",
        "gcsFaultToleranceOptions": "object",
        "headGroupSpec": "HeadGroupSpec",
        "headServiceAnnotations": "Dict[str, str]",
        "managedBy": "str",
        "rayVersion": "str",
        "suspend": "bool",
        "workerGroupSpecs": "List[WorkerGroupSpec]",
    },
    "AuthOptions": {"enableK8sTokenAuth": "bool", "mode": "str", "secretName": "str"},
    "AutoscalerOptions": {
        "env": "List[V1EnvVar]",
        "envFrom": "List[V1EnvFromSource]",
        "idleTimeoutSeconds": "int",
        "image": "str",
        "imagePullPolicy": "str",
        "resources": "V1ResourceRequirements",
        "securityContext": "V1SecurityContext",
        "upscalingMode": "str",
        "version": "str",
        "volumeMounts": "List[V1VolumeMount]",
    },
    "HeadGroupSpec": {
        "enableIngress": "bool",
        "headService": "V1Service",
        "rayStartParams": "Dict[str, str]",
        "serviceType": "str",
        "template": "V1PodTemplateSpec",
    },
    "WorkerGroupSpec": {
        "groupName": "str",
        "idleTimeoutSeconds": "int",
        "maxReplicas": "int",
        "minReplicas": "int",
        "numOfHosts": "int",
        "rayStartParams": "Dict[str, str]",
        "replicas": "int",
        "scaleStrategy": "object",
        "suspend": "bool",
        "template": "V1PodTemplateSpec",
    },
    "RayJob": {**HEAD, "spec": "RayJobSpec"},
    "RayJobSpec": {
        "activeDeadlineSeconds": "int",
        "backoffLimit": "int",
        "clusterSelector": "Dict[str, str]",
        "deletionStrategy": "object",
        "entrypoint": "str",
        "entrypointNumCpus": "float",
        "entrypointNumGpus": "float",
        "entrypointResources": "str",
        "jobId": "str",
        "managedBy": "str",
        "metadata": "Dict[str, str]",
        "rayClusterSpec": "RayClusterSpec",
        "runtimeEnvYAML": "str",
        "shutdownAfterJobFinishes": "bool",
        "submissionMode": "str",
        "submitterConfig": "object",
        "submitterPodTemplate": "V1PodTemplateSpec",
        "suspend": "bool",
        "ttlSecondsAfterFinished": "int",
    },
    "PersistentVolumeClaim": {**HEAD, "spec": "V1PersistentVolumeClaimSpec"},
    "PodMonitor": {**HEAD, "spec": "PodMonitorSpec"},
    "PodMonitorSpec": {
        "jobLabel": "str",
        "namespaceSelector": "object",
        "podMetricsEndpoints": "List[PodMetricsEndpoint]",
        "podTargetLabels": "List[str]",
        "selector": "V1LabelSelector",
    },
    "PodMetricsEndpoint": {"interval": "str", "path": "str", "port": "str", "relabelings": "object"},
}
REQUIRED = {
    "RayCluster": ("metadata", "spec"),
    "RayClusterSpec": ("headGroupSpec",),
    "HeadGroupSpec": ("template",),
    "WorkerGroupSpec": ("groupName", "maxReplicas", "minReplicas", "template"),
    "RayJob": ("metadata", "spec"),
    "PodMonitorSpec": ("podMetricsEndpoints", "selector"),
}
ONE_OF = {
    ("AuthOptions", "mode"): ("disabled", "token"),
    ("AutoscalerOptions", "upscalingMode"): ("Default", "Aggressive", "Conservative"),
    ("RayJobSpec", "submissionMode"): ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
}
PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}


def problems(value: Any, kind: str, at: str = "") -> list[str]:
    """A line per mistake, each with the place of it; none where the value is as ``kind`` wants it.

    Args:
        kind: a name of FIELDS, of a class of Kubernetes' client, or of what the client writes: "List[V1EnvVar]".
    """
    at = at or kind
    if inner := re.fullmatch(r"List\[(.*)\]", kind):
        if not isinstance(value, list):
            return [f"{at}: no list"]
        return [line for n, one in enumerate(value) for line in problems(one, inner[1], f"{at}[{n}]")]
    if inner := re.fullmatch(r"Dict\[str, (.*)\]", kind):
        if not isinstance(value, dict):
            return [f"{at}: no mapping"]
        return [line for key, one in value.items() for line in problems(one, inner[1], f"{at}.{key}")]
    if kind == "object":
        return []
    if kind in PLAIN:
        wrong = not isinstance(value, PLAIN[kind]) or (kind != "bool" and isinstance(value, bool))
        return [f"{at}: {value!r} is no {kind}"] if wrong else []
    return _of_fields(value, kind, at)


def _of_fields(value: Any, kind: str, at: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{at}: no mapping"]
    known, required = _fields(kind)
    found = [f"{at}: {name} is missing" for name in required if name not in value]
    for name, one in value.items():
        if name not in known:
            found.append(f"{at}: no field {name}")
            continue
        if one not in ONE_OF.get((kind, name), (one,)):
            found.append(f"{at}.{name}: {one!r} is none of {ONE_OF[kind, name]}")
        found += problems(one, known[name], f"{at}.{name}")
    return found


def _fields(kind: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Types of all fields by their names in files, and those that must be there."""
    if kind in FIELDS:
        return FIELDS[kind], REQUIRED.get(kind, ())
    model = getattr(models, kind)
    in_files = dict(model.attribute_map)
    required = (in_files[name] for name, field in model.model_fields.items() if field.is_required())
    return {in_files[name]: kept for name, kept in model.openapi_types.items()}, tuple(required)
