"""A new run begins with the weights of another run, of a checkpoint or of a file, or says why it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.api.export import export_safetensors
from raypipe.errors import CheckpointError, ConfigError, RaypipeError
from raypipe.runfile.run_file import read_runfile, to_yaml
from raypipe.testing import reference
from tests.exactness import same_bits
from tests.models import CASES
from tests.nets import Mlp
from tests.trainers import sgd

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("shared_captures")]

CONFIG = PipelineConfig(num_stages=2, minibatch_size=8, num_microbatches=4, partitioner="parameters")
OTHER = PipelineConfig(num_stages=3, minibatch_size=8, num_microbatches=2, partitioner="parameters", seed=3)
STEPS = 3


def made(folder: Path, run: str | None, case: str = "mlp", config: PipelineConfig = OTHER, **more: Any) -> Any:
    found = CASES[case]
    model = more.pop("model", None) or found.model()
    return PipelineTrainer(
        model, loss_fn=found.loss_fn, optimizer=sgd, train_data=found.data(40), pipeline=config,
        run_config=SimpleNamespace(name=run, storage_path=str(folder)), **more,
    )  # fmt: skip


def fit(trainer: Any, steps: int = STEPS) -> Any:
    return trainer.fit(num_steps=steps, local=True, progress=False)


def expected(case: str, state: dict[str, torch.Tensor]) -> Any:
    found = CASES[case]
    model = found.model()
    model.load_state_dict(state)
    return reference(
        model, loss_fn=found.loss_fn, optimizer=sgd, train_data=found.data(40), pipeline=OTHER, num_steps=STEPS
    )


def check_begins_with(case: str, state: dict[str, torch.Tensor], source: Any, folder: Path) -> None:
    model = CASES[case].model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = fit(made(folder, "new", case, model=model, init_from=source))
    wanted = expected(case, state)
    tolerance = 1e-6 if CASES[case].tied else 0.0  # sums over two uses are taken in another order
    assert result.records[0].loss == wanted.losses[0]
    assert [record.loss for record in result.records] == pytest.approx(wanted.losses, rel=tolerance, abs=0.0)
    found = load_state_dict(result.checkpoint)
    for name, tensor in {**wanted.parameters, **wanted.buffers}.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)
    assert all(same_bits(tensor, before[name]) for name, tensor in model.state_dict().items()), "the user's own model"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a model with batch statistics and of one with a tied parameter."""
    folder = tmp_path_factory.mktemp("pretrained")
    for case in ("cnn", "tied-lm"):
        fit(made(folder, case, case, CONFIG))
    return folder


def name_of_run(pretrained: Path, case: str, folder: Path) -> Any:
    (folder / case).symlink_to(pretrained / case)
    return case


def checkpoint(pretrained: Path, case: str, folder: Path) -> Any:
    return pretrained / case / "checkpoints" / f"step_{STEPS:07d}"


def torch_file(pretrained: Path, case: str, folder: Path) -> Any:
    torch.save(load_state_dict(pretrained / case), folder / "weights.pt")
    return folder / "weights.pt"


def safetensors_file(pretrained: Path, case: str, folder: Path) -> Any:
    """Shared tensors stand there once."""
    export_safetensors(pretrained / case, folder / "weights.safetensors")
    return str(folder / "weights.safetensors")


@pytest.mark.parametrize("case", ["cnn", "tied-lm"])
@pytest.mark.parametrize("source", [name_of_run, checkpoint, torch_file, safetensors_file])
def test_a_run_is_plain_pytorch_that_began_with_these_weights(
    source: Callable[[Path, str, Path], Any], case: str, pretrained: Path, tmp_path: Path
) -> None:
    state = load_state_dict(pretrained / case)
    check_begins_with(case, state, source(pretrained, case, tmp_path), tmp_path)


