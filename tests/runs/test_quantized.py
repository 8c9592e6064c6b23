"""Adapters over frozen layers of bitsandbytes in 4 and 8 bits: trained in stages as in plain PyTorch, to the bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.api.export import export_safetensors
from raypipe.capture import capture
from raypipe.errors import ConfigError, RaypipeError
from raypipe.testing import reference
from tests.exactness import Recorder, same_bits, unequal
from tests.trainers import trainer_of

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is of the extra 'quantized'")
pytest.importorskip("peft")
pytestmark = pytest.mark.slow

STEPS = 5
FIELDS: dict[str, Any] = {"minibatch_size": 8, "num_microbatches": 2, "max_grad_norm": 1.0, "partitioner": "auto"}
KINDS = {
    "nf4-twice": partial(bnb.nn.Linear4bit, quant_type="nf4", compress_statistics=True),
    "fp4": partial(bnb.nn.Linear4bit, quant_type="fp4", compress_statistics=False),
    "int8": partial(bnb.nn.Linear8bitLt, has_fp16_weights=False),
}


def llama(hidden: int = 64, layers: int = 3) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def quantized(kind: str, model: Any) -> Any:
    """Replace the linear layers of the blocks, and quantize their weights."""
    for path, layer in list(model.model.named_modules()):
        if type(layer) is torch.nn.Linear:
            other = KINDS[kind](layer.in_features, layer.out_features, bias=False)
            other.load_state_dict(layer.state_dict())
            model.model.set_submodule(path, other.to("cpu"))
    setattr(model, "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit", True)
    return model


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:  # zeros, which hide the gradients of lora_A
            torch.nn.init.normal_(parameter, std=0.02)
    return tuned


def tuned(kind: str) -> Any:
    torch.manual_seed(0)
    return with_adapters(quantized(kind, llama()))


def rows(count: int = 40) -> list[dict[str, torch.Tensor]]:
    drawn = torch.randint(1, 64, (count, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row.clone()} for row in drawn]


def trainer(kind: str, folder: Path | None = None, **more: Any) -> PipelineTrainer:
    given = {"optimizer": adamw, "train_data": rows(), "loss_fn": None} | FIELDS | more
    return trainer_of(tuned(kind), folder, **given)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


@pytest.mark.parametrize(("kind", "num_stages"), [("nf4-twice", 3), ("fp4", 2), ("int8", 2)])
def test_stages_train_what_plain_pytorch_trains(kind: str, num_stages: int, tmp_path: Path) -> None:
    ours, theirs = Recorder(torch.optim.AdamW, lr=1e-2), Recorder(torch.optim.AdamW, lr=1e-2)
    run = trainer(kind, tmp_path, optimizer=ours, num_stages=num_stages)
    result = run.fit(num_steps=STEPS, local=True, progress=False)
    alone = reference(
        tuned(kind), optimizer=theirs, train_data=rows(), num_steps=STEPS,
        pipeline=PipelineConfig(**FIELDS | {"num_stages": num_stages}),
    )  # fmt: skip
    assert [record.loss for record in result.records] == list(alone.losses)
    assert [record.grad_norm for record in result.records] == list(alone.grad_norms)
    state = load_state_dict(result.checkpoint)
    assert unequal({name: state[name] for name in alone.parameters}, alone.parameters) == []
    assert len(ours.steps) == len(theirs.steps) == STEPS
    for one, other in zip(ours.steps, theirs.steps, strict=True):
        assert unequal_gradients(one, other) == []


def saved_quantized(folder: Path, seed: int = 0, *, twice: bool = True) -> Any:
    """Save a model with weights in 4 bits as transformers does, and return it."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    torch.manual_seed(seed)
    llama().save_pretrained(folder / "plain")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=twice)
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", quantization_config=config, dtype=torch.float32)
    model.save_pretrained(folder / "quantized")
    return model


