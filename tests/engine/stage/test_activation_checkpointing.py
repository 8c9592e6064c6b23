"""A forward that is run twice: what came is kept, what a forward changes is changed once, and nothing else is held."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from raypipe.engine.stage.activation_checkpointing import ForwardInputs, Recomputation
from raypipe.errors import StageError
from tests.exactness import same_bits

Run = Callable[[ForwardInputs], tuple[torch.Tensor, ...]]


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


def given(inputs: list[torch.Tensor | None], **buffers: torch.Tensor) -> ForwardInputs:
    return ForwardInputs(inputs, {}, buffers)


def twice(
    second: Recomputation, run: Run, what: ForwardInputs
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    outputs, again = second.first(run, what)
    return outputs, again()


def test_outputs_have_no_graph_and_say_which_require_a_gradient() -> None:
    def run(what: ForwardInputs) -> tuple[torch.Tensor, ...]:
        x = what.inputs[0]
        assert x is not None
        return x * x, x.detach() + 1, torch.arange(2)

    second = Recomputation(0)
    for _ in range(3):
        outputs, again = second.first(run, given([leaf(3.0)]))
        assert [x.requires_grad for x in outputs] == [True, False, False]
        assert all(x.grad_fn is None for x in outputs)
        found = again()
        assert all(map(same_bits, outputs, found))
        assert found[0].grad_fn is not None


def test_nothing_of_a_forward_is_held_but_its_outputs() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def run(what: ForwardInputs) -> tuple[torch.Tensor, ...]:
        middle = torch.tanh(what.inputs[0])  # type: ignore[arg-type]
        kept.append(weakref.ref(middle))
        return (middle * middle,)

    second = Recomputation(0)
    held = [second.first(run, given([leaf(0.5)])) for _ in range(3)]
    gc.collect()
    assert [one() for one in kept] == [None] * 3
    assert len(held) == 3


@pytest.mark.parametrize("first", [1.0, 0.0], ids=["moves them", "leaves them"])
def test_statistics_of_a_batch_norm_are_changed_once_and_seen_as_they_were(first: float) -> None:
    """torch does not count what a batch norm does to its buffers, and the first micro-batch need not move them."""
    seen: list[torch.Tensor] = []

    def run(what: ForwardInputs) -> tuple[torch.Tensor, ...]:
        mean, spread = what.buffers["mean"], what.buffers["spread"]
        seen.append(mean.clone())
        return (functional.batch_norm(what.inputs[0], mean, spread, training=True),)  # type: ignore[arg-type]

    buffers = {"mean": torch.zeros(3), "spread": torch.ones(3)}
    alone = {name: buffer.clone() for name, buffer in buffers.items()}
    second, drawn = Recomputation(0, buffers), torch.Generator().manual_seed(1)
    batches = [weight * torch.randn(4, 3, generator=drawn) for weight in (first, 1.0, 1.0)]
    later = [second.first(run, given([x], **buffers))[1] for x in batches]
    for x in batches:
        functional.batch_norm(x, alone["mean"], alone["spread"], training=True)
    assert all(same_bits(buffers[name], alone[name]) for name in buffers)
    firsts = list(seen)
    for again in reversed(later):
        again()
    assert all(map(same_bits, firsts, reversed(seen[3:])))
    assert all(same_bits(buffers[name], alone[name]) for name in buffers)


def test_what_a_stage_overwrites_comes_to_both_forwards_as_it_was() -> None:
    def run(what: ForwardInputs) -> tuple[torch.Tensor, ...]:
        mask, column = what.inputs[1], what.columns["x"]
        assert mask is not None
        mask.mul_(2)
        column.add_(1)
        return (what.inputs[0] * mask * column,)  # type: ignore[operator]

    second = Recomputation(0)
    for _ in range(3):
        what = ForwardInputs([leaf(2.0), torch.ones(1)], {"x": torch.ones(1)}, {})
        outputs, found = twice(second, run, what)
        assert float(outputs[0]) == float(found[0]) == 2.0 * 2 * 2


def test_a_change_that_comes_later_is_refused_by_name() -> None:
    calls: list[int] = []

    def run(what: ForwardInputs) -> tuple[torch.Tensor, ...]:
        calls.append(1)
        if len(calls) > 2:
            what.buffers["late"].add_(1)
        return (what.inputs[0] * 1,)  # type: ignore[operator]

    second, buffers = Recomputation(2), {"late": torch.zeros(1)}
    twice(second, run, given([leaf(1.0)], **buffers))
    with pytest.raises(StageError) as caught:
        second.first(run, given([leaf(1.0)], **buffers))
    assert str(caught.value) == (
        "Stage 2 changes buffer 'late' in some micro-batches and not in others, so it cannot be recomputed. Set "
        "recompute='never', or leave this stage out of recompute."
    )


def test_outputs_that_lose_their_gradient_are_refused() -> None:
    calls: list[int] = []

    def run(what: ForwardInputs) -> tuple[torch.Tensor, ...]:
        calls.append(1)
        x = what.inputs[0] * 1  # type: ignore[operator]
        return (x if len(calls) < 4 else x.detach(),)

    second = Recomputation(1)
    twice(second, run, given([leaf(1.0)]))
    _, again = second.first(run, given([leaf(1.0)]))
    with pytest.raises(StageError, match=r"^Stage 1 has outputs that require a gradient in some micro-batches and not"):
        again()
