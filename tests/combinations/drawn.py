"""Combination: model, sizes and fields of PipelineConfig of one run, drawn at random; as JSON, to be repeated.

Draws keep to fields that go together nine times in ten, so that most of them train; the tenth time they are left as
drawn, for the sake of refusals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

from tests.combinations.nets import NETS, Net

__all__ = ["ASYNCHRONOUS", "OPTIMIZERS", "SCHEDULES", "SEVERAL", "Combination", "drawn", "lanes_of", "stages_of"]

Fields = dict[str, Any]

ASYNCHRONOUS = ("pipedream", "2bw")
SCHEDULES = ("gpipe", "1f1b", "kfkb", "slack", "interleaved", "zb-h1", "zb-v", "auto", *ASYNCHRONOUS)
SEVERAL = ("interleaved", "zb-v")
OPTIMIZERS = ("sgd", "adamw", "adamw in groups", "sgd by name")
LAYOUT = (
    "num_stages", "partitioner", "schedule", "slack", "group_size", "recompute", "num_replicas", "verify",
    "profile_budget_s",
)  # fmt: skip
"""Fields that a synchronous run may change when it is resumed, without a change of any bit."""


@dataclass(frozen=True)
class Combination:
    """One run.

    Attributes:
        net: of NETS.
        samples: of an epoch.
        steps: of the whole run.
        fields: of PipelineConfig.
        workers: that share the stages, of one replica each; None for one per stage.
        optimizer: of OPTIMIZERS; its learning rate decays by the step.
        stop: step after which the run is stopped and resumed; 0 for none.
        first, first_workers: fields and workers before that step.
    """

    net: str = "perceptron"
    samples: int = 16
    steps: int = 4
    fields: Mapping[str, Any] = field(default_factory=dict)
    workers: int | None = None
    optimizer: str = "sgd"
    stop: int = 0
    first: Mapping[str, Any] = field(default_factory=dict)
    first_workers: int | None = None

    @property
    def schedule(self) -> str:
        return str(self.fields.get("schedule", "auto"))

    @property
    def synchronous(self) -> bool:
        return self.schedule not in ASYNCHRONOUS

    def __str__(self) -> str:
        """JSON of the values that are not defaults."""
        usual = asdict(Combination())
        return json.dumps({name: value for name, value in asdict(self).items() if value != usual[name]})

    @classmethod
    def parse(cls, text: str) -> Combination:
        """Read the text of ``str``."""
        return cls(**json.loads(text))


def stages_of(fields: Mapping[str, Any]) -> int:
    """Number of stages; 2 if it is left to the planner."""
    cuts = fields.get("partitioner")
    if isinstance(cuts, list):
        return len(cuts) + 1
    return 2 if fields["num_stages"] == "auto" else int(fields["num_stages"])


def lanes_of(fields: Mapping[str, Any]) -> int:
    """Number of lanes into which gradients are summed."""
    replicas = fields.get("num_replicas", 1)
    counts = replicas if isinstance(replicas, list) else [1 if replicas == "auto" else replicas]
    lanes: int | str = fields.get("num_lanes", "auto")
    return math.lcm(*counts) if lanes == "auto" else int(lanes)


def drawn(random: Random) -> Combination:
    """Draw a combination."""
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
    layout, workers = _layout(random, net, count, None)
    fields: Fields = {"minibatch_size": minibatch, "num_microbatches": count} | layout
    fields["precision"] = random.choice(["fp32", "fp32", "fp32", "bf16-autocast", "bf16", "fp16"])
    fields |= {"max_grad_norm": random.choice([0.05, 0.5, 1e6])} if random.random() < 0.5 else {}
    fields |= {"seed": random.randint(1, 5)} if random.random() < 0.2 else {}
    fields |= {"checkpoint_interval_steps": random.randint(1, 3)} if random.random() < 0.3 else {}
    if random.random() < 0.3:
        fields["loss_reduction"] = "sum" if net.items is None and net.terms is None else "auto"
    made = Combination(name, samples, random.randint(2, 6), fields, workers, random.choice(OPTIMIZERS))
    if made.steps > 2 and random.random() < 0.35:
        made = _stopped(random, net, made)
    return made if wild else _possible(random, net, made)


def _layout(random: Random, net: Net, count: int, lanes: int | None) -> tuple[Fields, int | None]:
    """Draw stages, schedule and replicas, and the number of workers.

    Args:
        count: micro-batches.
        lanes: that gradients are summed in, if that is fixed.
    """
    schedule = random.choice(SCHEDULES if lanes is None else [s for s in SCHEDULES if s not in ASYNCHRONOUS])
    stages, workers = random.choice([1, 2, 2, 3, 3, 4]), None
    if schedule in SEVERAL:
        workers = random.choice([1, 2, 2, 3])
        stages = workers * (2 if schedule == "zb-v" else random.choice([2, 2, 3]))
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
    if random.random() < 0.25:
        each_stage = [random.choice(["always", "never"]) for _ in range(stages)]
        fields["recompute"] = random.choice(["always", each_stage])
    if random.random() < 0.3:
        counts = [random.randint(1, 2) for _ in range(stages)]
        fields["num_replicas"] = counts[0] + 1 if schedule in SEVERAL else random.choice([2, counts, counts])
    if random.random() < 0.5:
        fields["verify"] = "off"
    if random.random() < 0.05:  # left to the planner
        workers = 3
        fields = {"num_stages": "auto", "partitioner": "auto", "profile_budget_s": 0.01}
        fields["schedule"] = random.choice(["auto", "1f1b", "kfkb", "slack"])
        fields |= {"num_replicas": "auto"} if random.random() < 0.5 else {}
    if lanes is not None:
        fields["num_lanes"] = lanes
    elif random.random() < 0.15:
        fields["num_lanes"] = random.randint(1, 4)
    return fields, workers


def _stopped(random: Random, net: Net, made: Combination) -> Combination:
    """Split the run into two parts, of which a synchronous one may have another layout before."""
    stop = random.randint(1, made.steps - 1)
    if not made.synchronous:
        return replace(made, stop=stop, first=made.fields, first_workers=made.workers)
    lanes = lanes_of(made.fields)
    layout, workers = _layout(random, net, made.fields["num_microbatches"], lanes if lanes > 1 else None)
    kept = {name: value for name, value in made.fields.items() if name not in LAYOUT}
    layout = {name: value for name, value in layout.items() if name in LAYOUT or name == "num_lanes"}
    if layout["schedule"] in ASYNCHRONOUS:
        layout = {"schedule": "1f1b", "num_stages": layout["num_stages"], "partitioner": layout["partitioner"]}
        workers = None
    if lanes == 1:
        layout = {name: value for name, value in layout.items() if name not in ("num_replicas", "num_lanes")}
    return replace(made, stop=stop, first={**kept, **layout}, first_workers=workers)


def _possible(random: Random, net: Net, made: Combination) -> Combination:
    """Remove fields that the documentation says are refused together."""
    fields, first = dict(made.fields), dict(made.first)
    for part in filter(None, (fields, first)):
        if part["schedule"] in ASYNCHRONOUS:
            _possible_late(part, net, stages_of(part))
        if net.statistics:
            if net.follows_statistics or random.random() < 0.5:
                part.pop("num_replicas", None)
            elif "num_replicas" in part:
                part["replicated_buffers"] = True
        if part["precision"] in ("bf16", "fp16") and (net.statistics or net.fp32_only):
            part["precision"] = "bf16-autocast"
        if part["precision"] == "fp16" and (not net.trains_last or part["schedule"] in ASYNCHRONOUS):
            part["precision"] = "bf16"
        replicas = part.get("num_replicas", 1)
        most = max(replicas) if isinstance(replicas, list) else 1 if replicas == "auto" else replicas
        if most > part["num_microbatches"] or (part["schedule"] in SEVERAL and isinstance(replicas, list)):
            del part["num_replicas"]
        if part.get("num_lanes", most) < most:
            part["num_lanes"] = most
        if lanes_of(part) == 1:
            part.pop("num_lanes", None)
    if first:  # fields that may not change are those of the second part
        lanes = lanes_of(fields)
        fixed = (fields.keys() | first.keys()) - set(LAYOUT) - {"num_lanes"}
        first = {name: value for name, value in first.items() if name not in fixed}
        first |= {name: value for name, value in fields.items() if name in fixed}
        if "replicated_buffers" in fields:
            first = fields
        elif lanes == 1:
            first.pop("num_replicas", None)
            first.pop("num_lanes", None)
        elif made.synchronous:
            counts = first.get("num_replicas", 1)
            if counts != "auto" and (max(counts) if isinstance(counts, list) else counts) > lanes:
                del first["num_replicas"]
            first["num_lanes"] = lanes
    return replace(made, fields=fields, first=first)


def _possible_late(part: Fields, net: Net, stages: int) -> None:
    """Do the same for an asynchronous schedule; it becomes 1f1b if too few micro-batches are left for it."""
    count = part["num_microbatches"]
    part.pop("num_lanes", None)
    if count % lanes_of(part):
        part.pop("num_replicas", None)
    lanes, slack = lanes_of(part), part.get("slack", 1)
    ahead = sum(slack) if isinstance(slack, list) else slack * (stages - 1)
    two_buffers = part["schedule"] == "2bw"
    if (two_buffers and (count < stages or lanes > 1)) or (not two_buffers and net.tied and count < stages):
        part["schedule"] = "1f1b"
        for name in ("slack", "update_interval", "vertical_sync", "weight_versions"):
            part.pop(name, None)
        return
    if two_buffers:
        if ahead > count:
            del part["slack"]
        return
    if net.tied:
        part.pop("weight_versions", None)
        part["update_interval"] = count
    if part.get("update_interval", lanes) % lanes:
        part["update_interval"] = count
    if stages == 1:
        part.pop("slack", None)
    if "weight_versions" in part and (ahead > count or lanes > 1):
        del part["weight_versions"]
