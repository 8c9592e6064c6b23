"""TRL's SFTTrainer, DPOTrainer and RewardTrainer whose training loop is a pipeline of stages.

    trainer = trl.SFTTrainer(model, args, train_dataset=...)
    trainer = raypipe.hf.PipelinedSFTTrainer(model, args, train_dataset=..., pipeline=PipelineConfig(num_stages=2))

    dataset --> TRL's preparation and collator --> rows, the same number for each sample --> stages
    model + TRL's compute_loss --> a model that returns its own loss ----------------------> stages
    evaluations, checkpoint-N, model card  <-- TRL's own code, in this process

Stages compute what TRL's compute_loss differentiates. What it only measures (entropy, token accuracy, rewards) is in
the logs of evaluations, and not in those of training steps.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

from raypipe.data.item_randomness import own_generators
from raypipe.errors import ConfigError
from raypipe.hf.pipelined_trainer import PipelinedTrainer
from raypipe.hf.trainer_loss import first_items, loss_of, replace_forward
from raypipe.hf.training_arguments import declared_by

__all__ = ["PipelinedDPOTrainer", "PipelinedRewardTrainer", "PipelinedSFTTrainer"]

_MEMORY = "stages hold what they need. Give PipelineConfig(memory_limit_bytes=...), or leave it out"
REFUSED: Mapping[str, str] = {
    "activation_offloading": _MEMORY,
    "ref_model_mixup_alpha": "the reference does not change. Leave it out",
    "ref_model_sync_steps": "the reference does not change. Leave it out",
    "sync_ref_model": "log-probabilities of the reference are computed once, before the training. Leave it out",
    "torch_empty_cache_steps": _MEMORY,
    "use_liger_kernel": "stages trace the model's own layers. Leave it out",
}
"""Fields that TRL declares and that cannot be honoured -> reason and fix. Any value but the default is refused."""
HONOURED = frozenset(
    (
        "assistant_only_loss", "beta", "bf16", "center_rewards_coefficient", "chat_template_path",
        "completion_only_loss", "dataset_kwargs", "dataset_num_proc", "dataset_text_field", "disable_dropout",
        "discopop_tau", "eos_token", "eval_packing", "f_alpha_divergence_coef", "f_divergence_type",
        "gradient_checkpointing", "label_smoothing", "ld_alpha", "learning_rate", "logging_steps", "loss_type",
        "loss_weights", "lr_scheduler_kwargs", "max_length", "model_init_kwargs", "packing", "packing_strategy",
        "pad_to_multiple_of", "pad_token", "padding_free", "precompute_ref_batch_size", "precompute_ref_log_probs",
        "router_aux_loss_coef", "shuffle_dataset", "truncation_mode", "trust_remote_code", "use_weighting",
    )
)  # fmt: skip
"""Fields that TRL declares, with the effect that they have in TRL."""
_READ = ("_tp_size", "beta", "f_alpha_divergence_coef", "label_smoothing", "ld_alpha", "loss_types", "loss_weights")
"""Attributes that compute_loss of TRL's trainers reads beside flags; they do not change."""
_OWN = ("pipeline", "scaling_config", "failure_config", "local")


@dataclasses.dataclass(frozen=True, slots=True)
class RowPerBlock:
    """Collate function that gives each item a padded row of its own, where TRL's collator joins all items in one row.

    Positions begin at 0 in every document, and each token of padding has position 0: a model of transformers computes
    its attention mask from them if it gets none, so that tokens attend to their own document.
    """

    collate: Any

    def __call__(self, items: list[Any]) -> dict[str, torch.Tensor]:
        rows = [self.collate([item]) for item in items]
        filled = {"input_ids": 0, "labels": -100, "position_ids": 0}
        return {
            name: torch.nn.utils.rnn.pad_sequence([row[name][0] for row in rows], batch_first=True, padding_value=fill)
            for name, fill in filled.items()
        }


@dataclasses.dataclass(frozen=True, slots=True)
class RowPerPair:
    """Collate function that makes columns (b, 2, ...) of TRL's columns (2b, ...), which have the rejected answers last.

    Attributes:
        joined: names of these columns.
    """

    collate: Any
    joined: tuple[str, ...]

    def __call__(self, items: list[Any]) -> dict[str, torch.Tensor]:
        batch = dict(self.collate(items))
        return {**batch, **{name: torch.stack(batch[name].chunk(2), dim=1) for name in self.joined}}


class _Measured(float):
    """Number 0 in place of the metrics of TRL's compute_loss on the stages, and of what gathers and stores them."""

    device, num_processes, parallelism_config = torch.device("cpu"), 1, None

    def _itself(self, *_args: Any) -> _Measured:
        return self

    gather = gather_for_metrics = sum = mean = min = max = item = append = __getitem__ = _itself

    def __setitem__(self, _name: str, _value: Any) -> None:
        """Discard the value."""


