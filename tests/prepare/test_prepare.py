"""What only failed once a run had begun is said by plan(): optimizers, schedulers, losses, data."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import TensorDataset

from raypipe.capture.explain import Inputs, misfit_of_model
from raypipe.errors import CaptureError, DataError, PlanError, RaypipeError
from raypipe.preflight.optimizer import try_optimizers
from tests import nets
from tests.exactness import captured, programs
from tests.trainers import sgd, trainer_of

pytestmark = pytest.mark.engine

X, Y = torch.ones(32, 6), torch.arange(32) % 3
DATA = TensorDataset(X, Y)
STEP = "lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1000)."
ADAM = "optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4)."


def refusal(model: Any = None, **given: Any) -> RaypipeError:
    with pytest.raises(RaypipeError) as caught:
        trainer_of(nets.sequential() if model is None else model, **{"train_data": DATA} | given).plan()
    assert caught.value.__cause__ is None
    assert len(str(caught.value)) < 600
    return caught.value


def torch_says(mistake: Callable[[], Any]) -> str:
    """Torch's words, which are not the same in every release; our messages quote them."""
    with pytest.raises(RuntimeError) as caught:
        mistake()
    return str(caught.value)


class Strange:
    """Steps on a metric, and calls itself neither optimizer nor scheduler."""

    param_groups: tuple[Any, ...] = ()

    def step(self, metric: float) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}


class Explodes(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("the first step")


WHOLE = nets.sequential()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda named: None, f"optimizer returns NoneType instead of an optimizer. Let it return one: {ADAM}"),
        (
            lambda named: torch.optim.SGD(WHOLE.parameters(), lr=0.1),
            "optimizer makes SGD with parameters that it was not called with. Every stage trains copies of its own, so "
            f"take those that come as the argument, not model.parameters(): {ADAM}",
        ),
    ],
)
def test_optimizers_that_no_stage_can_use(optimizer: Callable[[Any], Any], message: str) -> None:
    assert str(refusal(optimizer=optimizer)) == message


def test_an_optimizer_that_one_stage_cannot_make_or_step() -> None:
    first = str(refusal(optimizer=lambda named: torch.optim.SGD([p for n, p in named if n[0] == "0"], lr=0.1)))
    assert first.startswith("optimizer cannot be made for stage 1, which trains ")
    assert "ValueError: optimizer got an empty parameter list. Every stage calls it with its own named" in first
    assert "Invalid learning rate: -1" in str(refusal(optimizer=lambda named: torch.optim.AdamW(named, lr=-1)))
    step = str(refusal(optimizer=lambda named: Explodes(named, lr=0.1)))
    assert step.startswith(f"optimizer: the step of Explodes fails on stage 0 at {__file__}:")
    assert "RuntimeError: the first step. It is called without arguments, and must step from the gradients" in step
    assert "missing 1 required positional argument: 'metric'" in str(refusal(optimizer=lambda named: Strange()))


def test_what_goes_by_sizes_is_tried_at_full_size() -> None:
    """Stand-ins have at most three places in a dimension."""
    sizes: list[int] = []

    def large(named: Any) -> torch.optim.Optimizer:
        sizes.append(max(p.numel() for _, p in named))
        return torch.optim.SGD([p for _, p in named if p.numel() > 9], lr=0.1)

    try_optimizers(programs("mlp", 2), captured("mlp")[1].parameters, large, None)
    assert sizes[0] <= 9 < sizes[1]


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (
            schedulers.StepLR(sgd(nets.sequential().parameters()), 3),
            "lr_scheduler is a StepLR, but every stage makes one for its own optimizer. Give a function of the "
            f"optimizer: {STEP}",
        ),
        (lambda o: None, f"lr_scheduler returns NoneType instead of a scheduler. Let it return one: {STEP}"),
    ],
)
def test_schedulers_that_no_stage_can_use(scheduler: Any, message: str) -> None:
    assert str(refusal(lr_scheduler=scheduler)) == message


