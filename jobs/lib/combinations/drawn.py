"""A combination: which model, which sizes, which fields; drawn at random, and as JSON, so that each can come back.

Draws keep to what can go together nine times in ten, so that most of them train; the tenth time they are left as they
fell, for the sake of what is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

from jobs.lib.combinations.nets import NETS, Net
from jobs.lib.combinations.optimizers import OPTIMIZERS, SCHEDULERS

__all__ = ["ASYNCHRONOUS", "Combination", "drawn", "lanes_of", "stages_of"]

Fields = dict[str, Any]

ASYNCHRONOUS = ("pipedream", "2bw")
SCHEDULES = ("gpipe", "1f1b", "kfkb", "slack", "interleaved", "zb-h1", "zb-v", "auto", *ASYNCHRONOUS)
SPLITS = ("zb-h1", "zb-v")
SEVERAL = ("interleaved", "zb-v")
LAYOUT = (
    "num_stages",
    "partitioner",
    "schedule",
    "slack",
    "group_size",
    "recompute",
    "num_replicas",
    "verify",
    "profile_budget_s",
)
"""Fields that may be others when a synchronous run goes on, without a change of any bit."""


@dataclass(frozen=True)
class Combination:
    """One run.

    Attributes:
        net: of NETS.
        samples: of an epoch.
        steps: of the whole run.
        fields: of PipelineConfig.
        workers: that share the stages, of one replica each; None for one per stage.
        optimizer, scheduler: by name.
        data: how the samples are given: "tensors", "items", "loader", "stream".
        evaluates: there is eval_data, with metrics where the net has some.
        stop: step after which the run is stopped and gone on with; 0 for none.
        first, first_workers: fields of the run before that, where they are others.
        made_by_workers: weights are read from a file by the workers.
        max_failures: as of FailureConfig.
    """

    net: str = "perceptron"
    samples: int = 16
    steps: int = 4
    fields: Mapping[str, Any] = field(default_factory=dict)
    workers: int | None = None
    optimizer: str = "sgd"
    scheduler: str = "none"
    data: str = "tensors"
    evaluates: bool = False
    stop: int = 0
    first: Mapping[str, Any] = field(default_factory=dict)
    first_workers: int | None = None
    made_by_workers: bool = False
    max_failures: int = 0

    @property
    def schedule(self) -> str:
        found: str = self.fields.get("schedule", "auto")
        return found

    @property
    def synchronous(self) -> bool:
        return self.schedule not in ASYNCHRONOUS

    def __str__(self) -> str:
        """JSON of what is not as it would be by itself."""
        usual = asdict(Combination())
        return json.dumps({name: value for name, value in asdict(self).items() if value != usual[name]})

    @classmethod
    def parse(cls, text: str) -> Combination:
        """From ``str``."""
        return cls(**json.loads(text))

    def with_fields(self, **fields: Any) -> Combination:
        """With these fields changed, in the part after a stop; None leaves one out."""
        kept = {name: value for name, value in {**self.fields, **fields}.items() if value is not None}
        return replace(self, fields=kept)


def stages_of(fields: Mapping[str, Any]) -> int:
    """Of a drawn combination, which says how many; a synchronous one may leave that to the planner."""
    cuts = fields.get("partitioner")
    if isinstance(cuts, list):
        return len(cuts) + 1
    return 2 if fields["num_stages"] == "auto" else int(fields["num_stages"])


def lanes_of(fields: Mapping[str, Any]) -> int:
    """Into which gradients are summed."""
    given = fields.get("num_replicas", 1)
    counts = given if isinstance(given, list) else [1 if given == "auto" else given]
    lanes: int | str = fields.get("num_lanes", "auto")
    return math.lcm(*counts) if lanes == "auto" else int(lanes)


def drawn(random: Random) -> Combination:
    """The next one."""
    wild = random.random() < 0.1
    name = random.choice(list(NETS))
    net = NETS[name]
    count = random.randint(1, 6)
    each = random.randint(net.least, max(3, net.least))
    missing = random.choice([0, 0, random.randrange(max(1, each - net.least + 1))])
    minibatch = count * each - missing
    samples = minibatch * random.randint(1, 3)
    if random.random() < 0.5 and minibatch > net.least:
        samples += random.randint(net.least, minibatch - 1)
    rest = (samples % minibatch) % each
    if 0 < rest < net.least:
        samples += net.least - rest
    fields: Fields = {"minibatch_size": minibatch, "num_microbatches": count}
    layout, workers = _layout(random, net, count, None)
    fields |= layout | _meaning(random, net)
    found = Combination(
        name, samples, random.randint(2, 6), fields, workers,
        optimizer=random.choice(OPTIMIZERS), scheduler=random.choice(SCHEDULERS),
        data=random.choice(["tensors", "tensors", "items", "loader", "stream"]), evaluates=random.random() < 0.4,
        made_by_workers=random.random() < 0.08, max_failures=random.choice([0, 0, 0, 2]),
    )  # fmt: skip
    if found.evaluates and random.random() < 0.7:
        found = found.with_fields(eval_interval_steps=random.randint(1, 3))
    if random.random() < 0.3:
        found = found.with_fields(checkpoint_interval_steps=random.randint(1, 3))
    if found.steps > 2 and random.random() < 0.35:
        found = _stopped(random, net, found)
    return found if wild else _possible(random, net, found)


def _layout(random: Random, net: Net, count: int, lanes: int | None) -> tuple[Fields, int | None]:
    """Who computes what, and when.

    Args:
        count: micro-batches.
        lanes: that gradients are summed in, where that is given.
    """
    schedule = random.choice(SCHEDULES if lanes is None else [s for s in SCHEDULES if s not in ASYNCHRONOUS])
    stages, workers = random.choice([1, 2, 2, 3, 3, 4]), None
    if schedule == "interleaved":
        workers = random.choice([1, 2, 2, 3])
        stages = workers * random.choice([2, 2, 3])
    elif schedule == "zb-v":
        workers = random.choice([1, 2, 2])
        stages = 2 * workers
    stages = min(stages, net.children or stages)
    fields: Fields = {"schedule": schedule, "num_stages": stages, "partitioner": "parameters"}
    if net.children and random.random() < 0.7 and stages > 1:
        fields["partitioner"] = [str(at) for at in sorted(random.sample(range(1, net.children), stages - 1))]
    if schedule == "kfkb" and random.random() < 0.6:
        fields["group_size"] = random.randint(1, count)
    if schedule in ("slack", "zb-h1", *ASYNCHRONOUS) and stages > 1 and random.random() < 0.4:
        fields["slack"] = random.choice([1, 2, [random.randint(1, 3) for _ in range(stages - 1)]])
    if schedule == "pipedream":
        intervals = [u for u in range(1, count + 1) if count % u == 0]
        fields |= random.choice([{}, {"update_interval": random.choice(intervals)}, {"weight_versions": 2}])
        fields |= {"vertical_sync": True} if random.random() < 0.3 else {}
    kind = random.random()
    if kind < 0.15:
        fields["recompute"] = "always"
    elif kind < 0.25:
        fields["recompute"] = [random.choice(["always", "never"]) for _ in range(stages)]
    if random.random() < 0.3:
        counts = [random.randint(1, 2) for _ in range(stages)]
        fields["num_replicas"] = counts[0] + 1 if schedule in SEVERAL else random.choice([2, counts, counts])
    if random.random() < 0.5:
        fields["verify"] = "off"
    if random.random() < 0.04 and schedule not in SEVERAL:
        fields |= {"partitioner": "auto", "profile_budget_s": 0.01}
    if random.random() < 0.05:  # left to the planner
        workers = 3
        fields = {"num_stages": "auto", "partitioner": "auto", "profile_budget_s": 0.01}
        fields["schedule"] = random.choice(["auto", "1f1b", "kfkb", "slack"])
        if random.random() < 0.5:
            fields["num_replicas"] = "auto"
    if lanes is not None:
        fields["num_lanes"] = lanes
    elif random.random() < 0.15:
        fields["num_lanes"] = random.randint(1, 4)
    return fields, workers


def _meaning(random: Random, net: Net) -> Fields:
    """What changes the numbers: precision, codecs, clipping."""
    fields: Fields = {}
    fields["precision"] = random.choice(["fp32", "fp32", "fp32", "bf16-autocast", "bf16", "fp16"])
    if random.random() < 0.2:
        fields["codec_forward"] = random.choice(["bf16", "fp16", "int8", "fp8", "int4"])
    if random.random() < 0.2:
        fields["codec_backward"] = random.choice(["bf16", "fp16", "int8", "fp8", "int4"])
    if random.random() < 0.5:
        fields["max_grad_norm"] = random.choice([0.05, 0.5, 1e6])
    if random.random() < 0.15:
        fields["on_nonfinite"] = "skip"
    if random.random() < 0.2:
        fields["seed"] = random.randint(1, 5)
    if random.random() < 0.05 and not net.children:
        fields["compile_stages"] = "aot_eager"
    if random.random() < 0.05:
        fields["codec_sums"] = "bf16"
    if random.random() < 0.3:
        fields["loss_reduction"] = "sum" if net.items is None and net.terms is None else "auto"
    return fields


def _stopped(random: Random, net: Net, found: Combination) -> Combination:
    """The run in two parts, of which a synchronous one may have other stages before."""
    stop = random.randint(1, found.steps - 1)
    if not found.synchronous:
        return replace(found, stop=stop, first=found.fields, first_workers=found.workers)
    lanes = lanes_of(found.fields)
    layout, workers = _layout(random, net, found.fields["num_microbatches"], lanes if lanes > 1 else None)
    kept = {name: value for name, value in found.fields.items() if name not in LAYOUT}
    layout = {name: value for name, value in layout.items() if name in LAYOUT or name == "num_lanes"}
    if layout["schedule"] in ASYNCHRONOUS:
        layout = {"schedule": "1f1b", "num_stages": layout["num_stages"], "partitioner": layout["partitioner"]}
        workers = None
    if lanes == 1:
        layout = {name: value for name, value in layout.items() if name not in ("num_replicas", "num_lanes")}
    return replace(found, stop=stop, first={**kept, **layout}, first_workers=workers)


def _possible(random: Random, net: Net, found: Combination) -> Combination:
    """The same without what is known to be refused; every rule here is one that the documentation has."""
    fields, first = dict(found.fields), dict(found.first)
    for part in (fields, first):
        if not part:
            continue
        stages, schedule = stages_of(part), part["schedule"]
        if schedule in ASYNCHRONOUS:
            _possible_late(part, net, stages)
        if net.statistics:
            if net.follows_statistics or random.random() < 0.5:
                part.pop("num_replicas", None)
            elif "num_replicas" in part:
                part["replicated_buffers"] = True
        if part["precision"] in ("bf16", "fp16") and (net.statistics or net.fp32_only):
            part["precision"] = "bf16-autocast"
        if part["precision"] == "fp16" and (not net.trains_last or schedule in ASYNCHRONOUS):
            part["precision"] = "bf16"
        if schedule in SPLITS or net.children:
            part.pop("compile_stages", None)
        replicas = part.get("num_replicas", 1)
        most = max(replicas) if isinstance(replicas, list) else 1 if replicas == "auto" else replicas
        if most > part["num_microbatches"] or (schedule in SEVERAL and isinstance(replicas, list)):
            del part["num_replicas"]
        if part.get("num_lanes", most) < most:
            part["num_lanes"] = most
        if "auto" in (fields["partitioner"], (first or fields)["partitioner"]):  # measured anew, it may cut elsewhere
            part.pop("codec_forward", None)
            part.pop("codec_backward", None)
        if lanes_of(part) == 1:
            part.pop("codec_sums", None)
            part.pop("num_lanes", None)
    if first:  # what may not change, is as it is in the second part
        lanes = lanes_of(fields)
        for name in fields.keys() - set(LAYOUT) - {"num_lanes"}:
            first[name] = fields[name]
        for name in first.keys() - set(LAYOUT) - {"num_lanes"} - fields.keys():
            del first[name]
        if "replicated_buffers" in fields:
            first = fields
        elif lanes == 1:
            first.pop("num_replicas", None)
            first.pop("num_lanes", None)
        elif found.synchronous:
            counts = first.get("num_replicas", 1)
            if counts != "auto" and (max(counts) if isinstance(counts, list) else counts) > lanes:
                del first["num_replicas"]
            first["num_lanes"] = lanes
    return replace(found, fields=fields, first=first)


def _possible_late(part: Fields, net: Net, stages: int) -> None:
    """Of an asynchronous schedule."""
    count = part["num_microbatches"]
    part.pop("on_nonfinite", None)
    part.pop("num_lanes", None)
    lanes = lanes_of(part)
    if count % lanes:
        part.pop("num_replicas", None)
        lanes = 1
    if part["schedule"] == "2bw":
        if count < stages or lanes > 1:
            part["schedule"] = "1f1b"
            part.pop("slack", None)
            return
        slack = part.get("slack", 1)
        if (sum(slack) if isinstance(slack, list) else slack * (stages - 1)) > count:
            del part["slack"]
        return
    if net.tied:
        part.pop("weight_versions", None)
        part["update_interval"] = count
        if count < stages:
            part["schedule"] = "1f1b"
            for name in ("slack", "update_interval", "vertical_sync", "weight_versions"):
                part.pop(name, None)
            return
    if part.get("update_interval", lanes) % lanes:
        part["update_interval"] = count
    if stages == 1:
        part.pop("slack", None)
    if "weight_versions" in part:
        slack = part.get("slack", 1)
        ahead = sum(slack) if isinstance(slack, list) else slack * (stages - 1)
        if ahead > count or lanes > 1:
            del part["weight_versions"]