def test_a_folder_with_quantized_weights_is_trained_as_the_model_that_was_saved(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved = saved_quantized(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", dtype=torch.float32)
    results = []
    for name, model in (("saved", saved), ("read", read)):
        torch.manual_seed(1)
        given = {"optimizer": adamw, "train_data": rows(), "loss_fn": None} | FIELDS
        run = trainer_of(with_adapters(model), tmp_path / name, **given)
        results.append(run.fit(num_steps=2, local=True, progress=False))
    assert [record.loss for record in results[0].records] == [record.loss for record in results[1].records]
    assert unequal(results[1].checkpoint, results[0].checkpoint) == []


def test_quantized_weights_as_init_from_are_refused_unless_the_model_has_their_scales(tmp_path: Path) -> None:
    folder, model = tmp_path / "quantized", saved_quantized(tmp_path, twice=False)
    given = {"optimizer": adamw, "loss_fn": None, "train_data": rows(), "init_from": str(folder)} | FIELDS
    trainer_of(model, tmp_path / "same", **given).plan()
    other = saved_quantized(tmp_path / "other", seed=1, twice=False)
    with pytest.raises(ConfigError, match=r"another '.*absmax' than the model.*Load the model from there"):
        trainer_of(other, tmp_path / "different", **given).plan()
    unlike = r"does not fit the model LlamaForCausalLM.*there are quantized: load the model from there"
    for more in ({}, {"weights_on": "workers"}):
        with pytest.raises(ConfigError, match=unlike):
            trainer_of(llama, tmp_path / "plain", **given | more).plan()


def unequal_gradients(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in {**one, **other} if not same_bits(one.get(name), other.get(name))]


def test_a_run_that_resumes_ends_at_the_same_bits(tmp_path: Path) -> None:
    whole = trainer("nf4-twice", tmp_path / "whole").fit(num_steps=4, local=True, progress=False)
    trainer("nf4-twice", tmp_path / "part").fit(num_steps=2, local=True, progress=False)
    resumed = trainer("nf4-twice", tmp_path / "part").fit(num_steps=4, local=True, progress=False)
    assert unequal(resumed.checkpoint, whole.checkpoint) == []


def test_a_checkpoint_holds_what_bitsandbytes_saves(tmp_path: Path) -> None:
    model = tuned("nf4-twice")
    run = trainer_of(model, tmp_path, optimizer=adamw, train_data=rows(), loss_fn=None, **FIELDS)
    result = run.fit(num_steps=1, local=True, progress=False)
    state, own = load_state_dict(result.checkpoint), model.state_dict()
    assert state.keys() == own.keys()
    frozen = [name for name in own if "lora_" not in name]
    assert unequal({name: state[name] for name in frozen}, {name: own[name] for name in frozen}) == []
    export_safetensors(result.checkpoint, tmp_path / "model.safetensors")
    from safetensors.torch import load_file

    prefix = "base_model.model.model.layers.0.self_attn.k_proj."
    stored = {name.removeprefix(prefix): x for name, x in load_file(tmp_path / "model.safetensors").items()}
    scales = {name: x for name, x in stored.items() if name.startswith("weight.")}
    again = bnb.nn.Params4bit.from_prequantized(stored["weight"], scales, device="cpu")
    layer = model.base_model.model.model.layers[0].self_attn.k_proj
    values = (bnb.functional.dequantize_4bit(one.data, one.quant_state) for one in (again, layer.weight))
    assert same_bits(*values)


def test_weights_are_planned_by_their_bytes() -> None:
    model = tuned("nf4-twice")
    example = rows(2)
    columns = {name: torch.stack([row[name] for row in example]) for name in example[0]}
    before = model.state_dict().keys()
    captured = capture(model, columns, tuple(columns), None)
    assert model.state_dict().keys() == before
    nodes = captured.graph.nodes
    layers = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    packed = sum(layer.weight.numel() for layer in layers)
    assert {layer.weight.dtype for layer in layers} == {torch.uint8}
    whole = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    assert sum(node.frozen_bytes for node in nodes) == packed + sum(p.nbytes for p in whole)
    scales = {name: x.nbytes for name, x in model.state_dict().items() if ".weight." in name}
    rotary = model.base_model.model.model.rotary_emb.inv_freq.nbytes
    offsets = 4 * len(layers)  # fp32, saved as a number
    assert sum(node.buffer_bytes for node in nodes) == sum(scales.values()) + offsets + rotary


def test_a_described_model_is_planned_as_one_with_weights() -> None:
    def described() -> Any:
        model = llama()
        for path, layer in list(model.model.named_modules()):
            if type(layer) is torch.nn.Linear:
                model.model.set_submodule(path, bnb.nn.LinearNF4(layer.in_features, layer.out_features, bias=False))
        setattr(model, "is_loaded_in_4bit", True)  # noqa: B010  (no attribute of the class)
        return with_adapters(model)

    fields: dict[str, Any] = {**FIELDS, "partitioner": ["base_model.model.model.layers.1"], "optimizer": adamw}
    without = trainer_of(described, train_data=rows(), loss_fn=None, weights_on="workers", **fields)
    given = trainer_of(tuned("nf4-twice"), train_data=rows(), loss_fn=None, **fields)
    bytes_of = [[node.frozen_bytes for node in one._prepared().opened.captured.graph.nodes] for one in (without, given)]
    assert bytes_of[0] == bytes_of[1]
    stages = [timeline_of(one) for one in (without, given)]
    planned, measured = ([stage.memory_bytes for stage in of_one] for of_one in stages)
    assert planned == pytest.approx(measured, rel=0.1)
    with pytest.raises(RaypipeError, match="workers cannot quantize"):
        without.fit(num_steps=1, local=True)


def timeline_of(run: PipelineTrainer) -> Any:
    """Predict a step; a profile of the model is measured for that, or estimated from its shapes."""
    predicted = run._prepare(run._continued(), predict=True).plan.prediction
    assert predicted is not None
    return predicted.stages


def refused(model: Any, fields: dict[str, Any] | None = None, **more: Any) -> str:
    given = {"optimizer": adamw, "train_data": rows(), "loss_fn": None} | FIELDS | (fields or {}) | more
    with pytest.raises(RaypipeError) as caught:
        trainer_of(model, **given).plan()
    return str(caught.value)


def test_what_cannot_be_honoured_is_refused() -> None:
    model = tuned("nf4-twice")
    layer = model.base_model.model.model.layers[0].self_attn.k_proj
    assert "precision='bf16-autocast'" in refused(model, {"precision": "bf16"})
    layer.weight.quant_state.packing_format_for_cpu = True
    assert "has been packed for inference" in refused(model)
    unmoved = llama()
    unmoved.model.layers[0].mlp.up_proj = bnb.nn.LinearNF4(64, 128, bias=False)
    assert "model.layers.0.mlp.up_proj is a LinearNF4 that is not quantized yet" in refused(unmoved)
    trained = llama()
    trained.model.layers[0].mlp.up_proj = bnb.nn.Linear8bitLt(64, 128, bias=False)
    assert "has_fp16_weights=True" in refused(trained)


@pytest.mark.parametrize("name", ["PagedAdamW", "AdamW8bit"])
def test_optimizers_of_bitsandbytes_are_refused(name: str) -> None:
    kind = getattr(bnb.optim, name)
    message = refused(tuned("nf4-twice"), optimizer=lambda named: kind([p for _, p in named], lr=1e-3))
    assert message.startswith("optimizer: ")
    assert f"which {name} keeps for" in message
    assert "Use an optimizer that keeps its state in tensors and numbers." in message


def test_evaluations_leave_the_weight_as_it_is(tmp_path: Path) -> None:
    model = tuned("nf4-twice")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    run = trainer_of(model, tmp_path, optimizer=adamw, train_data=rows(), eval_data=rows(8), loss_fn=None, **FIELDS)
    result = run.fit(num_steps=2, local=True, progress=False)
    assert result.metrics["step"] == 2
    assert unequal(model.state_dict(), before) == []
    model.eval()(**{name: x[None] for name, x in rows(1)[0].items()})
    assert unequal(model.state_dict(), before) == []