@pytest.mark.parametrize("scheduler", [schedulers.ReduceLROnPlateau, lambda o: Strange()])
def test_schedulers_that_need_a_metric(scheduler: Any) -> None:
    message = str(refusal(lr_scheduler=scheduler))
    assert message.startswith("lr_scheduler: the step of ")
    assert "missing 1 required positional argument: 'metric" in message
    assert message.endswith("not from a metric or a loss that it computes again.")


def test_a_scheduler_that_cannot_be_made() -> None:
    message = str(refusal(lr_scheduler=lambda o: schedulers.OneCycleLR(o, max_lr=0.1)))
    assert message.startswith(f"lr_scheduler cannot be made for the optimizer of stage 0 at {__file__}:")
    assert "total_steps" in message
    assert message.endswith(STEP)


class SparseWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x).mean(1))


class SparseCalls(SparseWords):
    """The module does not say so, its forward does."""

    def __init__(self) -> None:
        super().__init__()
        self.words.sparse = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(functional.embedding(x, self.words.weight, sparse=True).mean(1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3)),
            "Sequential could not be captured: ValueError: Attempted to use an uninitialized parameter",
        ),
        (
            nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Linear(4, 3)),
            "The module '0', Embedding(scale_grad_by_freq=True), divides gradients by how often a word is in the "
            "batch, and a micro-batch has other numbers than its mini-batch. Set scale_grad_by_freq=False, or "
            "num_microbatches=1.",
        ),
        (
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(9, 3)),
            "The module '2', Linear(in_features=9, out_features=3, bias=True), cannot take its input, shape (2, 8) and "
            f"type float32: RuntimeError: {torch_says(lambda: nn.Linear(9, 3)(torch.zeros(2, 8)))}. Make it "
            "fit what comes before it.",
        ),
    ],
    ids=["lazy", "frequencies", "model"],
)
def test_models_that_would_fail_in_the_first_step(model: nn.Module, message: str) -> None:
    assert str(refusal(model)).startswith(message)


def test_word_counts_are_of_whole_mini_batches_as_long_as_those_stay_whole() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(8, 3))
    data = TensorDataset(torch.ones(32, 2, dtype=torch.int64), Y)
    trainer_of(model, train_data=data, num_microbatches=1).plan()
    said = refusal(model, train_data=data, num_microbatches=1, retune_microbatches=True)
    assert str(said).endswith("or num_microbatches=1 and retune_microbatches=False.")


class FromBytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x.float() / 255))


def test_who_makes_the_wrong_type_is_named() -> None:
    data = TensorDataset(torch.ones(32, 6, dtype=torch.uint8), Y)
    said = str(refusal(FromBytes(), train_data=data, precision="bf16"))
    assert "'one', Linear(in_features=6, out_features=8, bias=True), cannot take its input, shape" in said
    assert said.endswith("as in x.float(), or set precision='bf16-autocast'.")


def test_a_gradient_hook_without_gradients_is_named() -> None:
    def clamp(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient.clamp(-1, 1))

    model = nets.sequential()
    model[1].register_forward_hook(clamp)
    assert str(refusal(model)).endswith("register a hook only if the tensor has requires_grad.")


def test_autocast_around_a_call_is_named() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert str(refusal()).endswith("Call it outside, and set PipelineConfig(precision=...).")


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients_disturbs_nothing(around: Any, tmp_path: Path) -> None:
    trainer = trainer_of(nets.sequential(), tmp_path, train_data=DATA)
    with around():
        result = trainer.fit(num_steps=2, local=True, progress=False)
        assert len(trainer.predict(TensorDataset(X), result.checkpoint, local=True)) == len(X)


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.one(x)
        return (self.two(h), self.three(h)) if self.training else self.two(h)


def test_a_loss_of_training_alone_is_named_with_what_evaluation_gives() -> None:
    def of_both(output: Any, target: torch.Tensor) -> torch.Tensor:
        first, second = output
        return functional.cross_entropy(first, target) + functional.cross_entropy(second, target)

    said = str(refusal(Auxiliary(), loss_fn=of_both, eval_data=DATA))
    assert said.startswith("eval_data: loss_fn cannot take an output of shape (2, 3) and type float32")


