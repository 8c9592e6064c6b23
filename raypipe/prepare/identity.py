"""What a run is, for settings.json: labels and values that decide the bits of its steps.

    config      fields that decide bits; how it is cut, scheduled and joined does not, as long as steps do not overlap
    data        a few rows, the first ones, some of the middle, the last ones
    optimizer   groups and options, of one made for the whole model
    scheduler   class, options, and the learning rates that a fresh one gives after 1, 2, 4, ... steps
    model       names, shapes, element types, and its operations

Numbers are looked at and nothing is trained: the optimizer takes no step. What a function does inside shows as far as
it changes these values; a loss_fn goes by its name, and by what it holds if it is a module.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from raypipe import __version__
from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.capture import Capture
from raypipe.engine.data.source import Source
from raypipe.engine.initial.keyed import KeyedInit
from raypipe.engine.loss_counts import LossCounts
from raypipe.engine.stage import GraphFunction
from raypipe.engine.state import MakeOptimizer, MakeScheduler, new_optimizer
from raypipe.engine.torch_settings import torch_settings
from raypipe.ir.plan import Plan
from raypipe.ir.weights import VersionRule
from raypipe.runtime.run.same_run import CUTS, LANES, Settings

if TYPE_CHECKING:
    from raypipe.prepare.job import Job

__all__ = ["model_labels", "name_of", "optimizer_labels", "settings_of", "source_labels"]

FIRST, MIDDLE, LAST = 4, 2, 2
"""Samples that are looked at. Rows of files are decoded by the window, so they lie in three places only."""
LATEST_UPDATE = 1024
_FREE_FIELDS = ("max_grad_norm", "on_nonfinite", "codec_forward", "codec_backward", "precision", "retune_microbatches")
_ASYNCHRONOUS_FIELDS = ("weight_versions", "update_interval", "vertical_sync")
_OWN = ("params", "param_names")
_TURNED = ("base_lrs", "last_epoch", "verbose")


def settings_of(job: Job, pipeline: PipelineConfig, loss_fn: Any, weights: Mapping[str, str] | None = None) -> Settings:
    """The settings of a run that is planned.

    Args:
        weights: checksum of those of init_from by its kind, "sha256" of all bytes or "sampled_sha256"; None where
            nothing was given. Those of two kinds are not compared, so that a run can move between client and workers.
    """
    plan, sources, reduction = job.plan, job.sources, job.settings.loss_reduction
    fixed: dict[str, Any] = {
        "seed": pipeline.seed,
        "minibatch_size": plan.minibatch_size,
        "num_microbatches": plan.num_microbatches,
        "loss_fn": name_of(loss_fn),
        **(_held(loss_fn, "loss_fn") if isinstance(loss_fn, torch.nn.Module) else {}),
        "init_from": dict(weights) if weights else None,
        **({"weights_on": "workers"} if any(isinstance(x, KeyedInit) for x in job.unfilled) else {}),
        **job.model_labels,
        **source_labels("train_data", sources["train"]),
    }
    free: dict[str, Any] = {
        "loss_reduction": reduction.words if isinstance(reduction, LossCounts) else name_of(reduction),
        "schedule": "synchronous" if plan.weights.interval is None else pipeline.schedule,
        **{name: getattr(pipeline, name) for name in _FREE_FIELDS},
    }
    free |= torch_settings().unusual()
    if pipeline.compile_stages != "off":
        free["compile_stages"] = pipeline.compile_stages
    if (lanes := plan.schedule.wiring.lanes) > 1:  # replicas change no bit, but lanes do
        free[LANES] = lanes
    if pipeline.replicated_buffers:
        free["replicated_buffers"] = "-".join(map(str, plan.schedule.wiring.replicas))
    if pipeline.codec_sums != "none":
        free["codec_sums"] = pipeline.codec_sums
    if plan.weights.interval is not None:
        free |= {name: getattr(pipeline, name) for name in _ASYNCHRONOUS_FIELDS}
        if plan.weights.rule is not VersionRule.DELAYED:
            free |= _lateness_labels(plan)
    free |= source_labels("eval_data", sources["eval"]) if "eval" in sources else {"eval_data": None}
    trained = [(name, torch.nn.Parameter(x.detach())) for name, x in job.tensors.items() if x.requires_grad]
    of_class, options = optimizer_labels(trained, job.make_optimizer, job.make_scheduler)
    versions = {"raypipe": __version__, "torch": str(torch.__version__)}
    return Settings({**fixed, **of_class}, {**free, **options}, versions)


def _lateness_labels(plan: Plan) -> dict[str, Any]:
    """What decides how old weights of "pipedream" are: its stages, their replicas and how far they run ahead."""
    wiring, stages = plan.schedule.wiring, plan.partition.stages
    found: dict[str, Any] = {"num_stages": len(stages)}
    if plan.spec is not None:
        found["slack"] = ", ".join(map(str, plan.spec.slack)) or "none"
    if plan.weights.rule is VersionRule.NEWEST or plan.weights.norm_per_stage:
        found[CUTS] = ", ".join(stage.first_node for stage in stages)
    if wiring.lanes > 1:
        found["num_replicas"] = "-".join(map(str, wiring.replicas))
    return found


def model_labels(model: torch.nn.Module, captured: Capture) -> dict[str, Any]:
    """The model's class, its parameters and buffers, and a checksum of its operations."""
    tensors = {**captured.parameters, **{n: b for n, b in captured.buffers.items() if n in captured.persistent}}
    found: dict[str, Any] = {"model": type(model).__qualname__}
    for name, tensor in tensors.items():
        kind = "parameter" if name in captured.parameters else "buffer"
        frozen = ", frozen" if kind == "parameter" and not tensor.requires_grad else ""
        found[f"{kind} {name!r}"] = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{frozen}"
    (program,) = captured.programs(())
    if isinstance(program.train, GraphFunction):
        text = program.train.source
    else:
        children = getattr(program.train, "children", ())
        text = "\n".join(f"{child.name} {child.module!r} {_options(child.module)}" for child in children)
    found["operations of the model"] = {"sha256": hashlib.sha256(text.encode()).hexdigest()}
    return found


