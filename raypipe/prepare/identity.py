"""Identity of a run for settings.json: labels and values that determine the results of its steps bit by bit.

    config      fields that change results; partition, schedule and links do so only with an asynchronous schedule
    data        a few rows: the first ones, some of the middle, the last ones
    optimizer   groups and options of an optimizer that is built for the whole model, and takes no step
    scheduler   class, options, and the learning rates of a new scheduler after 1, 2, 4, ... steps
    model       names, shapes and dtypes of its tensors, and its operations in their order
    code        code of the model, see model_code.py: compared if the operations differ

The code of other functions counts only if it changes these values. A loss_fn is identified by its name, and if it is a
module, also by its options and tensors.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from raypipe import __version__
from raypipe.capture import Capture, TracedModel
from raypipe.capture.analyse import UNCAST, Traced
from raypipe.config.pipeline import PipelineConfig
from raypipe.data.open_data import Source
from raypipe.engine.initial.meta_init import ModuleInit
from raypipe.engine.optim.state import MakeOptimizer, MakeScheduler, new_optimizer, rate_of
from raypipe.engine.stage.losses import LossCounts
from raypipe.engine.stage.minibatch_loss import WholeMinibatch
from raypipe.engine.torch_settings import torch_settings
from raypipe.ir.plan import Plan
from raypipe.ir.weights import VersionRule
from raypipe.prepare.model_code import options
from raypipe.run.same_run import CUTS, GRAPH, LANES, REDUCTION
from raypipe.run.spec import RunIdentity

if TYPE_CHECKING:
    from raypipe.prepare.job import Job


FIRST, MIDDLE, LAST = 4, 2, 2
"""Number of samples that are described at the beginning, in the middle and at the end of the data."""
LATEST_UPDATE = 1024
_FREE_FIELDS = ("max_grad_norm", "on_nonfinite", "codec_forward", "codec_backward", "precision", "retune_microbatches")
_ASYNCHRONOUS_FIELDS = ("weight_versions", "update_interval", "vertical_sync")
_OWN = ("params", "param_names")
_TURNED = ("base_lrs", "last_epoch", "verbose")


def settings_of(
    job: Job, pipeline: PipelineConfig, loss_fn: Any, weights: Mapping[str, str] | None = None
) -> RunIdentity:
    """Create the identity of a planned run.

    Args:
        weights: checksum of init_from by its kind, "sha256" of all bytes or "sampled_sha256"; None without init_from.
            Checksums of two kinds are not compared, so that a run can move between client and workers.
    """
    plan, sources, reduction = job.plan, job.sources, job.settings.loss_reduction
    fixed: dict[str, Any] = {
        "seed": pipeline.seed,
        "minibatch_size": plan.minibatch_size,
        "num_microbatches": plan.num_microbatches,
        "loss_fn": name_of(loss_fn),
        **(_held(loss_fn, "loss_fn") if isinstance(loss_fn, torch.nn.Module) else {}),
        "init_from": dict(weights) if weights else None,
        **({"weights_on": "workers"} if any(isinstance(x, ModuleInit) for x in job.unfilled) else {}),
        **job.model_labels,
        **source_labels("train_data", sources["train"]),
    }
    free: dict[str, Any] = {
        REDUCTION: reduction.words if isinstance(reduction, LossCounts | WholeMinibatch) else name_of(reduction),
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
        if pipeline.stale_correction != "none":
            free["stale_correction"] = pipeline.stale_correction
        if pipeline.stale_correction == "discount":
            free["discount_updates"] = pipeline.discount_updates
        if plan.weights.rule is not VersionRule.DELAYED:
            free |= _lateness_labels(plan)
    free |= source_labels("eval_data", sources["eval"]) if "eval" in sources else {"eval_data": None}
    trained = [(name, torch.nn.Parameter(x.detach())) for name, x in job.tensors.items() if x.requires_grad]
    of_class, chosen = optimizer_labels(trained, job.arguments.optimizer, job.arguments.lr_scheduler)
    versions = {"raypipe": __version__, "torch": str(torch.__version__)}
    over = "" if pipeline.loss_over == "auto" else f" over the {pipeline.loss_over}"
    code = {**job.model_code, REDUCTION: f"{name_of(pipeline.loss_reduction)}{over}"}
    return RunIdentity({**fixed, **of_class}, {**free, **chosen}, versions, code)


def _lateness_labels(plan: Plan) -> dict[str, Any]:
    """Return the labels of an asynchronous plan that determine the weight version of each micro-batch.

    These are the numbers of stages and replicas, and the slack between stages: forwards that a stage runs ahead of the
    next. Cuts are added if forwards use the newest weights, or if each stage clips by its own gradient norm.
    """
    wiring, stages = plan.schedule.wiring, plan.partition.stages
    labels: dict[str, Any] = {"num_stages": len(stages)}
    if plan.spec is not None:
        labels["slack"] = ", ".join(map(str, plan.spec.slack)) or "none"
    if plan.weights.rule is VersionRule.NEWEST or plan.weights.norm_per_stage:
        labels[CUTS] = ", ".join(stage.first_node for stage in stages)
    if wiring.lanes > 1:
        labels["num_replicas"] = "-".join(map(str, wiring.replicas))
    return labels


def model_labels(model: torch.nn.Module, captured: Capture) -> dict[str, Any]:
    """Describe the model's class, parameters and persistent buffers; if traced, its operations and constant tensors."""
    tensors = {**captured.parameters, **{n: b for n, b in captured.buffers.items() if n in captured.persistent}}
    labels: dict[str, Any] = {"model": type(model).__qualname__}
    for name, tensor in tensors.items():
        kind = "parameter" if name in captured.parameters else "buffer"
        frozen = ", frozen" if kind == "parameter" and not tensor.requires_grad else ""
        labels[f"{kind} {name!r}"] = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{frozen}"
    if isinstance(captured.model, TracedModel):
        traced = captured.model.train.traced
        labels[GRAPH] = {"sha256": hashlib.sha256(_operations(traced).encode()).hexdigest()}
        constants = (tensor for tensor in traced.constants.values() if not tensor.is_meta)
        labels |= {f"tensor {i} in the code of the model": _content(tensor) for i, tensor in enumerate(constants)}
    return labels