def test_other_precision_is_converted(pretrained: Path, tmp_path: Path) -> None:
    state = {n: t.double() if t.is_floating_point() else t for n, t in load_state_dict(pretrained / "cnn").items()}
    save_file(state, tmp_path / "double.safetensors")
    check_begins_with("cnn", load_state_dict(pretrained / "cnn"), tmp_path / "double.safetensors", tmp_path)


def test_a_run_that_goes_on_keeps_its_own_weights(pretrained: Path, tmp_path: Path) -> None:
    source = pretrained / "cnn"
    fit(made(tmp_path, "run", "cnn", init_from=source), 2)
    again = made(tmp_path, "run", "cnn", init_from=source)
    assert again.plan().notes[-1] == (
        f"init_from={str(source)!r} gave the run 'run' the weights that it began with. It goes on from its own "
        "checkpoint of step 2 now and takes nothing from there."
    )
    fit(again)
    wanted = expected("cnn", load_state_dict(source))
    found = load_state_dict(tmp_path / "run")
    assert all(same_bits(found[name], tensor) for name, tensor in wanted.parameters.items())
    anew = made(tmp_path, "run", "cnn", init_from=source, resume=False)
    assert anew.plan().notes[-1] == f"The run begins with the weights of init_from={str(source)!r}."


def test_a_run_that_goes_on_takes_no_other_weights(pretrained: Path, tmp_path: Path) -> None:
    fit(made(tmp_path, "run", "cnn"), 2)
    for resume in (None, True):
        with pytest.raises(ConfigError) as caught:
            fit(made(tmp_path, "run", "cnn", init_from=pretrained / "cnn", resume=resume))
        lines = str(caught.value).splitlines()
        assert lines[0] == f"The run 'run' in {tmp_path / 'run'} has done 2 steps as another run:"
        assert lines[1].startswith("  init_from: was None, is ")
        assert lines[2] == (
            "init_from cannot change in a run that has begun. Put it back, or give resume=False to begin anew in "
            "another folder, or another name; init_from='run' begins with the weights of this run."
        )
    result = fit(made(tmp_path, "run", "cnn", init_from="run", resume=False), 1)
    assert Path(result.path).name == "run-2"
    assert "init_from" in json.loads((tmp_path / "run-2" / "settings.json").read_text())["fixed"]


def test_its_run_file_says_so(pretrained: Path, tmp_path: Path) -> None:
    fit(made(tmp_path, "run", "cnn", init_from=pretrained / "cnn"), 1)
    assert f"init_from: {pretrained / 'cnn'}\n" in (tmp_path / "run" / "config.yaml").read_text()
    file = tmp_path / "run.yaml"
    parts = 'model: {target: "tests.nets:Mlp"}\noptimizer: {target: "torch.optim:SGD"}\ntrain_data: data.parquet\n'
    file.write_text(f"{parts}init_from: pretrained\n")
    assert "init_from: pretrained\n" in to_yaml(read_runfile(file))
    file.write_text(f"{parts}init_from: 3\n")
    with pytest.raises(ConfigError) as caught:
        read_runfile(file)
    assert str(caught.value) == (f"{file}, line 4: init_from: 3 is not possible; give the name of a run, or a path.")


def refusal(source: Any, folder: Path, model: nn.Module | None = None) -> str:
    trainer = PipelineTrainer(
        model or Mlp(), loss_fn=functional.cross_entropy, optimizer=sgd, train_data=CASES["mlp"].data(40),
        pipeline=CONFIG, run_config=SimpleNamespace(name="new", storage_path=str(folder)), init_from=source,
    )  # fmt: skip
    with pytest.raises(RaypipeError) as caught:
        trainer.plan()
    assert caught.value.__cause__ is None
    return str(caught.value)


def saved(folder: Path, content: Any) -> str:
    torch.save(content, folder / "weights.pt")
    return str(folder / "weights.pt")


