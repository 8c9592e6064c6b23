"""Train a row as a user would, and beside it plain PyTorch; say where the two differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.capture.own_loss import own_loss
from raypipe.data.open_data import open_data
from raypipe.engine.stage.randomness import KeyedRandomness, RandomKey
from raypipe.errors import RaypipeError
from raypipe.testing import Reference, reference
from tests.exactness import Recorder, Run, differences
from tests.zoo.row import Rounding, Row

__all__ = ["differences_of", "refusal_of"]

MICROBATCH, STEPS = 2, 4
"""With four micro-batches an epoch of 20 samples is mini-batches of 8, 8 and 4, so that the last step is in the second.

With one, mini-batches have 2 samples: micro-batches of one size let both runs of a row use one capture, which takes
most of the time.
"""
LOSS_BOUND, NORM_BOUND, GRADIENT_BOUND = 3e-6, 1e-5, 1e-4
"""Between micro-batches and the whole mini-batch, whose sums are taken in another order."""
LEAST_SCALE = 1e-3
"""A gradient that is zero but for rounding is compared with this part of the largest of all."""

Tensors = Mapping[str, torch.Tensor]


def _trainer(row: Row, count: int, recorder: Recorder, folder: Path, **fields: Any) -> PipelineTrainer:
    """What a user would write, with stages of equal size, for which nothing need be timed."""
    return PipelineTrainer(
        row.made(),
        loss_fn=row.loss_fn,
        optimizer=recorder,
        train_data=row.make_data(row.samples),
        eval_data=row.make_data(row.evaluated),
        pipeline=_config(row, count, minibatch=_minibatch(row, count), **fields),
        run_config=SimpleNamespace(name=f"m{count}", storage_path=str(folder)),
    )


def refusal_of(row: Row, count: int, folder: Path) -> str:
    """The message with which a run in ``count`` micro-batches is refused; says so where it is not."""
    recorder = _recorder()
    try:
        trainer = _trainer(row, count, recorder, folder)
        trainer.simulate()
        recorder.steps.clear()
        trainer.fit(num_steps=STEPS, local=True, progress=False)
    except RaypipeError as error:
        return f"After {len(recorder.steps)} steps: {error}" if recorder.steps else str(error)
    return "It trained."


def differences_of(row: Row, count: int, folder: Path, **fields: Any) -> list[str]:
    """Everything in which a run in ``count`` micro-batches is not plain PyTorch's; empty if the verdict holds.

    Args:
        fields: further ones of PipelineConfig, which change no bit.
    """
    recorder = _recorder()
    trainer = _trainer(row, count, recorder, folder, **fields)
    trainer.simulate()
    recorder.steps.clear()  # those on copies, which were timed
    result = trainer.fit(num_steps=STEPS, local=True, progress=False)
    losses, norms = [r.loss for r in result.records], [r.grad_norm for r in result.records]
    state = load_state_dict(result.checkpoint)
    theirs = reference(
        row.made(row.twin),
        optimizer=_recorder(),
        train_data=row.make_data(row.samples),
        num_steps=STEPS,
        loss_fn=row.loss_fn,
        pipeline=_config(row, 1 if row.whole else count, minibatch=_minibatch(row, count)),
    )
    ours = Run(
        losses,
        norms,  # type: ignore[arg-type]
        recorder.steps,
        {name: state[name] for name in theirs.parameters},
        {name: state[name] for name in theirs.buffers if name in state},
    )
    kept = {name: buffer for name, buffer in theirs.buffers.items() if name in state}
    theirs = Reference(theirs.model, theirs.losses, theirs.grad_norms, theirs.gradients, theirs.parameters, kept)
    found = _stuck(row, theirs)
    if isinstance(row.verdict, Rounding):
        found += _beyond(ours, theirs, row.verdict.bound)
    else:
        found += differences(ours, theirs)
    return found + _unlike_whole(row, count, ours) + _unlike_evaluation(row, theirs.model, result.metrics["eval_loss"])


def _minibatch(row: Row, count: int) -> int:
    """Samples of a mini-batch; a row that is run once only has all 8 of them."""
    return MICROBATCH * (count if len(row.microbatches) > 1 else 4)


def _config(row: Row, count: int, *, minibatch: int, **fields: Any) -> PipelineConfig:
    if row.by_word:
        fields = {"loss_reduction": "per_microbatch", **fields}
    return PipelineConfig(
        num_stages=row.stages, minibatch_size=minibatch, num_microbatches=count, partitioner="parameters", **fields
    )


def _recorder() -> Recorder:
    """Steps that are big enough for a wrong gradient to show in the parameters."""
    return Recorder(torch.optim.SGD, lr=5e-2, momentum=0.9)


def _stuck(row: Row, theirs: Reference) -> list[str]:
    """A comparison of what did not move, or is not a number, says nothing."""
    found = [f"losses[{i}] is {loss}" for i, loss in enumerate(theirs.losses) if loss != loss]
    initial = {name: p for name, p in row.made().named_parameters() if p.requires_grad}
    still = [name for name, p in initial.items() if torch.equal(p, theirs.parameters[name])]
    if len(still) == len(initial):
        found.append("no parameter moved")
    return found


def _beyond(ours: Run, theirs: Reference, bound: float) -> list[str]:
    """Differences larger than the bound."""
    found = []
    for what in ("losses", "grad_norms"):
        pairs = zip(getattr(ours, what), getattr(theirs, what), strict=True)
        found += [f"{what}[{i}]: {a!r} is not {b!r}" for i, (a, b) in enumerate(pairs) if abs(a - b) > bound * abs(b)]
    for step, (mine, yours) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        found += _apart(f"gradients[{step}]", mine, yours, bound)
    found += _apart("parameters", ours.parameters, theirs.parameters, bound)
    return found + _apart("buffers", ours.buffers, theirs.buffers, bound)


def _apart(what: str, mine: Mapping[str, Any], yours: Mapping[str, Any], bound: float) -> list[str]:
    """Tensors that differ by more than ``bound`` of their largest entry."""
    held = {name: tensor for name, tensor in yours.items() if tensor is not None and tensor.numel()}
    largest = {name: float(tensor.detach().abs().max()) for name, tensor in held.items()}
    least = LEAST_SCALE * max(largest.values(), default=0.0)
    found = [f"{what}: names differ: {sorted(mine.keys() ^ yours.keys())}"] if mine.keys() != yours.keys() else []
    for name, tensor in held.items():
        if mine.get(name) is None:
            found.append(f"{what}[{name}] is missing")
        elif (by := float((mine[name] - tensor).detach().abs().max())) > bound * max(largest[name], least):
            found.append(f"{what}[{name}] differs by {by:g} of {largest[name]:g}")
    return found


def _unlike_whole(row: Row, count: int, ours: Run) -> list[str]:
    """The first step against the whole mini-batch at once, where that is the same function."""
    if row.by_word and count > 1:
        return []
    model = row.made(row.twin).train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    rows = _rows(row, _minibatch(row, count), shuffle=True)
    with KeyedRandomness(RandomKey(0, 0, 0)) as drawn:
        loss = _loss(row, model, rows)
    changed = any(not torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    if count > 1 and (drawn.index or changed):  # statistics of a micro-batch are others
        return []
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    norm = float(torch.nn.utils.get_total_norm([g for g in gradients.values() if g is not None]))
    found = _not_close("loss of the whole mini-batch", ours.losses[0], float(loss.detach()), LOSS_BOUND)
    found += _not_close("gradient norm of the whole mini-batch", ours.grad_norms[0], norm, NORM_BOUND)
    return found + _apart("gradients of the whole mini-batch", ours.gradients[0], gradients, GRADIENT_BOUND)


def _unlike_evaluation(row: Row, trained: nn.Module, eval_loss: float) -> list[str]:
    """All samples at once, in evaluation mode."""
    if row.by_word:
        return []
    rows = _rows(row, row.evaluated, shuffle=False)
    with torch.no_grad(), KeyedRandomness(RandomKey(0, 0, 0)) as drawn:
        loss = float(_loss(row, trained.eval(), rows))
    bound = row.verdict.bound if isinstance(row.verdict, Rounding) else LOSS_BOUND
    return [] if drawn.index else _not_close("eval_loss", eval_loss, loss, bound)


def _rows(row: Row, count: int, *, shuffle: bool) -> Any:
    """The first mini-batch of training, or the samples of the evaluation."""
    source = open_data(row.make_data(row.samples if shuffle else count), seed=0, shuffle=shuffle)
    named = row.loss_fn is None and not all(isinstance(name, int) for name in source.columns)
    return source.read(0, 0, count, source.columns if named else tuple(range(len(source.columns))))


def _loss(row: Row, model: nn.Module, rows: Any) -> torch.Tensor:
    if row.loss_fn is not None:
        return row.loss_fn(model(*rows[:-1]), rows[-1])
    return own_loss(model, model(**rows) if isinstance(rows, Mapping) else model(*rows))


def _not_close(what: str, ours: float, theirs: float, bound: float) -> list[str]:
    return [] if abs(ours - theirs) <= bound * abs(theirs) else [f"{what}: {ours!r} is not {theirs!r}"]
