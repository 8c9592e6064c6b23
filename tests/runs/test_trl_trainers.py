"""Pipelined trainers of TRL beside TRL's own: one changed line, and the same losses and weights."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import raypipe
from raypipe import PipelineConfig
from raypipe.engine.torch_settings import one_thread
from raypipe.errors import ConfigError, RaypipeError
from tests.exactness import unequal

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # trl sends its version to the hub otherwise
trl: Any = pytest.importorskip("trl")
datasets: Any = pytest.importorskip("datasets")
peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()

from raypipe.hf import (  # noqa: E402
    PipelinedDPOTrainer,
    PipelinedRewardTrainer,
    PipelinedSFTTrainer,
    PipelinedTrainer,
)
from raypipe.hf.training_arguments import declared_by  # noqa: E402
from raypipe.hf.trl_trainers import HONOURED, REFUSED  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread_only")]

CONFIGURATIONS = {
    trl.SFTTrainer: trl.SFTConfig,
    trl.DPOTrainer: trl.DPOConfig,
    trl.RewardTrainer: trl.RewardConfig,
}
TWO_STAGES = {"pipeline": PipelineConfig(num_stages=2, partitioner="parameters"), "local": True}
WORDS = ["<pad>", "<unk>", "<eos>", "user", "assistant", *(f"w{n}" for n in range(27))]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' %}{% generation %}{{ m.content }} <eos> "
    "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture(name="one_thread_only")
def _one_thread_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute as stages do: the bias of a layer norm is summed in another order with more threads."""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    with one_thread():
        yield