def test_names_and_shapes_that_differ(tmp_path: Path) -> None:
    state = Mlp().state_dict()
    del state["layers.0.bias"], state["layers.1.weight"], state["layers.1.bias"], state["layers.2.bias"]
    state["layers.0.weight"] = torch.zeros(2, 3)
    state["layers.3.weight"] = state["layers.3.weight"].long()
    state["head"] = torch.zeros(3)
    source = saved(tmp_path, state)
    assert refusal(source, tmp_path) == (
        f"init_from={source!r} does not fit the model Mlp. Of its names are 4 missing there: 'layers.0.bias', "
        "'layers.1.weight', 'layers.1.bias' and 1 more; 1 not in the model: 'head'; 2 of another shape or kind: "
        "'layers.0.weight' (float32 [2, 3] there, float32 [9, 6] in the model), 'layers.3.weight' (int64 [3, 7] there, "
        "float32 [3, 7] in the model). Give weights that were saved from this model."
    )


def test_a_prefix_too_many(tmp_path: Path) -> None:
    source = saved(tmp_path, {f"module.{name}": tensor for name, tensor in Mlp().state_dict().items()})
    assert refusal(source, tmp_path).endswith(
        " All names there begin with 'module.', and without that most would be the same. Give weights that were saved "
        "from this model."
    )


def test_one_tensor_that_is_two_in_the_file(tmp_path: Path) -> None:
    model = CASES["tied-lm"].model()
    first, second = (name for name, _ in model.named_parameters(remove_duplicate=False) if _ is tied_of(model))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state[second] = state[second] + 1
    source = saved(tmp_path, state)
    with pytest.raises(ConfigError, match=f"1 one tensor in the model and two there: '{first}' and '{second}'"):
        made(tmp_path, "new", "tied-lm", init_from=source).plan()


def tied_of(model: nn.Module) -> torch.Tensor:
    seen: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            return parameter
        seen.add(id(parameter))
    raise AssertionError("nothing is tied")


SAVE = "Save the weights alone: torch.save(model.state_dict(), path)."


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    source = saved(tmp_path, {"model": Mlp().state_dict(), "epoch": 3})
    assert refusal(source, tmp_path) == (
        f"init_from={source!r} is no state_dict: 'model', 'epoch' are no tensors. {SAVE}"
    )
    source = saved(tmp_path, [torch.zeros(3)])
    assert refusal(source, tmp_path) == f"init_from={source!r} holds a list, which is no state_dict. {SAVE}"
    source = saved(tmp_path, Mlp())
    found = refusal(source, tmp_path)
    refused = (
        f"init_from={source!r} cannot be read with torch.load(..., weights_only=True), which runs no code that is in"
    )
    assert found == f"{refused} a file. It holds other objects than tensors, such as a whole module. {SAVE}"
    Path(source).write_bytes(b"nothing")
    assert refusal(source, tmp_path) == f"{refused} a file. It is damaged, or not torch's. {SAVE}"
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    source = str(tmp_path / "broken.safetensors")
    assert "not a valid safetensors file" in refusal(source, tmp_path)


def test_places_where_nothing_is(pretrained: Path, tmp_path: Path) -> None:
    for source in ("nobody", str(tmp_path / "nothing.pt"), "./nobody"):
        assert refusal(source, tmp_path) == (
            f"init_from={source!r}: there is no such file or folder, and no run of that name in {tmp_path}. Give the "
            "name of a run, the path of a run or one of its checkpoints, of a folder with model.safetensors or its "
            "index, or of a .pt or .safetensors file."
        )
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"^init_from: .*empty holds no complete checkpoint"):
        made(tmp_path, "new", init_from="empty").plan()
    with pytest.raises(ConfigError, match=r"^init_from is of type dict; give the name of a run"):
        made(tmp_path, "new", init_from={})


def test_a_model_without_numbers(tmp_path: Path) -> None:
    source = saved(tmp_path, Mlp().state_dict())
    assert refusal(source, tmp_path, Mlp().to("meta")) == (
        "init_from fills the parameters of the model, but some are on the meta device, which holds no numbers. Give a "
        "function that builds the model and set weights_on='workers', so that each worker fills its own, or build the "
        "model with numbers."
    )
