"""Training in bf16 and fp16 equals plain PyTorch doing the same in one process, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.data.open_data import open_data
from raypipe.engine.io.checkpoint import open_checkpoint
from raypipe.engine.io.storage import Place
from raypipe.errors import CaptureError, ConfigError, StageError
from raypipe.testing import reference
from tests.exactness import Recorder, same_bits
from tests.nets import Late
from tests.runs.plain_precision import Plain, train_plain
from tests.trainers import adamw, trainer_of

pytestmark = pytest.mark.slow

STEPS, MINIBATCH, MICROBATCHES = 4, 8, 4
FIELDS: dict[str, Any] = {"minibatch_size": MINIBATCH, "num_microbatches": MICROBATCHES, "max_grad_norm": 0.5}


class Words(nn.Module):
    """A small language model: an embedding, attention, norms, a head; the type of h is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 23)
        self.register_buffer("places", torch.linspace(-1, 1, 16))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = self.embedding(words)
        h = self.blocks(h + self.places.to(h.dtype))
        return self.head(self.norm(h)).flatten(0, 1)


def words() -> nn.Module:
    torch.manual_seed(3)
    return Words()


def children() -> nn.Module:
    """Its children run as they are, untraced."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.ReLU(),
        nn.Linear(16, 3),
    )  # fmt: skip


def of_words(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.float(), target.flatten())


def of_classes(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target)


def data_of(model: nn.Module, samples: int = 40) -> TensorDataset:
    drawn = torch.Generator().manual_seed(5)
    if isinstance(model, nn.Sequential):
        return TensorDataset(torch.randn(samples, 6, generator=drawn), torch.randint(0, 3, (samples,), generator=drawn))
    tokens = torch.randint(0, 23, (samples, 6), generator=drawn)
    return TensorDataset(tokens[:, :5], tokens[:, 1:])


def microbatches_of(data: TensorDataset, steps: int = STEPS) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The samples of every micro-batch, in the order in which a run takes them."""
    order, size = open_data(data, seed=0), MINIBATCH // MICROBATCHES
    per_epoch = len(data) // MINIBATCH
    return [
        [
            tuple(order.read(step // per_epoch, step % per_epoch * MINIBATCH + at, size, (0, 1)))  # type: ignore[misc]
            for at in range(0, MINIBATCH, size)
        ]
        for step in range(steps)
    ]


def trainer(
    model: nn.Module,
    folder: Path,
    optimizer: Any = adamw,
    data: Any = None,
    eval_data: Any = None,
    scaling_config: Any = None,
    **fields: Any,
) -> PipelineTrainer:
    return trainer_of(
        model, folder, loss_fn=of_classes if isinstance(model, nn.Sequential) else of_words, optimizer=optimizer,
        train_data=data if data is not None else data_of(model), eval_data=eval_data, scaling_config=scaling_config,
        **FIELDS | fields,
    )  # fmt: skip


def faults(model: nn.Module, folder: Path, plain: Plain, steps: int = STEPS, **fields: Any) -> list[str]:
    """Train it in threads, with fields of PipelineConfig or a scaling_config; what differs from plain PyTorch."""
    recorder = Recorder(torch.optim.AdamW, lr=1e-2)
    result = trainer(model, folder, recorder, **fields).fit(num_steps=steps, local=True, progress=False)
    return differences(result, recorder, plain, folder)


def differences(result: Any, recorder: Recorder, plain: Plain, folder: Path) -> list[str]:
    records = result.records[-len(plain.losses) :]
    found = [] if list(map(repr, plain.losses)) == [repr(r.loss) for r in records] else ["losses"]
    found += [] if list(map(repr, plain.norms)) == [repr(r.grad_norm) for r in records] else ["norms"]
    found += [] if plain.skipped == [r.step for r in records if r.skipped] else ["skipped steps"]
    if len(recorder.steps) != len(plain.gradients):
        found.append(f"{len(recorder.steps)} steps")
    for step, (one, other) in enumerate(zip(recorder.steps, plain.gradients, strict=False)):
        found += [f"gradient of {name} in {step}" for name in other if not same_bits(_on_host(one[name]), other[name])]
    trained = load_state_dict(str(folder / "run"))
    found += [f"parameter {name}" for name, x in plain.parameters.items() if not same_bits(trained[name], x)]
    return found


def _on_host(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.cpu()


def plainly(model: nn.Module, precision: str, **more: Any) -> Plain:
    loss_fn = of_classes if isinstance(model, nn.Sequential) else of_words
    steps = microbatches_of(data_of(model))
    return train_plain(model, loss_fn, steps, adamw, precision, FIELDS["max_grad_norm"], **more)


SCHEDULES: Sequence[dict[str, Any]] = (
    {"schedule": "1f1b", "num_stages": 3},
    {"schedule": "zb-h1", "num_stages": 3},
    {"schedule": "gpipe", "recompute": "always"},
    {"schedule": "zb-h1", "recompute": "always"},
    {"schedule": "interleaved", "num_stages": 4, "recompute": "always"},
)


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("fields", SCHEDULES, ids=lambda f: "-".join(str(v) for v in f.values()))
@pytest.mark.parametrize("make", [words, children])
@pytest.mark.parametrize("precision", ["bf16", "bf16-autocast", "fp16"])
def test_equal_to_plain_pytorch(precision: str, make: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    model = make()
    plain = plainly(model, precision)
    assert len(plain.gradients) >= 2, "most steps are skipped"
    assert faults(model, tmp_path, plain, precision=precision, **fields) == []
    other = plainly(model, "fp32")
    assert other.losses != plain.losses, "the precision does nothing"


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_of_many_microbatches_are_added_up_in_fp32(precision: str, tmp_path: Path) -> None:
    """512 losses of 16 bits: a sum of as many bits would stop growing."""
    count, model = 512, children()
    data = data_of(model, count)
    fields = {"minibatch_size": count, "num_microbatches": count, "loss_reduction": "mean"}
    made = trainer(model, tmp_path, data=data, eval_data=data, precision=precision, **fields)
    result = made.fit(num_steps=1, local=True, progress=False)
    plain = train_plain(model, of_classes, [list(zip(*(x.split(1) for x in data.tensors), strict=True))], adamw, "fp32")
    assert result.records[0].loss == pytest.approx(plain.losses[0], rel=2e-3)
    with torch.no_grad():
        trained = model
        trained.load_state_dict(load_state_dict(str(tmp_path / "run")))
        expected = float(of_classes(trained(data.tensors[0]), data.tensors[1]))
    assert result.metrics["eval_loss"] == pytest.approx(expected, rel=2e-3)


class _Burst(torch.autograd.Function):
    """Numbers as they are; their gradient is infinite where one of them is large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.large = bool((x.abs() > 100.0).any())
        return x.clamp(-100.0, 100.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * float("inf") if ctx.large else gradient


class Burst(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Burst.apply(x)


def planted() -> nn.Module:
    """Only what learns before the burst, in the first stage, gets gradients that overflow."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 16), Burst(), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.ReLU(),
        nn.Linear(16, 3),
    )  # fmt: skip


def planted_data(steps: Sequence[int]) -> TensorDataset:
    """One large sample in the mini-batch of each of these steps."""
    data = data_of(nn.Sequential(), 80)
    order = open_data(TensorDataset(torch.arange(len(data))), seed=0)
    for step in steps:
        (numbers,) = order.read(0, step * MINIBATCH + 5, 1, (0,))
        data.tensors[0][int(numbers), 1] = 3000.0
    return data


def scales_in(folder: Path) -> set[tuple[float, int]]:
    """Of all optimizers' groups in the newest checkpoint: the loss scale, and steps since it moved."""
    newest = max((folder / "run" / "checkpoints").iterdir())
    manifest = open_checkpoint(Place.of(str(newest))).manifest
    groups = [group for entry in manifest.stages for group in entry.groups]
    return {(float(group.options["loss_scale"]), int(group.options["loss_scale_steps"])) for group in groups}


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_all_stages_skip_where_gradients_of_one_overflow(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without clipping, so that nothing but the scale asks for the norm of all; the run is cut in two by a resume."""
    monkeypatch.setattr("raypipe.engine.optim.state.GROWTH_INTERVAL", 2)
    model, data = planted(), planted_data([2, 5])
    fields = {"precision": "fp16", "schedule": schedule, "num_stages": 3, "max_grad_norm": None}
    plain = train_plain(
        model, of_classes, microbatches_of(data, 8), adamw, "fp16", init_scale=2.0**16, growth_interval=2
    )
    assert {2, 5} < set(plain.skipped)
    recorder = Recorder(torch.optim.AdamW, lr=1e-2)
    trainer(model, tmp_path, recorder, data, **fields).fit(num_steps=4, local=True, progress=False)
    again = Recorder(torch.optim.AdamW, lr=1e-2)
    result = trainer(model, tmp_path, again, data, **fields).fit(num_steps=8, local=True, progress=False)
    recorder.steps += again.steps
    assert differences(result, recorder, plain, tmp_path) == []
    ((scale, _),) = scales_in(tmp_path)
    assert scale == plain.scales[-1]


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(("make", "begins"), [(words, "norm"), (children, "4")])
def test_messages_are_counted_in_the_type_that_forwards_compute_in(make: Any, begins: str, tmp_path: Path) -> None:
    found = {}
    for precision in ("fp32", "bf16"):
        plan = trainer(make(), tmp_path, precision=precision, partitioner=[begins]).plan()
        found[precision] = [stage.input_bytes for stage in plan.partition.stages[1:]]
    assert found["bf16"] == [count // 2 for count in found["fp32"]]


@pytest.mark.usefixtures("shared_captures")
def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"precision='fp16'.*schedule='pipedream'.*precision='bf16'"):
        PipelineConfig(precision="fp16", schedule="pipedream")
    normed = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(CaptureError, match=r"'1.running_mean'.*precision='bf16-autocast'"):
        trainer(normed, tmp_path, precision="bf16").plan()
    with pytest.raises(CaptureError, match=r"'net.1.running_mean'.*precision='bf16-autocast'"):
        trainer(Traced(normed), tmp_path, precision="fp16", data=data_of(children())).plan()
    turned = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 3))  # writes by out=
    with pytest.raises(CaptureError, match=r"'net.0.parametrizations.weight.0._u'.*precision='bf16-autocast'"):
        trainer(Traced(turned), tmp_path, precision="bf16", data=data_of(children())).plan()
    with pytest.raises(CaptureError, match=r"'0.weight' is of torch.float64.*model.float\(\)"):
        trainer(children().double(), tmp_path, precision="bf16").plan()
    frozen = children()
    frozen[5:].requires_grad_(requires_grad=False)
    with pytest.raises(CaptureError, match=r"the loss scale .* last stage.*precision='bf16'"):
        trainer(frozen, tmp_path, precision="fp16", partitioner=["5"]).plan()


@pytest.mark.usefixtures("shared_captures")
def test_autocast_trains_fp32_beside_frozen_parameters_of_16_bits_and_other_buffers(tmp_path: Path) -> None:
    """As adapters beside a base that does not learn."""
    model = children()
    model[0].bfloat16().requires_grad_(requires_grad=False)
    model[-1].register_buffer("of_64_bits", torch.linspace(0, 1, 4, dtype=torch.float64))
    plain = plainly(model, "bf16-autocast")
    assert faults(model, tmp_path, plain, precision="bf16-autocast", num_stages=3) == []
    model[0].requires_grad_()
    with pytest.raises(CaptureError, match=r"'0.weight' is of torch.bfloat16.*model.float\(\)"):
        trainer(model, tmp_path, precision="bf16-autocast").plan()


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("is_counted", [True, False], ids=["torch counts it", "through data"])
def test_a_child_that_begins_to_change_a_buffer_of_16_bits_ends_the_run(is_counted: bool, tmp_path: Path) -> None:
    """The change would be lost with the copy; no graph tells of it, nor the trial of the first micro-batch."""
    model = children().insert(1, Late(is_counted=is_counted))
    with pytest.raises(StageError, match=r"changed the buffer '1\.count', which .*Take precision='bf16-autocast'"):
        trainer(model, tmp_path / "bf16", precision="bf16").fit(num_steps=3, local=True, progress=False)
    trainer(model, tmp_path, precision="bf16-autocast").fit(num_steps=3, local=True, progress=False)
    assert load_state_dict(str(tmp_path / "run"))["1.count"] == 2 * MICROBATCHES


@pytest.mark.usefixtures("shared_captures")
def test_the_model_stays_as_it_was(tmp_path: Path) -> None:
    """Capture and verify convert it, and give it back."""
    model = words()
    before = {name: (id(x), x.clone()) for name, x in model.state_dict(keep_vars=True).items()}
    trainer(model, tmp_path, precision="bf16").fit(num_steps=1, local=True, progress=False)
    after = model.state_dict(keep_vars=True)
    assert [n for n, (held, x) in before.items() if held != id(after[n]) or not same_bits(x, after[n])] == []


@pytest.mark.usefixtures("shared_captures")
def test_the_reference_is_of_fp32() -> None:
    with pytest.raises(ConfigError, match=r"precision='bf16'"):
        reference(
            children(), optimizer=adamw, train_data=data_of(children()), num_steps=1, loss_fn=of_classes,
            pipeline=PipelineConfig(precision="bf16", num_microbatches=4),
        )  # fmt: skip


class Traced(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


# The models below are traced anew in each test: equal modules of other attributes would share a capture.


class Switching(nn.Module):
    """As models of transformers do around rotary angles and routers: some products are not of 16 bits."""

    def __init__(self, *, switches: bool = True) -> None:
        super().__init__()
        self.one, self.again, self.other, self.switches = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3), switches
        self.register_buffer("table", torch.linspace(-1, 1, 48).view(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        with torch.no_grad(), torch.autocast(kind, enabled=not self.switches):
            angles = (x @ self.table).float()
        with torch.autocast(kind, enabled=not self.switches):
            h = torch.relu_(self.one(x) + angles.cos())
            with torch.autocast(kind, torch.bfloat16):  # on again, as it is around the whole
                h = h + self.again(h)
            h = functional.dropout(h, 0.0, self.training) * x.shape[1]
        return self.other(h)


class Recurrent(Switching):
    """What follows an LSTM depends on the type of what it returns."""

    def __init__(self, *, kind: str = "") -> None:
        super().__init__()
        self.kind, self.lstm, self.gru = kind, nn.LSTM(6, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = self.lstm(x[:, None])
        if self.kind == "gru":
            h, _ = self.gru(h)
        elif self.kind == "finfo":
            h = h + torch.finfo(h.dtype).eps
        else:
            h = torch.zeros(8, dtype=h.dtype) + h.float()
        return self.other(h[:, 0].float() if self.switches else h[:, 0].bfloat16().float())


@pytest.mark.parametrize(
    "fields", [{"partitioner": "prefix_sum"}, {"schedule": "zb-h1", "recompute": "always"}], ids=["profiled", "split"]
)
def test_where_a_model_switches_autocast_off_it_is_off(fields: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Switching()
    steps = microbatches_of(data_of(children()))
    plain = train_plain(model, of_words, steps, adamw, "bf16-autocast", FIELDS["max_grad_norm"])
    given = {"precision": "bf16-autocast", "data": data_of(children()), **fields}
    assert faults(model, tmp_path, plain, **given) == []
    model.switches = False
    other = train_plain(model, of_words, steps, adamw, "bf16-autocast", FIELDS["max_grad_norm"])
    assert other.losses != plain.losses, "it makes no difference"


class Choosing(Switching):
    """Switches autocast off in one of two ways."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def off(h: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.other(h.float())

        return torch.cond(x.sum() > 0, off, lambda h: self.other(h).float(), (self.one(x),))


def test_autocast_that_is_switched_off_in_one_of_two_ways_is_refused(tmp_path: Path) -> None:
    made = trainer(Choosing(), tmp_path, precision="bf16-autocast", data=data_of(children()))
    with pytest.raises(CaptureError, match=r"switches autocast off inside torch.cond.*precision='bf16'"):
        made.plan()


class Chosen(Switching):
    """Chooses where autocast is off; torch.export keeps no such region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.switches):
            h = torch.cond(h.sum() > 0, lambda z: z * 2, lambda z: z * 3, (h.float(),))
        return self.other(h)


@pytest.mark.parametrize(("switches", "precision"), [(True, "bf16-autocast"), (False, "fp32")])
def test_a_choice_within_a_region_is_refused(switches: bool, precision: str, tmp_path: Path) -> None:
    """In fp32 the region would switch autocast on, which is refused elsewhere by its region."""
    made = trainer(Chosen(switches=switches), tmp_path, precision=precision, data=data_of(children()))
    with pytest.raises(CaptureError, match=r"torch\.cond in a region of torch\.autocast at .*test_precision"):
        made.plan()


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="torch has no LSTM in bf16 on this processor"
)
@pytest.mark.parametrize("kind", ["gru", "finfo", "zeros"])
def test_what_follows_an_lstm_meets_its_real_type(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Recurrent(kind=kind)
    steps = microbatches_of(data_of(children()))
    plain = train_plain(model, of_words, steps, adamw, "bf16-autocast", FIELDS["max_grad_norm"])
    assert faults(model, tmp_path, plain, precision="bf16-autocast", data=data_of(children())) == []


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("on_nonfinite", ["skip", "stop"])
def test_a_frozen_stage_leaves_out_the_steps_that_the_others_leave_out_at_a_scale_of_one(
    on_nonfinite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not know the scale: a NaN in the data is no overflow for those that do."""
    monkeypatch.setattr("raypipe.engine.optim.state.FIRST_SCALE", 1.0)
    model, data = children(), planted_data([2, 5])
    data.tensors[0][data.tensors[0] == 3000.0] = float("nan")
    model[:3].requires_grad_(requires_grad=False)
    fields = {"precision": "fp16", "schedule": "1f1b", "partitioner": ["3"], "on_nonfinite": on_nonfinite}
    recorder = Recorder(torch.optim.AdamW, lr=1e-2)
    made = trainer(model, tmp_path, recorder, data, **fields)
    if on_nonfinite == "stop":
        with pytest.raises(StageError, match=r"Step 2: the loss is nan .* no stage took this step.* has nan at \[1\]"):
            made.fit(num_steps=8, local=True, progress=False)
        return
    result = made.fit(num_steps=8, local=True, progress=False)
    plain = train_plain(
        model, of_classes, microbatches_of(data, 8), adamw, "fp16", FIELDS["max_grad_norm"], init_scale=1.0
    )
    assert plain.skipped == [2, 5]
    assert differences(result, recorder, plain, tmp_path) == []
