"""What ``bench/microbatch`` measures: raypipe's choice for real models, and steps at every number beside it.

    model --> profile, plan (raypipe's own, from micro-batches of up to 8 samples) --> N, range, cut
          --> seconds of the cut's stages at every size, measured --> x factor --> emulated stages, step by N

The planner extrapolates a line through small sizes; the emulated stages take what was measured at the very size, so
that a line which is wrong shows. They have no other choice on a machine with fewer cores than stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

import raypipe
from jobs.bench.simulate.runs import next_word, small_gpt
from jobs.lib.emulated import CPU_SHARE
from jobs.lib.stage_seconds import measure_stages
from raypipe.engine.capture import capture
from raypipe.ir.cluster import Cluster, Device, Link
from raypipe.ir.plan import Plan
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.simulate.serial import Costs, makespan_s

__all__ = [
    "MODELS", "Case", "Key", "divisors", "make_case", "numbers_of", "range_ends", "real_steps_s",
    "seconds_at", "simulated_s", "stage_seconds", "times_of", "trainer_of",
]  # fmt: skip

AT_HIGH_END_S = 0.020
"""The slowest emulated stage takes this long at the upper end of the printed range: wake-ups stay small beside it."""
AT_LEAST_S = 0.4
"""The closed form's step at N* takes at least this long, so that a step's own overhead stays small beside it."""
REAL_STEPS, REAL_WARM_UP = 13, 3
EMULATED: dict[str, Any] = {"schedule": "slack", "slack": 2}
"""What emulated stages run: a backward is one sleep there, so "auto" might plan what they cannot split."""


class Model(NamedTuple):
    """A model with its data.

    Attributes:
        make: a model, an nn.Sequential where its stages are measured.
        data: so many random samples.
    """

    make: Callable[[], nn.Module]
    data: Callable[[int], TensorDataset]
    loss_fn: Callable[[Any, Any], torch.Tensor]


def tiny_mlp() -> nn.Sequential:
    """Layers so small that a call costs as much as a dozen samples: overhead decides."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(128, 128), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def small_cnn() -> nn.Sequential:
    """3 x 3 convolutions on 16 x 16 images."""
    widths = (3, 16, 16, 32, 32, 32, 32)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def _vectors(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 128), torch.randint(10, (count,)))


def _images(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3, 16, 16), torch.randint(10, (count,)))


def _texts(count: int) -> TensorDataset:
    words = torch.randint(128, (count, 33))
    return TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())


MODELS = {
    "mlp": Model(tiny_mlp, _vectors, nn.functional.cross_entropy),
    "cnn": Model(small_cnn, _images, nn.functional.cross_entropy),
    "gpt": Model(small_gpt, _texts, next_word),
}


class Case(NamedTuple):
    """One model cut into so many stages: what raypipe chose, and what its stages take.

    Attributes:
        chosen, optimum, low, high, epsilon: as in the plan's prediction, for ``minibatch_size`` and links that take no
            time.
        real_chosen: as in the plan that this machine's processes would run, whose links take what is assumed of them.
        half_chosen, half_optimum: of the plan for half of it, from the same profile.
        predicted_s, half_predicted_s: the plans' own curves, by number of micro-batches.
        starts: number of the first child of each stage but the first.
        stage_s: by size and stage, measured (forward_s, backward_s).
        factor: emulated seconds per measured one.
    """

    model: str
    num_stages: int
    minibatch_size: int
    chosen: int
    real_chosen: int
    optimum: float
    low: float
    high: float
    epsilon: float
    half_chosen: int
    half_optimum: float
    predicted_s: dict[int, float]
    half_predicted_s: dict[int, float]
    starts: tuple[int, ...]
    stage_s: dict[int, list[tuple[float, float]]]
    factor: float

    @property
    def name(self) -> str:
        return f"{self.model}_{self.num_stages}"


class Key(NamedTuple):
    """A swept step: samples in it, micro-batches, and whether every action was slowed down."""

    minibatch_size: int
    num_microbatches: int
    slowed: bool = False