class Traced(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_a_traced_batch_norm_does_not_train_on_a_single_sample() -> None:
    """Of which a graph knows nothing: its running variance would be nan."""
    model = Traced(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    said = refusal(model, train_data=TensorDataset(X[:29], Y[:29]))
    assert "in micro-batches of 2, has a micro-batch of one sample, and the model does not train on that." in str(said)


@pytest.mark.parametrize("made", [nn.Sequential, Traced])
def test_no_number_of_micro_batches_leaves_a_batch_norm_a_single_sample(made: type[nn.Module]) -> None:
    """Neither chosen by the planner nor turned to by the controller: 2 + 1 would be left of the last 3 samples."""
    model = made(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    fields = {"partitioner": "auto", "retune_microbatches": True, "schedule": "kfkb", "profile_budget_s": 1.0}
    trainer = trainer_of(model, train_data=TensorDataset(X[:27], Y[:27]), minibatch_size=24, **fields)
    assert [count for count, _ in trainer._prepared().planned.microbatch_seconds] == [1, 2, 3, 4, 6, 8]


@pytest.mark.parametrize("made", [SparseWords, SparseCalls])
def test_sparse_gradients_are_refused(made: type[nn.Module]) -> None:
    words = TensorDataset(torch.ones(32, 4, dtype=torch.int64), Y)
    assert str(refusal(made(), train_data=words)) == (
        "The gradient of 'words.weight' is sparse, and stages add gradients up as dense tensors. Use the operation "
        "with sparse=False: the same numbers, with a gradient as large as the weight."
    )


class Conditional(nets.Mlp):
    """Fine as plain PyTorch, which hooks on its modules would spoil."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cond(x.sum() > 0, lambda v: v * 2, lambda v: v * 3, (x,))
        return super().forward(x)


def test_a_model_that_runs_is_not_blamed() -> None:
    """Whether stages can hold it is for the capture to say."""
    output, misfit = misfit_of_model(Conditional(), Inputs((X[:2],), {}, (0,)))
    assert misfit is None
    assert output.shape == (2, 3)


def test_a_model_that_cannot_be_built() -> None:
    assert str(refusal(lambda: nn.Linear("six", 3))).startswith(f"model cannot be built at {__file__}:")  # type: ignore[arg-type]
    assert "missing 1 required positional argument: 'width'" in str(refusal(lambda width: nets.Mlp()))
    assert str(refusal(5)) == "model is an int; give an nn.Module, or a function without arguments that builds one."


def no_class() -> torch.Tensor:
    return functional.cross_entropy(torch.zeros(2, 3), torch.zeros(2))


@pytest.mark.parametrize("model", [nets.sequential, nets.Mlp], ids=["sequential", "traced"])
@pytest.mark.parametrize(
    ("loss_fn", "target", "message"),
    [
        (
            functional.cross_entropy, Y.float(),
            "loss_fn cannot take an output of shape (2, 3) and type float32 and column 1 of the data as target, shape "
            f"(2,) and type float32: RuntimeError: {torch_says(no_class)}. Convert it to the type that is "
            "expected, as in y.long().",
        ),
        (
            functional.cross_entropy, torch.full((32,), 7),
            "loss_fn cannot take an output of shape (2, 3) and type float32 and column 1 of the data as target, shape "
            "(2,) and type int64 from 7 to 7: IndexError: Target 7 is out of bounds. Number the classes of the target "
            "from 0, and give the model an output for each.",
        ),
        (
            lambda output, target: (output.argmax(1) == target).float().mean(), Y,
            "loss_fn returns a loss that no gradient flows through: detach(), no_grad, argmax, a comparison or a "
            "conversion to a number is between it and the parameters. Compute the loss from the model's output by "
            "differentiable operations.",
        ),
        (
            nn.CrossEntropyLoss(reduction="none"), Y,
            "loss_fn returns a tensor of shape (2,) for 2 samples instead of a scalar tensor. Let it reduce over the "
            "samples, as reduction='mean' does.",
        ),
    ],
)  # fmt: skip
def test_losses_that_would_fail_in_the_first_step(
    model: Callable[[], nn.Module], loss_fn: Any, target: torch.Tensor, message: str
) -> None:
    assert str(refusal(model(), loss_fn=loss_fn, train_data=TensorDataset(X, target))).endswith(message)


def test_eval_data_is_tried_too() -> None:
    assert str(refusal(eval_data=TensorDataset(X))) == (
        "eval_data has no column 1, but train_data has; it has 0. Give it the columns of train_data, in the same order."
    )
    narrow = refusal(eval_data=TensorDataset(torch.ones(8, 5), Y[:8]))
    assert type(narrow) is DataError
    assert str(narrow).startswith("eval_data: The module '0', Linear(in_features=6")
    assert "shape (2, 5) and type float32" in str(narrow)


def test_named_columns_of_eval_data_have_the_order_of_train_data() -> None:
    """With a loss_fn they are taken by their place: in another order the model would be called with the targets."""
    rows = [{"x": x, "y": y} for x, y in zip(X[:8], Y[:8], strict=True)]
    for other in ([{"y": row["y"], "x": row["x"]} for row in rows], [{"id": row["y"], **row} for row in rows]):
        said = str(refusal(train_data=rows, eval_data=other))
        assert said.startswith(f"eval_data has column {next(iter(other[0]))!r} where train_data has 'x'")


def test_too_few_places_say_why_activations_do_not_count() -> None:
    assert str(refusal(num_stages=9)) == (
        "9 stages need 8 places to cut, but the model has 3 between its operations with parameters; activations and "
        "others without parameters do not count, for a stage of them alone would have nothing to train. Set num_stages "
        "to at most 4."
    )


def test_a_model_with_a_lock_in_a_child() -> None:
    model = nets.sequential()
    model[0].lock = threading.Lock()  # type: ignore[assignment]
    assert str(refusal(model)) == (
        "Sequential could not be captured: TypeError: cannot pickle '_thread.lock' object. Change that line, or that "
        "module."
    )


def parquet(path: Path, rows: list[Any], kind: pa.DataType) -> str:
    table = pa.table({"x": pa.array(rows, kind), "y": list(range(len(rows)))})
    pq.write_table(table, path, row_group_size=4)
    return str(path)


def test_rows_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    good = [[1.0, 2.0]] * 12
    broken = parquet(tmp_path / "broken.parquet", good, pa.list_(pa.float32(), 2))
    whole = Path(broken).read_bytes()
    group = pq.read_metadata(broken).row_group(1).column(0)
    start = group.dictionary_page_offset or group.data_page_offset
    Path(broken).write_bytes(whole[:start] + b"\xff" * 24 + whole[start + 24 :])
    message = str(refusal(train_data=broken))
    assert message.startswith(f"Rows 4 to 7 of data file {broken} cannot be read: ")
    assert message.endswith("Write the file again, or take it out of the data.")


class Unlisted(nn.Sequential):
    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the index is not there")


def test_what_nobody_has_foreseen_is_one_paragraph_too(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(model=Unlisted(nn.Linear(6, 3)))
    assert type(error) is PlanError
    assert str(error).startswith(f"The run could not be planned at {__file__}:")
    assert str(error).endswith(
        '"raise RuntimeError("the index is not there")": RuntimeError: the index is not there. Look there first; if it '
        "is raypipe's mistake, RAYPIPE_DEBUG=1 shows the traceback to report."
    )
    monkeypatch.setenv("RAYPIPE_DEBUG", "1")
    with pytest.raises(PlanError) as caught:
        trainer_of(Unlisted(nn.Linear(6, 3)), loss_fn=None, train_data=DATA).plan()
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("good", [True, False])
def test_a_plan_changes_nothing(good: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8 if good else 9, 3)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    trainer = trainer_of(model, tmp_path, train_data=DATA, eval_data=DATA)
    with contextlib.nullcontext() if good else pytest.raises(CaptureError):
        trainer.plan()
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), drawn)
