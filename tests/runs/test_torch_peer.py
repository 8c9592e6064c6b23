"""torch's own pipeline runtime executes our plans on gloo, and its gradients are ours, to the bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset

from raypipe.capture import capture
from raypipe.data.open_data import open_data
from raypipe.planner.schedule.text import to_csv
from raypipe.planner.search import build_schedule
from tests.exactness import Recorder, Shape, config_of, request_of, same_bits, train_stages
from tests.models import Case
from tests.runs import torch_peer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13."), reason=f"the runtime is private; this is torch {torch.__version__}"
    ),
]

PLANS = ("gpipe", "kfkb1", "kfkb2", "kfkb4", "slack", "zb-h1")
CUTS, WORLD, MICROBATCHES = (4, 8), 3, 5


def data(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(12)
    return TensorDataset(torch.randn(count, 6, generator=drawn), torch.randint(0, 3, (count,), generator=drawn))


def run_torch(folder: Path, world: int) -> None:
    """All ranks as processes, which end within four minutes whatever happens."""
    command = [sys.executable, torch_peer.__file__]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)


def test_gradients_are_those_of_torchs_runtime(tmp_path: Path) -> None:
    shape = Shape(2 * MICROBATCHES, 2 * MICROBATCHES, MICROBATCHES)
    found = Case("peer", torch_peer.model, data, torch_peer.loss)
    model = found.model()
    made = capture(model, data(2)[:2], (0, 1), torch_peer.loss)
    stages = made.programs(CUTS)
    inputs, targets = open_data(data(shape.samples), seed=0).read(0, 0, shape.samples, (0, 1))
    save_file({"inputs": inputs, "targets": targets}, tmp_path / "batch.safetensors")
    (tmp_path / "cuts.txt").write_text(" ".join(map(str, CUTS)))
    ours = {}
    for name in PLANS:
        config = config_of(shape, WORLD, name, loss_reduction="sum")
        plan = build_schedule(request_of(config, shape.samples), WORLD, MICROBATCHES, 0)
        (tmp_path / f"{name}-{MICROBATCHES}.csv").write_text(to_csv(plan))
        recorder = Recorder(torch.optim.SGD, lr=0.1)
        ours[name] = train_stages(found, stages, made.parameters, config, shape, recorder, 1)
    run_torch(tmp_path, WORLD)
    for name in PLANS:
        theirs = {}
        for rank in range(WORLD):
            theirs |= load_file(tmp_path / f"{name}-{MICROBATCHES}.{rank}.out")
        losses = theirs.pop("loss")
        assert theirs.keys() == ours[name].gradients[0].keys() == made.parameters.keys()
        assert [n for n in theirs if not same_bits(theirs[n], ours[name].gradients[0][n])] == []
        assert len(losses) == MICROBATCHES
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        assert float(total) == ours[name].losses[0]
