"""The same name is the same run: what differs is told line by line, and taken over only where somebody says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from raypipe import PipelineTrainer, Result, load_state_dict
from raypipe.errors import CheckpointError, ConfigError
from raypipe.prepare.identity import optimizer_labels
from raypipe.run.same_run import differences
from tests.exactness import unequal
from tests.trainers import trainer_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

SAMPLES, BATCH, SAVED, STEPS = 24, 8, 4, 7


class Net(nn.Module):
    def __init__(self, width: int = 6, *, gelu: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, width), nn.Linear(width, 3)
        self.gelu = gelu

    def extra_repr(self) -> str:  # by which captures of the two are told apart
        return f"gelu={self.gelu}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.one(x)
        return self.two(nn.functional.gelu(inner) if self.gelu else inner.relu())


def net(**given: Any) -> Net:
    torch.manual_seed(3)
    return Net(**given)


def rows(seed: int = 5, samples: int = SAMPLES) -> torch.utils.data.TensorDataset:
    made = torch.Generator().manual_seed(seed)
    x, y = torch.randn(samples, 5, generator=made), torch.randint(3, (samples,), generator=made)
    return torch.utils.data.TensorDataset(x, y)


def sgd(named: Any, lr: float = 0.1, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=lr, momentum=0.9, **more)


def by_layer(named: Any, lrs: tuple[float, float] = (0.1, 0.2)) -> torch.optim.Optimizer:
    """A group for each layer, as far as a stage has them."""
    groups = [[p for name, p in named if name.startswith(layer)] for layer in ("one", "two")]
    return torch.optim.AdamW([{"params": g, "lr": lr} for g, lr in zip(groups, lrs, strict=True) if g])


def fit(folder: Path, steps: int, *, config: dict[str, Any] | None = None, **given: Any) -> Result:
    given = {"optimizer": sgd, "train_data": rows(), "num_microbatches": 2} | (config or {}) | given
    trainer = trainer_of(given.pop("model", None) or net(), folder, **given)
    return trainer.fit(num_steps=steps, local=True, progress=False)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    fit(folder, SAVED, lr_scheduler=partial(lr_scheduler.StepLR, step_size=2))
    return folder


@pytest.fixture
def again(begun: Path, tmp_path: Path) -> Callable[..., Result]:
    """Fit in a copy of the folder of a run of SAVED steps."""
    shutil.copytree(begun, tmp_path / "copy")
    stepped = partial(lr_scheduler.StepLR, step_size=2)
    return partial(fit, tmp_path / "copy", lr_scheduler=stepped)


def five_fold(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 5 * nn.functional.cross_entropy(output, target)


FREE = {
    "learning rate of group 0: was 0.1, is 0.05": {"optimizer": partial(sgd, lr=0.05)},
    "weight_decay of group 0: was 0, is 0.5": {"optimizer": partial(sgd, weight_decay=0.5)},
    "step_size of the lr_scheduler: was 2, is 3": {"lr_scheduler": partial(lr_scheduler.StepLR, step_size=3)},
    "lr_scheduler: was StepLR, is LinearLR": {"lr_scheduler": lr_scheduler.LinearLR},
    "max_grad_norm: was None, is 0.5": {"config": {"max_grad_norm": 0.5}},
    "schedule: was synchronous, is 2bw": {"config": {"schedule": "2bw"}},
    "codec_forward: was none, is bf16": {"config": {"codec_forward": "bf16"}},
}  # fmt: skip
FIXED = {
    "seed: was 0, is 1": {"config": {"seed": 1}},
    "minibatch_size: was 8, is 6": {"config": {"minibatch_size": 6}},
    "num_microbatches: was 2, is 4": {"config": {"num_microbatches": 4}},
    "loss_fn: was cross_entropy, is five_fold": {"loss_fn": five_fold},
    "optimizer: was SGD, is AdamW": {"optimizer": lambda named: torch.optim.AdamW(named, lr=0.1)},
    "train_data, number of samples: was 24, is 32": {"train_data": rows(samples=32)},
    "train_data, sample 0, column 0: another content": {"train_data": rows(seed=6)},
    "parameter 'one.weight': was float32 [6, 5], is float32 [8, 5]": {"model": net(width=8)},
    "gelu of Net: was False, is True": {"model": net(gelu=True)},
}


@pytest.mark.parametrize("line", FREE)
def test_what_may_change_is_refused_until_it_is_taken_over(line: str, again: Callable[..., Result]) -> None:
    for steps in (SAVED, STEPS):  # finished as it is, and with more to do
        with pytest.raises(ConfigError) as refused:
            again(steps, **FREE[line])
        assert f"\n  {line}\n" in str(refused.value)
        assert "resume=True" in str(refused.value)
        assert f"has done {SAVED} steps" in str(refused.value)
    result = again(STEPS, resume=True, **FREE[line])
    assert len(result.records) == STEPS
    events = [json.loads(text) for text in (Path(result.path) / "events.jsonl").read_text().splitlines()]
    assert line in [event["reason"] for event in events if event["decision"] == "change"]
    assert len(again(STEPS, **FREE[line]).records) == STEPS, "now it is what the run is"


@pytest.mark.parametrize("line", FIXED)
@pytest.mark.parametrize("resume", [None, True])
def test_what_makes_another_run_is_always_refused(line: str, resume: bool | None, again: Callable[..., Result]) -> None:
    with pytest.raises(ConfigError) as refused:
        again(STEPS, resume=resume, **FIXED[line])
    assert f"\n  {line}\n" in str(refused.value)
    assert "cannot change" in str(refused.value)
    assert len(again(STEPS).records) == STEPS, "the refusal left it as it was"


def test_other_frozen_parameters_begin_a_run_from_the_weights_of_this_one(again: Callable[..., Result]) -> None:
    frozen = net()
    frozen.one.requires_grad_(False)
    with pytest.raises(
        ConfigError, match=r'PipelineTrainer\(\.\.\., init_from=".*", run_config=.*name="run-2"\)'
    ) as refused:
        again(STEPS, model=frozen)
    begun_from = str(refused.value).split('init_from="')[1].split('"')[0]
    settings = SimpleNamespace(name="run-2", storage_path=str(Path(begun_from).parent))
    assert len(again(1, model=frozen, init_from=begun_from, run_config=settings).records) == 1


def test_each_difference_has_a_line_and_no_other(again: Callable[..., Result]) -> None:
    with pytest.raises(ConfigError) as refused:
        again(STEPS, optimizer=partial(sgd, lr=0.05), config={"max_grad_norm": 1.0}, loss_fn=five_fold)
    assert str(refused.value).splitlines()[1:-1] == [
        "  loss_fn: was cross_entropy, is five_fold",
        "  max_grad_norm: was None, is 1.0",
        "  learning rate of group 0: was 0.1, is 0.05",
    ]


def test_workers_and_order_are_no_difference(again: Callable[..., Result], tmp_path: Path) -> None:
    plan = {"num_stages": 1, "schedule": "gpipe", "checkpoint_interval_steps": 2}
    one = again(STEPS, config=plan)
    whole = fit(tmp_path / "whole", STEPS, lr_scheduler=partial(lr_scheduler.StepLR, step_size=2))
    assert [r.loss for r in one.records] == [r.loss for r in whole.records]


@pytest.mark.parametrize("resume", [None, True])
def test_fewer_steps_than_were_done_are_refused(resume: bool | None, again: Callable[..., Result]) -> None:
    with pytest.raises(ConfigError, match=f"has done {SAVED} steps and num_steps={SAVED - 1} is less"):
        again(SAVED - 1, resume=resume)


def test_nothing_is_left_to_train_with_what_is_new(again: Callable[..., Result]) -> None:
    with pytest.raises(ConfigError, match="nothing would be trained with what differs:\n  learning rate of group 0"):
        again(SAVED, resume=True, optimizer=partial(sgd, lr=0.05))


def test_a_new_folder(again: Callable[..., Result], tmp_path: Path) -> None:
    kept = (tmp_path / "copy/run/settings.json").read_bytes()
    names = [Path(again(2, resume=False, optimizer=partial(sgd, lr=lr)).path).name for lr in (0.05, 0.1)]
    assert names == ["run-2", "run-3"]
    assert (tmp_path / "copy/run/settings.json").read_bytes() == kept
    config = (tmp_path / "copy/run-2/config.yaml").read_text()
    assert "name: run-2" in config


def test_resume_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="resume=True is not possible"):
        PipelineTrainer(net(), optimizer=sgd, train_data=rows(), resume=True)
    with pytest.raises(ConfigError, match="resume='auto' is not possible"):
        PipelineTrainer(net(), optimizer=sgd, train_data=rows(), resume="auto")  # type: ignore[arg-type]


def test_a_folder_of_an_older_release_goes_on(again: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "copy/run/settings.json").unlink()
    assert len(again(STEPS, config={"max_grad_norm": 0.5}).records) == STEPS
    with pytest.raises(ConfigError, match=r"max_grad_norm: was 0\.5, is None"):
        again(STEPS + 1)


def test_a_run_without_a_checkpoint_may_become_another(tmp_path: Path) -> None:
    """Nothing was trained that could go on: the first mistake of a script is no reason to think of a new name."""
    fit(tmp_path, SAVED)
    shutil.rmtree(tmp_path / "run/checkpoints")
    assert len(fit(tmp_path, 2, train_data=rows(seed=6), model=net(width=8)).records) == 2


def test_a_damaged_file_is_told(again: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "copy/run/settings.json").write_text('{"fixed": 3')
    with pytest.raises(ConfigError, match=r"settings\.json, which identifies the run, is damaged"):
        again(STEPS)


# -- The new learning rate takes effect: as in plain PyTorch ---------------------------------------------------------


def plain(
    steps: int, before: Callable[..., Any], after: Callable[..., Any], schedules: tuple[Any, Any]
) -> dict[str, torch.Tensor]:
    """A loop of plain PyTorch that makes its optimizer and scheduler anew after SAVED steps, and keeps the state."""
    model, data = net(), rows()
    order = samples_in_order(steps)
    optimizer = before(list(model.named_parameters()))
    scheduler = schedules[0](optimizer) if schedules[0] else None
    for step in range(steps):
        if step == SAVED:
            state = optimizer.state
            optimizer = after(list(model.named_parameters()))
            optimizer.state = state
            scheduler = schedules[1](optimizer) if schedules[1] else None
            for _ in range(SAVED if scheduler else 0):
                scheduler.step()
        optimizer.zero_grad()
        for half in order[step].split(BATCH // 2):
            x, y = data.tensors[0][half], data.tensors[1][half]
            (nn.functional.cross_entropy(model(x), y) * 0.5).backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def samples_in_order(steps: int) -> list[torch.Tensor]:
    from raypipe.data.open_data import open_data

    numbers = torch.utils.data.TensorDataset(torch.arange(SAMPLES))
    source, per_epoch = open_data(numbers, seed=0), SAMPLES // BATCH
    return [source.read(step // per_epoch, step % per_epoch * BATCH, BATCH, (0,))[0] for step in range(steps)]


STEP, COSINE = partial(lr_scheduler.StepLR, step_size=2, gamma=0.5), partial(lr_scheduler.CosineAnnealingLR, T_max=9)
WARM = partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: (step + 1) / 10)
CYCLE = partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=9)
ADAM = partial(torch.optim.AdamW, lr=0.01)


@pytest.mark.parametrize(
    ("before", "after", "schedules"),
    [
        (ADAM, partial(torch.optim.AdamW, lr=0.3, weight_decay=0.2, betas=(0.5, 0.9)), (None, None)),
        (by_layer, partial(by_layer, lrs=(0.1, 0.01)), (None, None)),
        (sgd, partial(sgd, lr=0.02), (COSINE, COSINE)),
        (sgd, sgd, (None, COSINE)),
        (sgd, sgd, (COSINE, None)),
        (sgd, partial(sgd, lr=0.3), (STEP, WARM)),
        (ADAM, ADAM, (STEP, CYCLE)),
    ],
)
def test_the_new_options_take_effect(before: Any, after: Any, schedules: Any, tmp_path: Path) -> None:
    fit(tmp_path, SAVED, optimizer=before, lr_scheduler=schedules[0])
    fit(tmp_path, STEPS, optimizer=after, lr_scheduler=schedules[1], resume=True, config={"num_stages": 1})
    expected, state = plain(STEPS, before, after, schedules), load_state_dict(tmp_path / "run")
    unchanged = plain(STEPS, before, before, (schedules[0], schedules[0]))
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)
    assert any(not torch.allclose(unchanged[name], value, rtol=1e-3) for name, value in state.items())


def test_a_crash_soon_after_keeps_the_new_learning_rate(tmp_path: Path) -> None:
    """resume=True, no checkpoint after it, then without resume: the checkpoint's own learning rate is the old one."""
    slow = partial(sgd, lr=0.02)
    for name in ("run", "straight"):
        fit(tmp_path, SAVED, run_config=SimpleNamespace(name=name, storage_path=str(tmp_path)))
        run = SimpleNamespace(name=name, storage_path=str(tmp_path))
        fit(tmp_path, STEPS, optimizer=slow, resume=True, run_config=run)
    shutil.rmtree(tmp_path / f"run/checkpoints/step_{STEPS:07d}")
    fit(tmp_path, STEPS, optimizer=slow)
    assert unequal(tmp_path / "run", tmp_path / "straight") == []


