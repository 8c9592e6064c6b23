"""Operations that are more than one function of their inputs, each in a tiny model, against plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe.engine.stage.randomness import KeyedRandomness, RandomKey
from tests import operation_nets as nets
from tests.exactness import SHAPES, Shape, by_hand, captured, expected, faults, same_bits, train
from tests.models import Case, vectors

__all__ = ["OPERATIONS", "as_in_plain_pytorch", "sequences"]


def sequences(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(count, 5, 6, generator=drawn), torch.randint(0, 3, (count,), generator=drawn))


def _recurrent(name: str, kind: type[nn.RNNBase], **options: object) -> Case:
    return Case(name, lambda: nets.Recurrent(kind, **options), sequences, functional.cross_entropy)


def _vector(name: str, build: object) -> Case:
    return Case(name, build, vectors, functional.cross_entropy)  # type: ignore[arg-type]


OPERATIONS: dict[str, Case] = {
    found.name: found
    for found in (
        _recurrent("lstm-deep", nn.LSTM, num_layers=3, dropout=0.3),
        _recurrent("lstm-both-ways", nn.LSTM, num_layers=2, dropout=0.3, bidirectional=True, batch_first=False),
        _recurrent("lstm-projected", nn.LSTM, num_layers=2, dropout=0.3, proj_size=4),
        _recurrent("gru-deep", nn.GRU, num_layers=2, dropout=0.3, batch_first=False),
        _recurrent("rnn-deep", nn.RNN, num_layers=2, dropout=0.3, nonlinearity="relu"),
        Case("recurrent-sequential", nets.recurrent_sequential, sequences, functional.cross_entropy),
        _vector("reentrant", lambda: nets.Checkpointed(reentrant=True)),
        _vector("not-reentrant", lambda: nets.Checkpointed(reentrant=False)),
        _vector("not-checkpointed", lambda: nets.Checkpointed(reentrant=None)),
        _vector("sequential-reentrant", lambda: nets.checkpointed_sequential(reentrant=True)),
        _vector("sequential-not-reentrant", lambda: nets.checkpointed_sequential(reentrant=False)),
        _vector("sequential-not-checkpointed", lambda: nets.checkpointed_sequential(reentrant=None)),
        _vector("cumulative", nets.Cumulative),
        _vector("choosing", nets.Choosing),
        _vector("choosing-twice", nets.Nested),
        _vector(
            "choosing-sequential",
            lambda: nn.Sequential(
                nn.Linear(6, 6), nets.ChoosingBlock(6), nn.Tanh(), nets.ChoosingBlock(6), nn.Linear(6, 3)
            ),
        ),
        _vector("vmapped", nets.Vmapped),
        _vector("masked-elements", nets.Masked),
        _vector("nonzero-rows", nets.NonZero),
        _vector("normed", nets.Normed),
        _vector("normed-sequential", nets.normed),
    )
}


def as_in_plain_pytorch(
    name: str,
    first: Shape = SHAPES["ragged-microbatch"],
    *,
    stages: tuple[int, ...] = (1, 2, 3),
    split: bool = True,
) -> list[str]:
    """Trained in several stages and evaluated in two: everything that is not as in plain PyTorch.

    Args:
        first: shape of the data of these stages' runs.
        split: a run with split backwards too, of five micro-batches of two.
    """
    found = []
    runs = ((first, "1f1b", stages), (SHAPES["indivisible-by-k"], "zb-h1", (2,)))
    for shape, schedule, counts in runs[: 1 + split]:
        wanted = expected(name, shape, "sgd", max_grad_norm=0.5)
        for count in counts:
            run = train(name, count, shape, schedule, "sgd", max_grad_norm=0.5)
            found += [f"{schedule}, {count} stages: {fault}" for fault in faults(name, run, wanted)]
    model, _ = captured(name)
    x, key = OPERATIONS[name].data(3)[:3][0], RandomKey(1, 2, 3)
    was = model.training
    with torch.no_grad(), KeyedRandomness(key):
        if not same_bits(model.eval()(x), by_hand(name, 2, "eval", {0: x}, key)[0]):
            found.append("evaluation")
    model.train(was)
    return found
