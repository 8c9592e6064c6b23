"""TrainingArguments in a pipeline: fields that it honours, fields that it refuses by name, and its PipelineConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from raypipe.config.pipeline import PipelineConfig
from raypipe.errors import ConfigError

_SINGLE = "one process calls this trainer, and Ray starts the stages. Leave it out"
_COMPILE = "the model is compiled stage by stage. Give PipelineConfig(compile_stages='inductor')"
_SHARDING = (
    "stages hold parts of the model. Give PipelineConfig(num_stages=..., num_replicas=..., shard_optimizer=True)"
)
_NO_HOOK = "the stages trace the model's own loss. Leave it out"
_MEMORY = "stages hold what they need. Give PipelineConfig(memory_limit_bytes=...), or leave it out"
REFUSED: Mapping[str, str] = {
    "accelerator_config": "batches are cut from Trainer's order by the stages. Leave it out",
    "activation_checkpointing_kwargs": "it would have no effect. Give PipelineConfig(recompute=[...]), one per stage",
    "auto_find_batch_size": _MEMORY,
    "average_tokens_across_devices": _SINGLE,
    "ddp_backend": _SINGLE,
    "ddp_broadcast_buffers": _SINGLE,
    "ddp_bucket_cap_mb": _SINGLE,
    "ddp_find_unused_parameters": _SINGLE,
    "ddp_static_graph": _SINGLE,
    "ddp_timeout": _SINGLE,
    "debug": "it hooks into modules, which stages do not call. Leave it out",
    "deepspeed": _SHARDING,
    "enable_jit_checkpoint": "Ctrl-C and SIGTERM are not handled here. Give save_steps a lower number",
    "fp16": "its scaled autocast is not available. Give bf16=True, or PipelineConfig(precision='fp16')",
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "full_determinism": "stages are deterministic, and draw random numbers keyed by seed and step. Leave it out",
    "gradient_checkpointing_kwargs": "it would have no effect. Give PipelineConfig(recompute=[...]), one per stage",
    "ignore_data_skip": "a resumed run continues with the next sample, without reading earlier ones. Leave it out",
    "include_num_input_tokens_seen": "tokens are counted by stages, in the metrics of the run's folder. Leave it out",
    "liger_kernel_config": _NO_HOOK,
    "local_rank": _SINGLE,
    "log_level_replica": _SINGLE,
    "log_on_each_node": _SINGLE,
    "neftune_noise_alpha": "its noise is added by a hook, which stages do not call. Leave it out",
    "optim_target_modules": "its optimizers choose modules of the whole model. Give another optim",
    "parallelism_config": _SHARDING,
    "save_on_each_node": _SINGLE,
    "tf32": "it would be set in this process only. Leave it out",
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "torch_empty_cache_steps": _MEMORY,
    "use_cache": "a cache of keys and values is of no use in training. Leave it out",
    "use_liger_kernel": _NO_HOOK,
}
"""Fields of TrainingArguments that cannot be honoured -> reason and fix. Any value but the default is refused."""

HONOURED = frozenset(
    (
        "activation_checkpointing", "adam_beta1", "adam_beta2", "adam_epsilon", "batch_eval_metrics", "bf16",
        "bf16_full_eval", "data_seed", "dataloader_drop_last", "dataloader_in_order",
        "dataloader_multiprocessing_context", "dataloader_num_workers", "dataloader_persistent_workers",
        "dataloader_pin_memory", "dataloader_prefetch_factor", "disable_tqdm", "do_eval", "do_predict", "do_train",
        "eval_accumulation_steps", "eval_delay", "eval_do_concat_batches", "eval_on_start", "eval_steps",
        "eval_strategy", "eval_use_gather_object", "fp16_full_eval", "generation_config", "generation_max_length",
        "generation_num_beams", "gradient_accumulation_steps", "gradient_checkpointing", "greater_is_better",
        "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy", "hub_token",
        "include_for_metrics", "label_names", "label_smoothing_factor", "learning_rate", "length_column_name",
        "load_best_model_at_end", "log_level", "logging_first_step", "logging_nan_inf_filter", "logging_steps",
        "logging_strategy", "lr_scheduler_kwargs", "lr_scheduler_type", "max_grad_norm", "max_steps",
        "metric_for_best_model", "num_train_epochs", "optim", "optim_args", "output_dir",
        "per_device_eval_batch_size", "per_device_train_batch_size", "predict_with_generate",
        "prediction_loss_only", "project", "push_to_hub", "remove_unused_columns", "report_to",
        "restore_callback_states_from_checkpoint", "resume_from_checkpoint", "run_name", "save_only_model",
        "save_steps", "save_strategy", "save_total_limit", "seed", "skip_memory_metrics", "sortish_sampler",
        "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id", "train_sampling_strategy", "use_cpu",
        "warmup_steps", "weight_decay",
    )
)  # fmt: skip
"""Fields of Seq2SeqTrainingArguments with the effect that they have in Trainer; a data loader's in evaluations."""
_SCHEDULERS = ("reduce_lr_on_plateau", "greedy")