class _TRLPipeline(PipelinedTrainer):
    """Common part of the pipelined trainers of TRL."""

    _configuration: type[Any]
    """Class of the argument ``args``."""
    _on_stages: Mapping[str, Any] = {"accelerator": _Measured(), "_metrics": _Measured(), "_total_train_tokens": 0.0}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = {name: kwargs.pop(name) for name in _OWN if name in kwargs}
        bound = inspect.signature(self._extends).bind(*args, **kwargs).arguments
        bound["args"] = self._checked(copy.copy(bound.get("args") or self._configuration("tmp_trainer")))
        if bound.get("compute_loss_func") is not None or bound["args"].label_smoothing_factor:
            raise ConfigError(
                "compute_loss_func= and label_smoothing_factor make TRL run the model twice for each batch, once "
                "without gradients. Override compute_loss in a subclass."
            )
        super().__init__(**bound, **own)
        if getattr(self, "_is_vision_dataset", False):
            raise ConfigError(
                "train_dataset has images, which TRL processes batch by batch to any number of patches, and stages "
                "need rows of samples. Train with raypipe.PipelineTrainer and a collate_fn of your own."
            )
        if getattr(self, "aux_loss_enabled", False):
            raise ConfigError(
                "The model adds the load balancing of its experts to the loss, which TRL computes over each batch. "
                f"Give {type(self.args).__name__}(router_aux_loss_coef=0.0)."
            )
        if hasattr(self.model, "disable_input_require_grads"):
            self.model.disable_input_require_grads()  # TRL adds a hook for checkpoints inside modules
        self._own_attributes -= frozenset(_READ)

    def _checked(self, args: Any) -> Any:
        """Return the arguments to train with; raise ConfigError for fields that a pipeline cannot honour."""
        for field in dataclasses.fields(args):
            name, value = field.name, getattr(args, field.name)
            if name not in HONOURED and declared_by(type(args), name, "trl") and value != field.default:
                why = REFUSED.get(name, "this release of raypipe has not been tested with it. Leave it out")
                raise ConfigError(f"{type(args).__name__}({name}={value!r}): {why}.")
        return args

    def _loss_of(self, loader: Any) -> tuple[Any, Any, Any]:
        collate: Any = RowPerBlock(loader.collate_fn) if getattr(self, "padding_free", False) else loader.collate_fn
        with own_generators():
            items = first_items(loader.dataset)
            batch = dict(collate(items))
        self._joined = tuple(name for name, column in batch.items() if len(column) == 2 * len(items))
        return loss_of(self, loader.dataset, RowPerPair(collate, self._joined) if self._joined else collate)

    def _stage_loss(self, model: Any, inputs: dict[str, Any], num_items: torch.Tensor | None) -> torch.Tensor:
        kind = type(model)

        def forward(self: Any, *args: Any, fused_lm_head: bool = False, **more: Any) -> Any:
            labels = more.pop("labels") if fused_lm_head else None
            outputs = kind.forward(self, *args, **more)
            return outputs if labels is None else _scores(outputs, labels)

        replace_forward(model, kind, forward)
        joined = {name: torch.cat(inputs[name].unbind(1)) for name in self._joined}
        return super()._stage_loss(model, {**inputs, **joined}, num_items)


def _scores(outputs: Any, labels: torch.Tensor) -> FusedCausalLMOutput:
    """Compute the output of TRL's fused head, which cannot be traced, from logits (b, length, vocabulary).

    Log-probabilities (b, length - 1) are 0 where the label is -100. What TRL only measures has wrong values.
    """
    logits, labels = outputs.logits[:, -labels.shape[1] : -1].float(), labels[:, 1:]
    counts = labels != -100
    picked = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    log_total = logits.logsumexp(-1)
    log_probs = (picked - log_total).masked_fill(~counts, 0)
    squares = (2 * logits.detach()).logsumexp(-1) - 2 * log_total.detach()
    return FusedCausalLMOutput(
        log_probs=log_probs,
        entropy=log_probs.detach(),
        log_sum_sq_probs=squares.masked_fill(~counts, 0),
        mean_logits=log_probs.detach(),
        is_top1=counts,
        label_mask=counts,
    )


class PipelinedSFTTrainer(_TRLPipeline, SFTTrainer):
    """TRL's SFTTrainer that trains a model in a pipeline of stages.

    Constructor, SFTConfig, preparation of the dataset, collator and loss are those of TRL. Arguments that a pipeline
    cannot honour are refused by name. Stages compute all logits of a micro-batch, which TRL avoids.

    Args:
        pipeline, scaling_config, failure_config, local: see PipelinedTrainer.
        args, kwargs: arguments of SFTTrainer.

    Raises:
        ConfigError: an argument cannot be honoured; the message names it and what to use instead.
    """

    _extends, _configuration = SFTTrainer, SFTConfig


class PipelinedDPOTrainer(_TRLPipeline, DPOTrainer):
    """TRL's DPOTrainer that trains a model in a pipeline of stages. A sample is a pair of answers.

    Constructor, DPOConfig, preparation of the dataset, collator and loss are those of TRL. The log-probabilities of the
    reference are computed before the training, in this process, as precompute_ref_log_probs=True does.

    Args:
        pipeline, scaling_config, failure_config, local: see PipelinedTrainer.
        args, kwargs: arguments of DPOTrainer.

    Raises:
        ConfigError: an argument cannot be honoured; the message names it and what to use instead.
    """

    _extends, _configuration = DPOTrainer, DPOConfig

    def _checked(self, args: Any) -> Any:
        args = super()._checked(args)
        args.precompute_ref_log_probs = True
        return args

    def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute log-probabilities of the reference on ``args.device``."""
        if isinstance(dataset, torch.utils.data.IterableDataset):
            raise ConfigError(
                "A dataset is an IterableDataset, for which log-probabilities of the reference cannot be computed "
                "before the training. Give a datasets.Dataset."
            )
        self.model.to(self.args.device)
        try:
            return super()._precompute_ref_logps(dataset, *args, **kwargs)
        finally:
            self.model.to("cpu")


class PipelinedRewardTrainer(_TRLPipeline, RewardTrainer):
    """TRL's RewardTrainer that trains a model in a pipeline of stages. A sample is a pair of answers.

    Constructor, RewardConfig, preparation of the dataset, collator and loss are those of TRL.

    Args:
        pipeline, scaling_config, failure_config, local: see PipelinedTrainer.
        args, kwargs: arguments of RewardTrainer.

    Raises:
        ConfigError: an argument cannot be honoured; the message names it and what to use instead.
    """

    _extends, _configuration = RewardTrainer, RewardConfig