def make_case(name: str, num_stages: int, minibatch_size: int, repeats: int, largest: int) -> Case:
    """Let raypipe choose, then measure the stages at every size.

    Args:
        largest: samples of the largest mini-batch that is swept.
    """
    model = MODELS[name]
    torch.manual_seed(0)
    built, data = model.make(), model.data(2 * largest)
    whole = trainer_of(model, built, data, num_stages, minibatch_size, pipeline=EMULATED)
    real = trainer_of(model, built, data, num_stages, minibatch_size)
    profiled = real.profile()
    # Emulated stages take many times the model's seconds, messages between them what they always take: next to nothing.
    cluster = Cluster(tuple(Device(f"emulated{i}") for i in range(num_stages)), (Link(),))
    plan = whole.plan(profiled=profiled, cluster=cluster)
    halved = trainer_of(model, built, data, num_stages, minibatch_size // 2, pipeline=EMULATED)
    half = halved.plan(profiled=profiled, cluster=cluster)
    assert plan.prediction is not None
    assert half.prediction is not None
    found = plan.prediction
    case = Case(
        model=name,
        num_stages=num_stages,
        minibatch_size=minibatch_size,
        chosen=plan.num_microbatches,
        real_chosen=real.plan(profiled=profiled).num_microbatches,
        optimum=found.optimum,
        low=found.low,
        high=found.high,
        epsilon=found.epsilon,
        half_chosen=half.num_microbatches,
        half_optimum=half.prediction.optimum,
        predicted_s=_curve(plan),
        half_predicted_s=_curve(half),
        starts=tuple(stage.start for stage in plan.partition.stages[1:]),
        stage_s=stage_seconds(model, built, data, plan.partition.cuts, divisors(largest), repeats),
        factor=1.0,
    )
    return case._replace(factor=_factor(case))


def _curve(plan: Plan) -> dict[int, float]:
    assert plan.prediction is not None
    return {point.num_microbatches: point.predicted_s for point in plan.prediction.curve}


def trainer_of(
    model: Model,
    built: nn.Module,
    data: TensorDataset,
    num_stages: int,
    minibatch_size: int,
    pipeline: Mapping[str, Any] | None = None,
    run_config: Any = None,
) -> raypipe.PipelineTrainer:
    """A trainer of one of MODELS, which plans and runs as users' do."""
    return raypipe.PipelineTrainer(
        built,
        loss_fn=model.loss_fn,
        optimizer=_sgd,
        train_data=data,
        pipeline=raypipe.PipelineConfig(
            **{"num_stages": num_stages, "minibatch_size": minibatch_size, **(pipeline or {})}
        ),
        scaling_config=SimpleNamespace(num_workers=num_stages, resources_per_worker={"CPU": CPU_SHARE}),
        run_config=run_config,
    )


def _sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1e-3)


def stage_seconds(
    model: Model, built: nn.Module, data: TensorDataset, cuts: Sequence[int], sizes: Sequence[int], repeats: int
) -> dict[int, list[tuple[float, float]]]:
    """The least of rounds in which every size has its turn: whatever else the machine does only adds to it."""
    x, y = data[: max(sizes)]
    captured = capture(built, (x[:2], y[:2]), ("x", "y"), model.loss_fn, evaluates=False)
    programs = captured.programs(cuts)
    tensors = {**captured.parameters, **captured.buffers}
    rounds: dict[int, list[Any]] = {size: [] for size in sizes}
    for _ in range(repeats):
        for size in sizes:
            seconds = measure_stages(programs, tensors, {"x": x[:size], "y": y[:size]}, repeats=1)
            rounds[size].append(list(zip(seconds.forward_s, seconds.backward_s, strict=True)))
    return {
        size: [(min(f for f, _ in stage), min(b for _, b in stage)) for stage in zip(*found, strict=True)]
        for size, found in rounds.items()
    }