def check_arguments(args: TrainingArguments) -> None:
    """Raise ConfigError for a field of TrainingArguments that a pipeline cannot honour."""
    if args.world_size > 1:
        raise ConfigError(
            f"This process is one of {args.world_size} that torchrun or accelerate has started. Call the script with "
            "python: Ray starts the stages."
        )
    args._n_gpu = min(args.n_gpu, 1)  # a batch is that of one process, whatever GPUs it sees
    usual = TrainingArguments(output_dir=args.output_dir, use_cpu=args.use_cpu, report_to="none")
    for field in dataclasses.fields(args):
        name, value = field.name, getattr(args, field.name)
        if name in HONOURED or not declared_by(type(args), name, "transformers"):
            continue
        if value != getattr(usual, name, field.default):
            why = REFUSED.get(name, "this release of raypipe has not been tested with it. Leave it out")
            raise ConfigError(f"TrainingArguments({name}={value!r}): {why}.")
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if kind in _SCHEDULERS:
        raise ConfigError(
            f"TrainingArguments(lr_scheduler_type={kind!r}): it follows a metric that stages do not have. Give another "
            "one, such as 'linear' or 'cosine'."
        )


def declared_by(kind: type, name: str, package: str) -> bool:
    """Return True if a field of a class of arguments is declared by a package, not by a subclass from elsewhere."""
    owner = next(base for base in kind.__mro__ if name in vars(base).get("__annotations__", {}))
    return owner.__module__.split(".")[0] == package


def pipeline_of(pipeline: PipelineConfig, args: Any) -> PipelineConfig:
    """Return the configuration with the values of TrainingArguments.

    Raises:
        ConfigError: a field has another value in both.
    """
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    clipped = float(args.max_grad_norm) if args.max_grad_norm else None
    wanted: dict[str, tuple[Any, str]] = {
        "minibatch_size": (size, "per_device_train_batch_size and gradient_accumulation_steps"),
        "max_grad_norm": (clipped, "max_grad_norm"),
        "seed": (args.seed, "seed"),
        "eval_interval_steps": (None, "eval_steps"),
        "checkpoint_interval_steps": ("auto", "save_steps"),
    }
    if args.gradient_accumulation_steps > 1:
        wanted["num_microbatches"] = (args.gradient_accumulation_steps, "gradient_accumulation_steps")
    if args.bf16:
        wanted["precision"] = ("bf16-autocast", "bf16")
    if args.activation_checkpointing:
        wanted["recompute"] = ("always", "activation_checkpointing")
    defaults = {field.name: field.default for field in dataclasses.fields(PipelineConfig)}
    for name, (value, source) in wanted.items():
        given = getattr(pipeline, name)
        if given not in (value, defaults[name]):
            raise ConfigError(
                f"PipelineConfig({name}={given!r}) differs from TrainingArguments, which give {value!r}. Set {source} "
                "there, and leave it out here."
            )
    return dataclasses.replace(pipeline, **{name: value for name, (value, _) in wanted.items()})
