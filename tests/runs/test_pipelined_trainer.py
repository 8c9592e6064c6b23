"""raypipe.hf.PipelinedTrainer beside transformers.Trainer: one changed line, and the same logs, events and weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe import PipelineConfig
from raypipe.engine.torch_settings import one_thread
from raypipe.errors import ConfigError, RaypipeError
from tests.exactness import unequal
from tests.runs.test_changing_sizes import padded

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

from raypipe.hf import PipelinedSeq2SeqTrainer, PipelinedTrainer  # noqa: E402
from raypipe.hf.training_arguments import HONOURED, REFUSED  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread_only")]

TWO_STAGES = {"pipeline": PipelineConfig(num_stages=2, partitioner="parameters"), "local": True}
TIMES = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos")
TIMES += ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


@pytest.fixture(name="one_thread_only")
def _one_thread_only() -> Iterator[None]:
    """Compute as stages do: the bias of a layer norm is summed in another order with more threads."""
    with one_thread():
        yield


BERT = {
    "num_labels": 3, "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**BERT))


def question_answerer() -> Any:
    torch.manual_seed(0)
    return transformers.BertForQuestionAnswering(transformers.BertConfig(**BERT | {"num_labels": 2}))


def gpt2() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2,
            n_head=2,
            n_embd=16,
            vocab_size=32,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            hidden_size=16,
            intermediate_size=24,
            vocab_size=32,
            max_position_embeddings=32,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def texts(count: int, *, classes: int = 0, longest: int = 12) -> list[dict[str, Any]]:
    """Rows of tokens of 6 to ``longest`` tokens, with a class or with the tokens as labels."""
    drawn = torch.Generator().manual_seed(4)
    rows = []
    for _ in range(count):
        length = int(torch.randint(6, longest + 1, (1,), generator=drawn)) if longest > 6 else 6
        ids = torch.randint(3, 32, (length,), generator=drawn).tolist()
        rows.append(
            {"input_ids": ids, "attention_mask": [1] * length, "labels": ids[0] % classes if classes else list(ids)}
        )
    return rows


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class Told(transformers.TrainerCallback):  # type: ignore[misc]
    """Callback that notes which of its methods are called, and at which step."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name != "on_prediction_step":
            return lambda args, state, control, **more: self.events.append((name, state.global_step))
        return super().__getattribute__(name)


def trainer_of(kind: Any, folder: Path, model: Any, rows: Any, held: Any = None, **more: Any) -> Any:
    """Make a trainer of a class; ``more`` are fields of TrainingArguments or arguments of the constructor."""
    arguments = transformers.TrainingArguments
    if issubclass(kind, transformers.Seq2SeqTrainer):
        arguments = transformers.Seq2SeqTrainingArguments
    fields = {field.name for field in dataclasses.fields(arguments)}
    usual = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2,
        "save_strategy": "no", "learning_rate": 1e-3, "weight_decay": 0.1, "warmup_steps": 2,
        "logging_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    args = arguments(str(folder), **usual | {name: value for name, value in more.items() if name in fields})
    others = {name: value for name, value in more.items() if name not in fields}
    if issubclass(kind, PipelinedTrainer):
        others = TWO_STAGES | others
    return kind(model, args, data_collator=padded, train_dataset=rows, eval_dataset=held, **others)


def both(
    folder: Path,
    make: Callable[[], Any],
    rows: Any,
    held: Any = None,
    *,
    kinds: tuple[Any, Any] = (transformers.Trainer, PipelinedTrainer),
    **more: Any,
) -> tuple[Any, Any]:
    """Train with Trainer and with PipelinedTrainer, and return both trainers."""
    trainers = []
    for kind in kinds:
        trainer = trainer_of(kind, folder / kind.__name__, make(), rows, held, **more)
        trainer.train()
        trainers.append(trainer)
    return trainers[0], trainers[1]


def history(trainer: Any) -> list[dict[str, float]]:
    """Return the logs without times and numbers of operations."""
    return [{name: x for name, x in log.items() if name not in TIMES} for log in trainer.state.log_history]


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (bert, {}),
        (gpt2, {"train_sampling_strategy": "sequential", "optim": "adafactor"}),
        (question_answerer, {"lr_scheduler_type": "cosine", "num_train_epochs": 1.5}),
        (bert, {"bf16": True, "gradient_checkpointing": True, "dataloader_drop_last": True}),
    ],
)
def test_losses_norms_rates_and_weights_have_the_bits_of_trainer(
    tmp_path: Path, make: Callable[[], Any], more: dict[str, Any]
) -> None:
    """Of models that use the number of items, ignore it, and do not take it."""
    rows = texts(21, classes=3 if make is bert else 0, longest=6)  # the last batch of an epoch is smaller
    if make is question_answerer:
        rows = [{**row, "start_positions": n % 3, "end_positions": n % 4} for n, row in enumerate(rows)]
        for row in rows:
            del row["labels"]
    plain, piped = both(tmp_path, make, rows, **more)
    assert history(piped) == history(plain)
    assert unequal(parameters(piped), parameters(plain)) == []