def _operations(traced: Traced) -> str:
    """Format each node of the graph in one line: operation and arguments, with numbers for nodes."""
    number = {node: f"%{i}" for i, node in enumerate(traced.graph.nodes)}
    named = {**traced.parameters, **traced.buffers, **traced.columns}

    def shown(part: Any) -> Any:
        if isinstance(part, fx.Node):
            return number[part]
        if isinstance(part, str) or not callable(part):
            return part
        return str(part) if isinstance(part, torch._ops.OpOverload) else getattr(part, "__name__", name_of(part))

    lines = []
    for node in traced.graph.nodes:
        what = named.get(node) if node.op == "placeholder" else shown(node.target)
        arguments = fx.node.map_aggregate((node.args, node.kwargs), shown)
        lines.append(f"{node.op} {what} {arguments} {node.meta.get(UNCAST, '')}")
    return "\n".join(lines)


def _held(module: torch.nn.Module, title: str) -> dict[str, Any]:
    """Describe options and tensors of a loss module by label; all labels begin with ``title``."""
    tensors = {name: _content(tensor) for name, tensor in module.state_dict().items()}
    chosen = {
        f"{path}.{name}".lstrip("."): _value(value)
        for path, part in module.named_modules()
        for name, value in options(part).items()
    }
    return {f"{title}, {name}": value for name, value in {**chosen, **tensors}.items()}


def source_labels(title: str, source: Source) -> dict[str, Any]:
    """Describe number of samples, columns, and some samples of the first epoch; all labels begin with ``title``."""
    count, columns = source.num_samples, source.columns
    labels: dict[str, Any] = {
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
            labels[f"{title}, sample {number}, column {column}"] = _content(value)
    return labels


def optimizer_labels(
    trained: list[tuple[str, torch.nn.Parameter]], make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Describe optimizer and scheduler, built for all trained parameters of the model.

    Returns:
        (fixed labels, free labels): only free labels may change when a run resumes. Both are empty if the optimizer
        cannot be built for all parameters at once; errors are reported when a stage builds its own optimizer.
    """
    try:
        optimizer = new_optimizer(make_optimizer, trained) if trained else None
    except Exception:  # noqa: BLE001  (user code)
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
    """Return the name of a function or class, else of the object's class; a module's repr; plain values unchanged."""
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    if isinstance(thing, functools.partial):
        arguments = [str(_value(value)) for value in thing.args] + [
            f"{k}={_value(v)}" for k, v in thing.keywords.items()
        ]
        return f"{name_of(thing.func)}({', '.join(arguments)})"
    if isinstance(thing, torch.nn.Module):
        return " ".join(repr(thing).split())
    return getattr(thing, "__qualname__", type(thing).__qualname__)


def _scheduler_labels(optimizer: torch.optim.Optimizer, make: MakeScheduler | None) -> dict[str, Any]:
    if make is None:
        return {"lr_scheduler": None}
    try:
        scheduler = make(optimizer)
    except Exception:  # noqa: BLE001  (user code; the stages report its errors)
        return {}
    labels: dict[str, Any] = {"lr_scheduler": name_of(type(scheduler))}
    state: Any = getattr(scheduler, "state_dict", dict)()
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if not key.startswith("_") and key not in _TURNED:
            labels[f"{key} of the lr_scheduler"] = _value(value)
    return labels | dict(_rates(optimizer, scheduler.step))


def _rates(optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Iterable[tuple[str, Any]]:
    """Yield (label, learning rate) of each group after 1, 2, 4, ... calls of ``step``, until ``step`` raises.

    Rates are rounded to 9 digits, which are equal on all processors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scheduler steps without the optimizer, and past its end
        for done in range(1, LATEST_UPDATE + 1):
            try:
                step()
            except Exception:  # noqa: BLE001  (OneCycleLR past its end, or one that needs a metric)
                return
            if done & (done - 1) == 0:
                for number, group in enumerate(optimizer.param_groups):
                    steps = "step" if done == 1 else "steps"
                    rate = rate_of(group)
                    yield (
                        f"lr of group {number} after {done} {steps}",
                        None if rate is None else float(f"{rate:.9g}"),
                    )


def _names(names: list[str]) -> dict[str, str]:
    shown = f"{len(names)} from {names[0]} to {names[-1]}" if names else "none"
    return {"names": shown, "sha256": hashlib.sha256("\n".join(names).encode()).hexdigest()}


def _value(value: Any) -> Any:
    """Convert an option to comparable JSON: numbers unchanged, sequences item by item, other objects by name."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else [list(value.shape), str(value.dtype)]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)  # NaN, too
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _value(item) for key, item in value.items()}
    return name_of(value)


def _content(value: torch.Tensor) -> Any:
    """Describe the content of a tensor: integers by a digest, floating-point numbers by two weighted sums.

    "size" is the sum of absolute values. The sums are compared relative to it, because processors round differently.
    """
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
