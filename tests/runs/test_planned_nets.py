"""Large nets, planned from a profile and trained in stages, have the bits of plain PyTorch; so has an encoder-decoder.

VGG-16, ResNet-50 and DenseNet-121 with all their layers, thin; GPT-2 tied and not; T5, the encoder-decoder, whose
encoder's output goes to every layer of the decoder and so over every cut after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from jobs.lib.pipeline_nets import densenet121, gpt2, images, resnet50, sentences, vgg16
from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.testing import reference
from tests.exactness import Recorder
from tests.models import Records

pytestmark = pytest.mark.usefixtures("shared_captures")

STEPS = 2
ROUNDING = 1e-5
"""Of the largest movement of a parameter: what tied parameters may differ by, for sums over uses and over micro-batches
do not commute."""


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=2,
        dropout_rate=0.1, use_cache=False, decoder_start_token_id=0, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def translations(count: int) -> Records:
    drawn = torch.Generator().manual_seed(8)
    source = torch.randint(1, 32, (count, 7), generator=drawn)
    target = torch.randint(1, 32, (count, 5), generator=drawn)
    return Records([{"input_ids": x, "labels": y} for x, y in zip(source, target, strict=True)])


@dataclasses.dataclass(frozen=True)
class Planned:
    """A net with its data; ``tied`` where parameters are used more than once."""

    build: Callable[[], nn.Module]
    data: Any
    loss_fn: Any = None
    tied: bool = False


VISION = {
    "vgg16": lambda: vgg16(width=4),
    "resnet50": lambda: resnet50(width=4),
    "densenet121": lambda: densenet121(width=8),
}
CASES = {
    **{name: Planned(build, images(32, 16), functional.cross_entropy) for name, build in VISION.items()},
    "gpt2": Planned(lambda: gpt2(False, 16, 2, 32, 8), sentences(8, 16, 32)),
    "gpt2-tied": Planned(lambda: gpt2(True, 16, 2, 32, 8), sentences(8, 16, 32), tied=True),
    "t5": Planned(t5, translations(16), tied=True),
}


def made(case: Planned) -> nn.Module:
    torch.manual_seed(1)
    return case.build()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *((name, 2) for name in ("vgg16", "densenet121", "gpt2-tied")),
        *((name, 3) for name in ("resnet50", "gpt2", "t5")),
    ],
)
def test_a_planned_run_has_the_bits_of_plain_pytorch(name: str, workers: int, tmp_path: Path) -> None:
    if name in ("gpt2", "gpt2-tied", "t5"):
        transformers.logging.set_verbosity_error()
    case = CASES[name]
    ours, theirs = Recorder(torch.optim.SGD, lr=1e-2, momentum=0.9), Recorder(torch.optim.SGD, lr=1e-2, momentum=0.9)
    pipeline = PipelineConfig(num_stages="auto", minibatch_size=8, num_microbatches=4)
    trainer = PipelineTrainer(
        made(case),
        loss_fn=case.loss_fn,
        optimizer=ours,
        train_data=case.data,
        pipeline=pipeline,
        scaling_config=SimpleNamespace(num_workers=workers),
        run_config=SimpleNamespace(name="run", storage_path=str(tmp_path)),
    )
    plan = trainer._prepared().plan  # plan() refuses the lock of a Recorder, which threads share
    assert 1 < plan.partition.num_stages <= workers
    assert plan.prediction is not None
    assert plan.prediction.source == "measured"
    trainer.simulate()
    ours.steps.clear()  # those on copies, which were timed
    result = trainer.fit(num_steps=STEPS, local=True, progress=False)
    expected = reference(
        made(case), optimizer=theirs, train_data=case.data, num_steps=STEPS, loss_fn=case.loss_fn, pipeline=pipeline
    )
    found = load_state_dict(result.checkpoint)
    initial = dict(made(case).named_parameters())
    for parameter, trained in expected.parameters.items():
        movement = (trained - initial[parameter]).abs().max()
        assert movement > 0, parameter
        if case.tied:
            assert (found[parameter] - trained).abs().max() <= ROUNDING * movement, parameter
        else:
            assert torch.equal(found[parameter], trained), parameter
    if not case.tied:
        wrong = [
            f"{key} in step {step}"
            for step in range(STEPS)
            for key, gradient in expected.gradients[step].items()
            if not torch.equal(gradient, ours.steps[step][key])  # type: ignore[arg-type]
        ]
        assert wrong == []
    for buffer, value in expected.buffers.items():
        if buffer in found:
            assert torch.equal(found[buffer], value), buffer


@pytest.mark.parametrize(
    ("build", "parameters"), [(vgg16, 138_357_544), (resnet50, 25_557_032), (densenet121, 7_978_856)]
)
def test_the_nets_are_those_of_the_papers(build: Callable[..., nn.Module], parameters: int) -> None:
    """As many parameters as torchvision's, with ImageNet's thousand classes."""
    with torch.device("meta"):
        assert sum(p.numel() for p in build(classes=1000).parameters()) == parameters