def tokenizer() -> Any:
    """Make a tokenizer whose tokens are the words between spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    )


def llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(llama_config(**more))


def llama_config(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=16, intermediate_size=24,
        vocab_size=32, max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=2, **more,
    )  # fmt: skip


def judge() -> Any:
    return transformers.LlamaForSequenceClassification(llama_config(num_labels=1))


def words(count: int, drawn: torch.Generator) -> str:
    return " ".join(WORDS[5 + int(torch.randint(27, (1,), generator=drawn))] for _ in range(count))


def rows(kind: str, count: int) -> Any:
    """Generate a dataset of one of the formats that TRL takes, with answers of several lengths."""
    drawn = torch.Generator().manual_seed(1)
    made = []
    for n in range(count):
        asked, one, two = words(3 + n % 3, drawn), words(2 + n % 4, drawn), words(2 + n % 3, drawn)
        made.append(
            {
                "text": {"text": f"{asked} {one} <eos>"},
                "completion": {"prompt": asked, "completion": f" {one} <eos>"},
                "chat": {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": one}]},
                "pairs": {"prompt": asked, "chosen": f" {one} <eos>", "rejected": f" {two} <eos>"},
                "margins": {"chosen": f"{asked} {one} <eos>", "rejected": f"{asked} {two} <eos>", "margin": n % 3},
            }[kind]
        )
    return datasets.Dataset.from_list(made)


def lora() -> dict[str, Any]:
    return {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}


def trainer_of(kind: Any, folder: Path, data: Any, model: Any = None, **more: Any) -> Any:
    """Make a trainer of a class; ``more`` are fields of its configuration or arguments of the constructor."""
    config = next(one for base, one in CONFIGURATIONS.items() if issubclass(kind, base))
    fields = {field.name for field in dataclasses.fields(config)}
    usual = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 0.1,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False, "optim": "sgd",
        "disable_tqdm": True, "activation_checkpointing": False, "max_length": 16,
    }  # fmt: skip
    args = config(str(folder), **usual | {name: value for name, value in more.items() if name in fields})
    others = {name: value for name, value in more.items() if name not in fields}
    if issubclass(kind, PipelinedTrainer):
        others = TWO_STAGES | others
    model = model or (judge() if config is trl.RewardConfig else llama())
    return kind(model, args=args, train_dataset=data, processing_class=tokenizer(), **others)


def losses(trainer: Any) -> list[dict[str, float]]:
    """Return what is logged of losses, norms and rates."""
    names = ["loss", "grad_norm", "learning_rate", "eval_loss", "eval_mean_token_accuracy", "eval_rewards/margins"]
    names += ["eval_accuracy", "eval_margin"]
    return [{name: log[name] for name in names if name in log} for log in trainer.state.log_history]


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in trainer.model.named_parameters()}


def trained(kinds: tuple[Any, Any], folder: Path, data: Any, others: Callable[[], Any] = dict, **more: Any) -> Any:
    """Train with TRL and in a pipeline; return both trainers, of which losses, norms and weights are equal."""
    plain, piped = (trainer_of(kind, folder / kind.__name__, data, **others(), **more) for kind in kinds)
    plain.train()
    piped.train()
    for ours, theirs in zip(losses(piped), losses(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    theirs = parameters(plain)
    assert max(float((p - theirs[name]).abs().max()) for name, p in parameters(piped).items()) < 1e-5
    return plain, piped


SFT = (trl.SFTTrainer, PipelinedSFTTrainer)
DPO = (trl.DPOTrainer, PipelinedDPOTrainer)
REWARD = (trl.RewardTrainer, PipelinedRewardTrainer)
LOSSES = [
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
"""All losses of DPO, which add up to one."""


@pytest.mark.parametrize(
    ("data", "others", "more"),
    [
        ("text", dict, {}),
        ("text", dict, {"packing": True}),
        ("text", dict, {"packing": True, "packing_strategy": "wrapped"}),
        ("completion", dict, {"loss_type": "dft", "gradient_accumulation_steps": 1}),
        ("completion", lora, {"activation_checkpointing": True}),
        ("chat", dict, {"assistant_only_loss": True}),
    ],
)
def test_sft_has_the_losses_and_weights_of_trl(tmp_path: Path, data: str, others: Any, more: dict[str, Any]) -> None:
    """Of packed documents, completions only, answers of assistants only, and adapters."""
    trained(SFT, tmp_path, rows(data, 40), others, **more)


@pytest.mark.parametrize(
    ("others", "more"),
    [
        (dict, {"precompute_ref_log_probs": True}),
        (lambda: {"ref_model": llama()}, {"loss_type": LOSSES, "label_smoothing": 0.1, "beta": 0.5}),
        (lora, {"loss_type": ["ipo"], "ld_alpha": 0.5, "activation_checkpointing": True}),
        (dict, {"precompute_ref_log_probs": True, "loss_type": ["aot"], "gradient_accumulation_steps": 1}),
    ],
)
def test_dpo_has_the_losses_and_weights_of_trl(tmp_path: Path, others: Any, more: dict[str, Any]) -> None:
    """Of references: the model before its training, a given one, and the one without adapters.

    The last loss sorts the pairs of a batch.
    """
    trained(DPO, tmp_path, rows("pairs", 24), others, **more)


@pytest.mark.parametrize(
    ("data", "others", "more"),
    [
        ("pairs", dict, {}),
        ("margins", dict, {"center_rewards_coefficient": 0.1, "gradient_accumulation_steps": 1}),
        ("pairs", lambda: {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")}, {}),
    ],
)
def test_reward_models_have_the_losses_and_weights_of_trl(
    tmp_path: Path, data: str, others: Any, more: dict[str, Any]
) -> None:
    """Of pairs of answers, with margins, and of adapters with a new head."""
    held = rows(data, 6)
    trained(REWARD, tmp_path, rows(data, 24), others, eval_dataset=held, eval_strategy="steps", eval_steps=2, **more)


def test_evaluations_checkpoints_and_a_resumed_run(tmp_path: Path) -> None:
    """TRL's own code evaluates and saves; entropy and token accuracy are those of evaluations only."""
    data, held = rows("completion", 24), rows("completion", 6)
    more = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    _, whole = trained(SFT, tmp_path, data, eval_dataset=held, **more)
    evaluated = [log for log in whole.state.log_history if "eval_loss" in log]
    assert [log["step"] for log in evaluated] == [2, 4]
    assert all("eval_entropy" in log for log in evaluated)
    saved = tmp_path / "PipelinedSFTTrainer" / "checkpoint-2"
    assert (saved / "model.safetensors").is_file()
    other = llama()
    torch.nn.init.ones_(other.lm_head.weight)  # its weights are read from the checkpoint
    resumed = trainer_of(PipelinedSFTTrainer, tmp_path / "again", data, other, eval_dataset=held, **more)
    resumed.train(resume_from_checkpoint=str(saved))
    assert unequal(parameters(resumed), parameters(whole)) == []