# -- Fingerprints ----------------------------------------------------------------------------------------------------


def test_a_function_of_the_step_shows_in_its_rates() -> None:
    named = list(net().named_parameters())

    def labels(function: Callable[[int], float]) -> dict[str, Any]:
        return optimizer_labels(named, sgd, partial(lr_scheduler.LambdaLR, lr_lambda=function))[1]

    one = labels(lambda step: 1 / (1 + step))
    assert differences(one, labels(lambda step: (step + 1) ** -1.0)) == {}
    lines = list(differences(one, labels(lambda step: 1 / (1 + step) if step < 100 else 0.0)).values())
    assert lines[0].startswith("learning rate of group 0 after 128 steps: was 0.000775")
    assert len(lines) == 4


def test_rows_that_are_rounded_differently_are_the_same(tmp_path: Path) -> None:
    fit(tmp_path, SAVED)
    x, y = rows().tensors
    fit(tmp_path, STEPS, train_data=torch.utils.data.TensorDataset(x * (1 + 1e-6), y))
    x = x.clone()
    x[:, [0, 1]] = x[:, [1, 0]]
    with pytest.raises(ConfigError, match="column 0: another content"):
        fit(tmp_path, STEPS, train_data=torch.utils.data.TensorDataset(x, y))


def test_what_a_loss_holds_is_a_difference(tmp_path: Path) -> None:
    def weighted(last: float, smoothing: float) -> nn.Module:
        return nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, last]), label_smoothing=smoothing)

    fit(tmp_path, SAVED, loss_fn=weighted(3.0, 0.1))
    with pytest.raises(ConfigError) as refused:
        fit(tmp_path, STEPS, loss_fn=weighted(4.0, 0.2))
    for line in ("loss_fn, label_smoothing: was 0.1, is 0.2", "loss_fn, weight: another content"):
        assert f"\n  {line}\n" in str(refused.value)
    assert len(fit(tmp_path, STEPS, loss_fn=weighted(3.0, 0.1)).records) == STEPS


def test_an_option_that_needs_what_was_not_kept(tmp_path: Path) -> None:
    fit(tmp_path, SAVED, optimizer=ADAM)
    with pytest.raises(CheckpointError, match=r"AdamW needs 'max_exp_avg_sq' with its new options .*init_from="):
        fit(tmp_path, STEPS, optimizer=partial(ADAM, amsgrad=True), resume=True)
    assert len(fit(tmp_path, STEPS, optimizer=partial(ADAM, lr=0.02), resume=True).records) == STEPS
