"""Text generation: token ids that the stages of the plan continue, as model.generate(...) of transformers does.

trainer.generate(input_ids, max_new_tokens=32)      with the weights of a checkpoint, on stages started for this
handle.generate(input_ids, max_new_tokens=32)       with the present weights of a run, on its own stages
Callback.prompts                                    with those of every evaluation, on the run's own stages
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from raypipe.api.evaluate import Stages
from raypipe.callbacks.base import Prompts
from raypipe.capture.decode_recipe import DecodeRecipe, arguments_of, refuse_without_cache
from raypipe.engine.sampling import Sampling
from raypipe.errors import ConfigError
from raypipe.prepare.job import Job
from raypipe.run.generate_loop import Ending, Generation, Prompt

Tokens = int | Sequence[int] | None


def generation_of(
    model: torch.nn.Module, recipe: Callable[[], DecodeRecipe], prompts: Prompts
) -> Callable[[], Generation]:
    """Check prompts, and complete them from the model's generation_config.

    Args:
        recipe: returns the traced forwards of the model.

    Returns:
        function that calls ``recipe`` and returns the generation.

    Raises:
        ConfigError: the model or an argument is not possible.
    """
    if prompts.num_beams != 1:
        raise ConfigError(
            f"num_beams={prompts.num_beams!r}: a beam search reorders caches between the tokens, which stages do not "
            "do. Leave num_beams out, or draw several times with do_sample=True and another seed."
        )
    size = prompts.group_size
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ConfigError(f"group_size={size!r}: give a number of sequences from 1 up, or None for the plan's own.")
    sampling = Sampling(prompts.do_sample, prompts.temperature, prompts.top_k, prompts.top_p, prompts.seed)
    prompt = prompt_of(model, prompts.input_ids, prompts.attention_mask)
    ending = ending_of(model, prompt, prompts.max_new_tokens, prompts.eos_token_id, prompts.pad_token_id)
    return lambda: Generation(recipe(), prompt, sampling, ending, prompts.group_size)


def generated(job: Job, stages: Stages, generation: Generation) -> torch.Tensor:
    """Generate with stages of the job that are started for this."""
    with stages.open(job) as fleet:
        return generation.on(fleet.decoding, job.programs, job.placement)


def generations_of(callbacks: Sequence[Any], generation: Callable[[Prompts], Callable[[], Generation]]) -> Any:
    """Return (number of the callback, generation) for each callback with prompts."""
    prompts = ((number, getattr(callback, "prompts", None)) for number, callback in enumerate(callbacks))
    return tuple((number, generation(given)()) for number, given in prompts if given is not None)


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