def _options(module: torch.nn.Module) -> dict[str, Any]:
    """What the modules in one are set to by plain values, of which a repr tells what its author chose."""
    return {
        f"{path}.{name}".lstrip("."): _value(value)
        for path, part in module.named_modules()
        for name, value in sorted(vars(part).items())
        if not name.startswith("_") and name != "training" and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _held(module: torch.nn.Module, title: str) -> dict[str, Any]:
    """Options and tensors of a loss."""
    tensors = {name: _content(tensor) for name, tensor in module.state_dict().items()}
    return {f"{title}, {name}": value for name, value in {**_options(module), **tensors}.items()}


def source_labels(title: str, source: Source) -> dict[str, Any]:
    """Number of samples, columns, and what is in a few samples of the first epoch."""
    count, columns = source.num_samples, source.columns
    found: dict[str, Any] = {
        f"{title}, number of samples": count,
        f"{title}, columns": ", ".join(map(str, columns)),
    }
    middle = count // 2
    runs = ((0, FIRST), (middle, MIDDLE), (max(0, count - LAST), LAST))
    numbers = {n for start, length in runs for n in range(start, min(count, start + length))}
    for number in sorted(numbers) if (first := getattr(source, "shown_samples", None)) is None else range(first):
        row = source.read(0, number, 1, columns)
        values = list(row.values()) if isinstance(row, Mapping) else list(row)
        for column, value in zip(columns, values, strict=True):
            found[f"{title}, sample {number}, column {column}"] = _content(value)
    return found


def optimizer_labels(
    trained: list[tuple[str, torch.nn.Parameter]], make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what cannot change, what can) of the optimizer and its scheduler, made for these parameters.

    Nothing where it cannot be made for all of them at once: the stages make one each, and say what is wrong.
    """
    try:
        optimizer = new_optimizer(make_optimizer, trained) if trained else None
    except Exception:  # noqa: BLE001  (a function of the user's)
        optimizer = None
    if optimizer is None:
        return {}, {}
    names = {id(parameter): name for name, parameter in trained}
    free: dict[str, Any] = {"number of parameter groups": len(optimizer.param_groups)}
    for number, group in enumerate(optimizer.param_groups):
        held = [names.get(id(parameter), "?") for parameter in group["params"]]
        free |= {f"{key} of group {number}": _value(value) for key, value in group.items() if key not in _OWN}
        free[f"parameters of group {number}"] = _names(held)
    free |= _scheduler_labels(optimizer, make_scheduler)
    return {"optimizer": name_of(type(optimizer))}, free


def name_of(thing: Any) -> Any:
    """What a person calls a function, a class or an object that stands for one; numbers, texts, None as they are."""
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    if isinstance(thing, functools.partial):
        given = [str(_value(value)) for value in thing.args] + [f"{k}={_value(v)}" for k, v in thing.keywords.items()]
        return f"{name_of(thing.func)}({', '.join(given)})"
    if isinstance(thing, torch.nn.Module):
        return " ".join(repr(thing).split())
    return getattr(thing, "__qualname__", type(thing).__qualname__)


def _scheduler_labels(optimizer: torch.optim.Optimizer, make: MakeScheduler | None) -> dict[str, Any]:
    if make is None:
        return {"lr_scheduler": None}
    try:
        scheduler = make(optimizer)
    except Exception:  # noqa: BLE001  (a function of the user's; the stages say what is wrong)
        return {}
    found: dict[str, Any] = {"lr_scheduler": name_of(type(scheduler))}
    state: Any = getattr(scheduler, "state_dict", dict)()
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if not key.startswith("_") and key not in _TURNED:
            found[f"{key} of the lr_scheduler"] = _value(value)
    return found | dict(_rates(optimizer, scheduler.step))


def _rates(optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Iterable[tuple[str, Any]]:
    """Learning rates after 1, 2, 4, ... steps, rounded to what processors agree on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no step of the optimizer goes with these, nor with those past the end
        for done in range(1, LATEST_UPDATE + 1):
            try:
                step()
            except Exception:  # noqa: BLE001  (OneCycleLR past its end, or one that needs a metric)
                return
            if done & (done - 1) == 0:
                for number, group in enumerate(optimizer.param_groups):
                    steps = "step" if done == 1 else "steps"
                    yield f"lr of group {number} after {done} {steps}", float(f"{float(group['lr']):.9g}")


def _names(names: list[str]) -> dict[str, str]:
    shown = f"{len(names)} from {names[0]} to {names[-1]}" if names else "none"
    return {"names": shown, "sha256": hashlib.sha256("\n".join(names).encode()).hexdigest()}


def _value(value: Any) -> Any:
    """An option as JSON that compares: numbers as they are, sequences item by item, the rest by name."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else [list(value.shape), str(value.dtype)]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)  # nan too
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _value(item) for key, item in value.items()}
    return name_of(value)


def _content(value: torch.Tensor) -> Any:
    """Whole numbers exactly; others as two sums, because what is computed for a row rounds differently elsewhere."""
    if not value.is_floating_point():
        data = value.contiguous()
        text = f"{data.dtype} {tuple(data.shape[1:])} {data.tolist() if data.numel() < 9 else ''}"
        digest = hashlib.sha256(text.encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"sha256": digest.hexdigest()}
    numbers = torch.nan_to_num(value.double()).reshape(-1)
    weights = torch.cos(torch.arange(numbers.numel(), dtype=torch.float64))
    sums = [float(numbers.sum()), float((numbers * weights).sum())]
    return {"sums": sums, "size": float(numbers.abs().sum())}