def _factor(case: Case) -> float:
    at_high_s = max(map(sum, times_of(case, case.minibatch_size / range_ends(case)[1])))
    # The curve is for the model's own seconds, like stage_s, give or take what the machine did meanwhile.
    return max(AT_HIGH_END_S / at_high_s, AT_LEAST_S / min(case.predicted_s.values()))


def times_of(case: Case, samples: float, extra_s: float = 0.0) -> list[tuple[float, float]]:
    """(forward_s, backward_s) of emulated stages for so many samples.

    Args:
        extra_s: added to each.
    """
    found = seconds_at(case.stage_s, samples)
    return [(forward_s * case.factor + extra_s, backward_s * case.factor + extra_s) for forward_s, backward_s in found]


def seconds_at(stage_s: Mapping[int, Sequence[tuple[float, float]]], samples: float) -> list[tuple[float, float]]:
    """(forward_s, backward_s) by stage for so many samples, on the straight between the sizes that were measured."""
    sizes = sorted(stage_s)
    above = next((size for size in sizes if size >= samples), sizes[-1])
    below = max((size for size in sizes if size <= samples), default=sizes[0])
    share = (samples - below) / (above - below) if above > below else 0.0

    def between(low_s: float, high_s: float) -> float:
        return low_s + share * (high_s - low_s)

    return [
        (between(low[0], high[0]), between(low[1], high[1]))
        for low, high in zip(stage_s[below], stage_s[above], strict=True)
    ]


def simulated_s(times: Sequence[tuple[float, float]], number: int) -> float:
    """A step of these stages with free links, in the order that they run."""
    spec = ScheduleSpec(EMULATED["schedule"], number, slack=(EMULATED["slack"],) * (len(times) - 1))
    schedule = lower(schedule_of(spec, len(times)))
    return makespan_s(schedule, Costs(tuple(f for f, _ in times), tuple(b for _, b in times)))


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def range_ends(case: Case) -> tuple[int, int]:
    """The least and the largest whole number in the printed range; where there is none, the nearest."""
    low, high = math.ceil(case.low - 1e-9), math.floor(case.high + 1e-9)
    return (low, high) if low <= high else (round(case.optimum),) * 2


def numbers_of(
    cases: Sequence[Case], slowed: bool = False, grid: Sequence[int] = ()
) -> dict[int, list[tuple[Case, Key]]]:
    """What to run at each number of micro-batches: all divisors of all mini-batches, and the ends of the ranges.

    Args:
        slowed: the divisors of the whole mini-batch once more, with a handicap.
        grid: further mini-batch sizes.
    """
    found: dict[int, list[tuple[Case, Key]]] = {}
    for case in cases:
        whole, half = case.minibatch_size, case.minibatch_size // 2
        keys = [Key(size, n) for size in (whole, half, *grid) for n in divisors(size)]
        keys += [Key(whole, n) for n in range_ends(case)]
        keys += [Key(whole, n, True) for n in divisors(whole)] if slowed else []
        for key in dict.fromkeys(keys):
            found.setdefault(key.num_microbatches, []).append((case, key))
    return dict(sorted(found.items()))


def real_steps_s(case: Case, folder: str) -> dict[int, list[float]]:
    """Steps of the real model on Ray actors of this machine, at every divisor of its mini-batch."""
    model = MODELS[case.model]
    found: Mapping[int, list[float]] = {number: [] for number in divisors(case.minibatch_size)}
    for number, steps in found.items():
        torch.manual_seed(0)
        pipeline = {"num_microbatches": number, "partitioner": tuple(map(str, case.starts))}
        result = trainer_of(
            model,
            model.make(),
            model.data(case.minibatch_size * REAL_STEPS),
            case.num_stages,
            case.minibatch_size,
            pipeline=pipeline,
            run_config=SimpleNamespace(name=f"{case.name}-{number}", storage_path=folder),
        ).fit(num_steps=REAL_STEPS, progress=False)
        steps += [record.seconds for record in result.records[REAL_WARM_UP:]]
    return dict(found)
