"""Files for Kubernetes: fields that KubeRay and Kubernetes have, pods without root, and what they name is there."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypipe.dashboards.install import contents
from raypipe.runfile.read import read_runfile
from tests.kube_fields import problems
from tests.sources import ROOT

pytestmark = [pytest.mark.core, pytest.mark.slow]  # half a second for the classes of Kubernetes' client

CLUSTERS = ROOT / "jobs" / "clusters"


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CLUSTERS / name).read_text("utf-8"))
    return found


CLUSTER, JOB, CLAIM = read("raycluster.yaml"), read("rayjob.yaml"), read("storage.yaml")
SPECS = {"raycluster": CLUSTER["spec"], "rayjob": JOB["spec"]["rayClusterSpec"]}


def pods(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Pod specs of head and workers."""
    templates = {"head": spec["headGroupSpec"], "worker": spec["workerGroupSpecs"][0]}
    return {role: group["template"]["spec"] for role, group in templates.items()}


@pytest.mark.parametrize("content", [CLUSTER, JOB, CLAIM], ids=lambda content: content["kind"])
def test_every_field_is_one_that_the_api_has(content: dict[str, Any]) -> None:
    assert problems(content, content["kind"]) == []


def test_a_wrong_field_is_found_wherever_it_is() -> None:
    wrong = copy.deepcopy(CLUSTER)
    pod = pods(wrong["spec"])["worker"]
    pod["containers"][0]["lifecycle"]["prestop"] = {}
    pod["tolerations"][0]["value"] = True
    del pod["containers"][0]["name"]
    wrong["spec"]["authOptions"]["mode"] = "tokens"
    wrong["spec"]["workerGroupSpecs"][0]["rayStartParams"]["metrics-export-port"] = 8080
    where = "RayCluster.spec.workerGroupSpecs[0]"
    assert sorted(problems(wrong, "RayCluster")) == sorted([
        "RayCluster.spec.authOptions.mode: 'tokens' is none of ('disabled', 'token')",
        f"{where}.rayStartParams.metrics-export-port: 8080 is no str",
        f"{where}.template.spec.containers[0]: name is missing",
        f"{where}.template.spec.containers[0].lifecycle: no field prestop",
        f"{where}.template.spec.tolerations[0].value: True is no str",
    ])  # fmt: skip


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_pods_have_no_root_a_token_a_folder_and_a_word_before_they_stop(spec: dict[str, Any]) -> None:
    assert spec["authOptions"] == {"mode": "token", "secretName": "raypipe-token"}
    assert spec["rayVersion"] == pinned("ray")
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for role, pod in pods(spec).items():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == 1000
        (container,) = pod["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["envFrom"] == [{"secretRef": {"name": "raypipe-s3", "optional": True}}]
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
        assert container["volumeMounts"][0]["name"] == pod["volumes"][0]["name"]
        python, script, said, _, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (python, said) == ("python", role)
        assert (ROOT / Path(script).relative_to("/raypipe")).exists()
        assert int(seconds) + 5 < pod["terminationGracePeriodSeconds"] <= 120, "AWS says it two minutes before"


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_workers_are_on_spot_machines_and_the_head_is_not(spec: dict[str, Any]) -> None:
    def terms(role: str) -> list[Any]:
        affinity = pods(spec)[role]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        return list(affinity["nodeSelectorTerms"])

    spot = [one["matchExpressions"][0] for one in terms("worker")]
    assert {one["operator"] for one in spot} == {"In"}
    assert terms("head") == [{"matchExpressions": [{**one, "operator": "NotIn"} for one in spot]}]
    tolerated = [{key: one[key] for key in ("key", "value")} for one in pods(spec)["worker"]["tolerations"]]
    assert all({"key": one["key"], "values": [one["value"]], "operator": "In"} in spot for one in tolerated)


def test_a_job_waits_for_kueue_and_differs_from_the_cluster_in_its_size_alone() -> None:
    assert JOB["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "raypipe"}
    assert JOB["spec"]["suspend"]
    assert JOB["spec"]["shutdownAfterJobFinishes"], "Kueue refuses a job that leaves its cluster"
    assert SPECS["rayjob"]["enableInTreeAutoscaling"] is False, "Kueue counts what a job asks for in the beginning"

    def without_size(spec: dict[str, Any]) -> dict[str, Any]:
        kept = copy.deepcopy(spec)
        for name in ("enableInTreeAutoscaling", "autoscalerOptions"):
            kept.pop(name, None)
        for name in ("replicas", "minReplicas", "maxReplicas"):
            kept["workerGroupSpecs"][0].pop(name)
        return kept

    assert without_size(SPECS["rayjob"]) == without_size(SPECS["raycluster"])
    images = re.findall(r"image: (\S+)", (CLUSTERS / "rayjob.yaml").read_text("utf-8"))
    assert len(images) == 3
    assert len(set(images)) == 1


def test_the_jobs_command_is_one_that_raypipe_takes() -> None:
    """As many workers as there are, failures survived, everything in the pods' folder; no quotes, which get lost."""
    entrypoint = JOB["spec"]["entrypoint"]
    assert not set(entrypoint) & set("'\"\n")
    raypipe, train, file, *sets = entrypoint.split()
    assert (raypipe, train) == ("raypipe", "train")
    assert set(sets[::2]) == {"--set"}
    settings = read_runfile(ROOT / Path(file).relative_to("/raypipe"), sets[1::2])
    assert settings.values["scaling_config"]["num_workers"] == [2, SPECS["rayjob"]["workerGroupSpecs"][0]["replicas"]]
    assert settings.values["run_config"]["failure_config"] == {"max_failures": -1}
    mounted = pods(SPECS["rayjob"])["worker"]["containers"][0]["volumeMounts"][0]["mountPath"]
    places = re.findall(r"=(/\S+)", entrypoint)
    assert len(places) == 3
    assert all(Path(place).is_relative_to(mounted) for place in places)


def test_prometheus_finds_the_pods() -> None:
    monitor = yaml.safe_load(contents(Path("/nowhere"), "http://prometheus", "")["kuberay/podmonitor.yaml"])
    assert problems(monitor, "PodMonitor") == []
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for spec in SPECS.values():
        groups = (spec["headGroupSpec"], spec["workerGroupSpecs"][0])
        for group, pod in zip(groups, pods(spec).values(), strict=True):
            ports = {one["name"]: one["containerPort"] for one in pod["containers"][0]["ports"]}
            assert str(ports[endpoint["port"]]) == group["rayStartParams"]["metrics-export-port"]


def test_the_image_is_pinned_and_ends_without_root() -> None:
    lines = (CLUSTERS / "Dockerfile").read_text("utf-8").splitlines()
    commands = [line.split() for line in lines if re.match(r"[A-Z]+ ", line)]
    (image,) = [words[1] for words in commands if words[0] == "FROM"]
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", image)
    assert [words[1] for words in commands if words[0] == "USER"] == ["1000:1000"]
    assert commands[-1][0] == "USER"
    assert "==" not in "".join(lines).replace("^torch==", ""), "versions stand in requirements.txt"


def test_a_runtime_environment_has_the_versions_that_everything_else_has() -> None:
    found = read("runtime_env.yaml")
    assert found["pip"] == [f"{line.split('==')[0]}=={pinned(line.split('==')[0])}" for line in found["pip"]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {re.split(r"[\[><=]", line)[0] for line in project["dependencies"]}
    assert {line.split("==")[0] for line in found["pip"]} == needed - {"ray", "pyyaml"}, "Ray's images have these two"


def pinned(package: str) -> str:
    found = re.search(rf"^{package}(?:\[.*\])?==(\S+)$", (ROOT / "requirements.txt").read_text("utf-8"), re.MULTILINE)
    assert found is not None, package
    return found[1]