@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_batches_that_are_padded_to_their_longest_row(tmp_path: Path, make: Callable[[], Any]) -> None:
    """Trainer pads accumulated batches apart, and a pipeline pads the mini-batch: zeros are added in other places."""
    plain, piped = both(tmp_path, make, texts(21, classes=3 if make is bert else 0))
    for ours, theirs in zip(history(piped), history(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    theirs = parameters(plain)
    assert max(float((p - theirs[name]).abs().max()) for name, p in parameters(piped).items()) < 1e-6


@pytest.mark.parametrize("make", [bert, gpt2])
def test_replicas_of_stages_share_accumulated_batches(tmp_path: Path, make: Callable[[], Any]) -> None:
    rows = texts(21, classes=3 if make is bert else 0, longest=6)
    config = PipelineConfig(num_stages=2, num_replicas=2, partitioner="parameters")
    plain = trainer_of(transformers.Trainer, tmp_path / "plain", make(), rows, num_train_epochs=1)
    piped = trainer_of(PipelinedTrainer, tmp_path / "piped", make(), rows, num_train_epochs=1, pipeline=config)
    plain.train()
    piped.train()
    assert history(piped) == history(plain)
    assert unequal(parameters(piped), parameters(plain)) == []


def test_saved_folders_have_the_files_of_trainer(tmp_path: Path) -> None:
    """Of a model, and of a checkpoint but for the states of optimizer and generators, which the stages have."""
    plain, piped = both(tmp_path, bert, texts(16, classes=3, longest=6), save_strategy="epoch", num_train_epochs=1)
    files = []
    for trainer in (plain, piped):
        trainer.save_model()
        trainer.create_model_card(model_name="small")
        folder = Path(trainer.args.output_dir)
        files.append({str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()})
    theirs, ours = ({name: path for name, path in some.items() if "raypipe/" not in name} for some in files)
    states = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert set(theirs) - set(ours) == {f"checkpoint-2/{name}" for name in states}
    assert set(ours) <= set(theirs)
    for name in ours:
        if name.endswith((".safetensors", "config.json")):
            assert ours[name].read_bytes() == theirs[name].read_bytes(), name


def test_groups_by_length_are_those_of_trainer(tmp_path: Path) -> None:
    """The sampler draws from the global generator, from where it is when the training begins."""
    for make in (bert, gpt2):
        rows = texts(96, classes=3 if make is bert else 0)
        plain, piped = both(tmp_path, make, rows, train_sampling_strategy="group_by_length", num_train_epochs=3)
        for ours, theirs in zip(history(piped), history(plain), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


class Numbered(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Stream of rows in another order in each pass."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        yield from self.rows[self.epoch :] + self.rows[: self.epoch]


def test_a_stream_is_read_as_by_trainer(tmp_path: Path) -> None:
    """Passes end with whole mini-batches; the logged epoch then counts max_steps as one."""
    rows = Numbered(texts(24, classes=3, longest=6))
    plain, piped = both(tmp_path, bert, rows, max_steps=5)
    for ours, theirs in zip(history(piped), history(plain), strict=True):
        assert {**ours, "epoch": 0} == {**theirs, "epoch": 0}
    assert unequal(parameters(piped), parameters(plain)) == []
    with pytest.raises(RaypipeError, match=r"train_dataset ends after 21 items.*Set max_steps to 2"):
        trainer_of(PipelinedTrainer, tmp_path, bert(), Numbered(rows.rows[:21]), max_steps=5).train()


def test_a_stream_is_read_up_to_where_a_resumed_run_goes_on(tmp_path: Path) -> None:
    rows, more = texts(24, classes=3, longest=6), {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    for whole in both(tmp_path, bert, Numbered(rows), **more):
        again = trainer_of(type(whole), tmp_path / "again", bert(), Numbered(rows), **more)
        again.train(resume_from_checkpoint=str(Path(whole.args.output_dir, "checkpoint-2")))
        assert unequal(parameters(again), parameters(whole)) == []


def test_one_batch_per_step_is_cut_into_micro_batches(tmp_path: Path) -> None:
    more = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 1}
    config = PipelineConfig(num_stages=2, num_microbatches=4, partitioner="parameters")
    for make in (bert, gpt2):
        rows = texts(24, classes=3 if make is bert else 0)
        plain = trainer_of(transformers.Trainer, tmp_path / "plain", make(), rows, **more)
        piped = trainer_of(PipelinedTrainer, tmp_path / "piped", make(), rows, pipeline=config, **more)
        plain.train()
        piped.train()
        for ours, theirs in zip(history(piped), history(plain), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("overlaps", [False, True])
def test_evaluations_callbacks_and_checkpoints_are_those_of_trainer(tmp_path: Path, overlaps: bool) -> None:
    """Weights are evaluated while stages train on, as on Ray, or between two submissions of the run, as in threads."""
    rows, held = texts(24, classes=3, longest=6), texts(10, classes=3)
    told = {kind: Told() for kind in (transformers.Trainer, PipelinedTrainer)}
    trainers = []
    for kind, callback in told.items():
        trainer = trainer_of(
            kind, tmp_path / kind.__name__, bert(), rows, held, compute_metrics=accuracy, callbacks=[callback],
            eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, save_total_limit=2,
            load_best_model_at_end=True, metric_for_best_model="accuracy", learning_rate=0.02, logging_steps=3,
        )  # fmt: skip
        trainer._overlaps = overlaps
        trainer.train()
        trainers.append(trainer)
    plain, piped = trainers
    for ours, theirs in zip(history(piped), history(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)  # Trainer adds up batches in fp32, and a pipeline steps
    assert told[PipelinedTrainer].events == [e for e in told[transformers.Trainer].events if e[0] not in UNCALLED]
    saved = [sorted(path.name for path in (tmp_path / kind.__name__).glob("checkpoint-*")) for kind in told]
    assert saved[0] == saved[1]
    assert len(saved[0]) == 2
    assert Path(piped.state.best_model_checkpoint).name == Path(plain.state.best_model_checkpoint).name
    assert unequal(parameters(piped), parameters(plain)) == []
    loaded = type(piped.model).from_pretrained(tmp_path / "PipelinedTrainer" / saved[0][-1])
    again = type(piped.model).from_pretrained(tmp_path / "Trainer" / saved[0][-1])
    assert unequal(loaded.state_dict(), again.state_dict()) == []
    ours, theirs = piped.predict(held), plain.predict(held)
    assert ours.metrics["test_accuracy"] == theirs.metrics["test_accuracy"]
    assert (ours.predictions == theirs.predictions).all()


UNCALLED = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_resumed_run_equals_the_undisturbed_one(tmp_path: Path, overlaps: bool) -> None:
    rows = texts(21, classes=3)
    more = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 2, "save_total_limit": 2}
    whole = trainer_of(PipelinedTrainer, tmp_path / "whole", bert(), rows, **more)
    whole._overlaps = overlaps
    whole.train()
    again = trainer_of(PipelinedTrainer, tmp_path / "again", bert(), rows, callbacks=[Stops(4)], **more)
    again._overlaps = overlaps
    again.train()
    assert again.state.global_step == 4
    other = bert()
    torch.nn.init.ones_(other.classifier.weight)  # its weights are read from the checkpoint
    resumed = trainer_of(PipelinedTrainer, tmp_path / "again", other, rows, **more)
    resumed.train(resume_from_checkpoint=True)
    assert unequal(parameters(resumed), parameters(whole)) == []
    losses = [[log["loss"] for log in history(trainer) if "loss" in log] for trainer in (resumed, whole)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("optim", "overlaps"), [("adamw_torch", True), ("adafactor", False)])
def test_a_second_training_begins_with_the_optimizer_of_the_first(tmp_path: Path, overlaps: bool, optim: str) -> None:
    """Its state is that after the last step, also where the best weights were loaded since, or weights were changed."""
    rows = texts(21, classes=3, longest=6)
    best = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    best |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 0.05}
    trainers = []
    for kind in (transformers.Trainer, PipelinedTrainer):
        trainer = trainer_of(kind, tmp_path / kind.__name__, bert(), rows, rows[:6], optim=optim, **best)
        trainer._overlaps = overlaps
        trainer.train()
        trainer.args.num_train_epochs = 1
        trainer.train_dataset = rows[:17]
        trainer.train()
        with torch.no_grad():
            trainer.model.classifier.weight.mul_(2)
        trainer.train()
        trainers.append(trainer)
    plain, piped = trainers
    for ours, theirs in zip(history(piped), history(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert unequal(parameters(piped), parameters(plain)) == []
    assert not (tmp_path / "PipelinedTrainer" / "raypipe-before").exists()
    (tmp_path / "PipelinedTrainer" / "raypipe").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"cannot be read.*Set trainer\.optimizer = None"):
        piped.train()


def test_an_optimizer_with_state_from_elsewhere_is_refused(tmp_path: Path) -> None:
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    optimizer.step()
    trainer = trainer_of(PipelinedTrainer, tmp_path, model, texts(8, classes=3), optimizers=(optimizer, None))
    with pytest.raises(ConfigError, match="an optimizer with state"):
        trainer.train()
    trainer.optimizer = None  # for a new one
    trainer.train()


class Stops(transformers.TrainerCallback):  # type: ignore[misc]
    """Callback that ends the training when a checkpoint was saved after this many steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


class Asks(transformers.TrainerCallback):  # type: ignore[misc]
    """Callback that requests an evaluation and a checkpoint after step 3, and the end after step 5."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_evaluate = control.should_save = state.global_step == 3
        control.should_training_stop = state.global_step == 5


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_callback_may_request_an_evaluation_a_checkpoint_and_the_end_after_any_step(
    tmp_path: Path, overlaps: bool
) -> None:
    """Weights of any step are trained again from the checkpoint before it."""
    rows = texts(24, classes=3, longest=6)
    plain, piped = (
        trainer_of(kind, tmp_path / kind.__name__, bert(), rows, rows, callbacks=[Asks()], num_train_epochs=9)
        for kind in (transformers.Trainer, PipelinedTrainer)
    )
    piped._overlaps = overlaps
    plain.train()
    piped.train()
    assert history(piped) == history(plain)
    assert unequal(parameters(piped), parameters(plain)) == []
    folders = [tmp_path / kind / "checkpoint-3" for kind in ("Trainer", "PipelinedTrainer")]
    saved = [type(piped.model).from_pretrained(folder).state_dict() for folder in folders]
    assert unequal(*saved) == []


def marian() -> Any:
    torch.manual_seed(0)
    return transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32, dropout=0.0,
            pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=1,
        )
    )  # fmt: skip


def test_texts_are_generated_in_evaluations_as_by_seq2seq_trainer(tmp_path: Path) -> None:
    seen: list[Any] = []

    def metric(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {"length": float((prediction.predictions > 1).sum())}

    plain, piped = both(
        tmp_path, marian, texts(16, longest=6), texts(6), kinds=(transformers.Seq2SeqTrainer, PipelinedSeq2SeqTrainer),
        predict_with_generate=True, generation_max_length=9, generation_num_beams=2, eval_strategy="epoch",
        compute_metrics=metric, learning_rate=0.01,
    )  # fmt: skip
    for ours, theirs in zip(history(piped), history(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert [tokens.tolist() for tokens in seen[2:]] == [tokens.tolist() for tokens in seen[:2]]
    ours, theirs = (trainer.predict(texts(6), max_length=7, num_beams=1) for trainer in (piped, plain))
    assert ours.predictions.tolist() == theirs.predictions.tolist()


def test_every_field_of_training_arguments_is_honoured_or_refused() -> None:
    """A new release of transformers may add one: decide about it."""
    fields = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    assert fields == HONOURED | set(REFUSED)
    assert not HONOURED & set(REFUSED)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"torch_compile": True}, r"compile_stages"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "reduce_lr_on_plateau.*'linear'"),
        ({"pipeline": PipelineConfig(minibatch_size=5)}, "minibatch_size=5.*give 8.*per_device_train_batch_size"),
        ({"pipeline": PipelineConfig(num_microbatches=4)}, "num_microbatches=4.*gradient_accumulation_steps"),
        ({"train_sampling_strategy": "batch_rebalance"}, "BatchRebalanceSampler.*'random'"),
    ],
)
def test_what_a_pipeline_cannot_honour_is_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    rows = texts(8, classes=3)
    with pytest.raises(ConfigError, match=message):
        trainer_of(PipelinedTrainer, tmp_path, bert(), rows, rows, **more).train()


def test_methods_and_callbacks_that_would_never_be_called_are_refused(tmp_path: Path) -> None:
    class Own(PipelinedTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            raise NotImplementedError

    class Looks(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            raise NotImplementedError

    rows = texts(8, classes=3)
    with pytest.raises(ConfigError, match=r"Own.training_step is never called"):
        Own(bert(), None, data_collator=padded, train_dataset=rows, **TWO_STAGES)
    with pytest.raises(ConfigError, match="Looks has on_pre_optimizer_step"):
        trainer_of(PipelinedTrainer, tmp_path, bert(), rows, callbacks=[Looks()])
    trainer_of(
        PipelinedTrainer, tmp_path, bert(), rows, save_only_model=True, max_steps=1, save_strategy="steps"
    ).train()
    with pytest.raises(ConfigError, match="no state of a pipeline"):
        trainer_of(PipelinedTrainer, tmp_path, bert(), rows).train(resume_from_checkpoint=True)
