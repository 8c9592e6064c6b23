"""Text generation outside of ``fit``: token ids that the stages of the plan decode, with the weights of a checkpoint.

trainer.generate(input_ids, max_new_tokens=32)      as model.generate(...) of transformers, but on the stages
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from raypipe.api.evaluate import Stages
from raypipe.capture.decode_recipe import arguments_of, refuse_without_cache
from raypipe.engine.decoding import DecodeProgram
from raypipe.engine.sampling import Sampling
from raypipe.errors import ConfigError
from raypipe.prepare.job import Job
from raypipe.run.generate_loop import Ending, Prompt, continued, group_size_of

Tokens = int | Sequence[int] | None


def generated(
    job: Job, programs: Sequence[DecodeProgram], stages: Stages, prompt: Prompt, sampling: Sampling, ending: Ending,
    group_size: int | None,
) -> torch.Tensor:  # fmt: skip
    """Generate a continuation of each sequence with the job's stages; see ``run.generate_loop.continued``."""
    size = group_size_of(len(prompt.tokens), job.num_stages) if group_size is None else group_size
    with stages.open(job) as fleet, fleet.decoding(programs, job.placement) as pipeline:
        return continued(pipeline, prompt, sampling, ending, size)


def prompt_of(model: torch.nn.Module, input_ids: Any, attention_mask: Any) -> Prompt:
    """Check the arguments of ``generate`` that are data.

    Raises:
        ConfigError: an argument has another shape, or a decoder would continue padding.
    """
    refuse_without_cache(model)
    tokens = torch.as_tensor(input_ids).cpu()
    if tokens.dim() != 2 or not tokens.numel() or tokens.is_floating_point():
        raise ConfigError(
            f"input_ids has shape {tuple(tokens.shape)} and type {tokens.dtype}: give token ids of shape (sequences, "
            "length), as tokenizer(texts, return_tensors='pt', padding=True).input_ids."
        )
    mask = torch.ones_like(tokens) if attention_mask is None else torch.as_tensor(attention_mask).cpu()
    if mask.shape != tokens.shape:
        raise ConfigError(
            f"attention_mask has shape {tuple(mask.shape)}, but input_ids has {tuple(tokens.shape)}. Give 1 for each "
            "token and 0 for padding, as the tokenizer does."
        )
    tokens, mask = tokens.long(), mask.long()
    config: Any = model.config
    if config.is_encoder_decoder:
        start = _configured(model, "decoder_start_token_id")
        return Prompt(tokens, mask, start=_configured(model, "bos_token_id") if start is None else start)
    if not mask[:, -1].all():
        raise ConfigError(
            "A sequence of input_ids ends with padding, which would be continued. Pad on the left: "
            "tokenizer.padding_side = 'left'."
        )
    return Prompt(tokens, mask, positions="position_ids" in arguments_of(model))


def ending_of(model: torch.nn.Module, prompt: Prompt, max_new_tokens: int, eos: Tokens, pad: int | None) -> Ending:
    """Complete the arguments of ``generate`` on the end of sequences from the model's generation_config.

    Raises:
        ConfigError: the number of tokens is not possible.
    """
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens!r} is not possible: give an integer of at least 1.")
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = 0 if prompt.start is not None else int(prompt.mask.sum(1).max())
    if limit is not None and longest + max_new_tokens > limit:
        raise ConfigError(
            f"max_new_tokens={max_new_tokens} after a prompt of {longest} tokens is more than the {limit} positions of "
            f"{type(model).__name__}. Give at most {limit - longest}, or shorter prompts."
        )
    found = _configured(model, "eos_token_id") if eos is None else eos
    ends = () if found is None else (found,) if isinstance(found, int) else tuple(found)
    padding = _configured(model, "pad_token_id") if pad is None else pad
    return Ending(max_new_tokens, ends, (ends[0] if ends else 0) if padding is None else padding)


def _configured(model: torch.nn.Module, name: str) -> Any:
    """Return a token id of the model's generation_config, or else of its config; None without one."""
    configs = (getattr(model, "generation_config", None), model.config)
    return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)


def refuse_beams(num_beams: int) -> None:
    """Raise ConfigError for a beam search."""
    if num_beams != 1:
        raise ConfigError(
            f"num_beams={num_beams!r}: a beam search reorders caches between the tokens, which stages do not do. Leave "
            "num_beams out, or draw several times with do_sample=True and another seed."
        )