def test_a_subclass_may_have_its_own_loss(tmp_path: Path) -> None:
    def doubled(kind: Any) -> Any:
        def compute_loss(self: Any, model: Any, inputs: Any, **more: Any) -> Any:
            return 2 * kind.compute_loss(self, model, inputs, **more)

        return type(kind.__name__, (kind,), {"compute_loss": compute_loss})

    plain, piped = doubled(trl.SFTTrainer), doubled(PipelinedSFTTrainer)
    trained((plain, piped), tmp_path, rows("text", 16), max_steps=2)


class ReadsStep(PipelinedSFTTrainer):
    def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
        return super().compute_loss(model, inputs, **more) * (1 + self.state.global_step)


def test_a_loss_that_changes_from_step_to_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RaypipeError, match=r"ReadsStep.compute_loss reads self.state"):
        trainer_of(ReadsStep, tmp_path, rows("text", 8)).train()


def test_every_trainer_of_trl_is_pipelined_or_refused_by_name() -> None:
    """A new release of trl may add one: decide about it."""
    for name in (name for name in dir(trl) if name.endswith("Trainer")):
        if name not in {base.__name__ for base in CONFIGURATIONS}:
            with pytest.raises(AttributeError, match=f"raypipe.hf has no Pipelined{name}: TRL's trainer .* Pipelined"):
                getattr(raypipe.hf, f"Pipelined{name}")


def test_every_field_of_trls_arguments_is_honoured_or_refused() -> None:
    """A new release of trl may add one: decide about it."""
    declared = {
        field.name
        for config in CONFIGURATIONS.values()
        for field in dataclasses.fields(config)
        if declared_by(config, field.name, "trl")
    }
    assert declared == HONOURED | set(REFUSED)
    assert not HONOURED & set(REFUSED)


@pytest.mark.parametrize("already", [False, True])
def test_adapters_over_a_model_that_trl_loads_in_4_bits_train(tmp_path: Path, already: bool) -> None:
    """Quantized as it is read, or from a folder with weights in 4 bits."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is of the extra 'quantized'")
    model = str(tmp_path / "model")
    llama().save_pretrained(model)
    in_4_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    more = {"quantization_config": in_4_bits}
    if already:
        quantized = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **more)
        model, more = str(tmp_path / "quantized"), {}
        quantized.save_pretrained(model)
    trained(SFT, tmp_path, rows("text", 32), lora, model=model, **more)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (PipelinedSFTTrainer, {"activation_offloading": True}, r"SFTConfig\(activation_offloading=True\).*memory"),
        (PipelinedSFTTrainer, {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        (PipelinedSFTTrainer, {"label_smoothing_factor": 0.1}, "label_smoothing_factor.*Override compute_loss"),
        (PipelinedDPOTrainer, {"sync_ref_model": True}, r"DPOConfig\(sync_ref_model=True\).*before the training"),
        (PipelinedDPOTrainer, {"streamed": True}, "IterableDataset.*datasets.Dataset"),
        (PipelinedDPOTrainer, {"use_liger_kernel": True}, r"DPOConfig\(use_liger_kernel=True\)"),
    ],
)
def test_what_a_pipeline_cannot_honour_is_refused(
    tmp_path: Path, kind: Any, more: dict[str, Any], message: str
) -> None:
    data = rows("pairs" if kind is PipelinedDPOTrainer else "text", 8)
    data = data.to_iterable_dataset() if more.pop("streamed", False) else data
    with pytest.raises(ConfigError, match=message):
        trainer_of(kind, tmp_path, data, **more)


def test_a_missing_trl_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "raypipe.hf.trl_trainers")
    monkeypatch.delattr(raypipe.hf, "trl_trainers")
    with pytest.raises(ImportError, match=r"raypipe.hf.PipelinedSFTTrainer needs trl.*pip install 'raypipe\[hf\]'"):
        raypipe.hf.PipelinedSFTTrainer  # noqa: B018
