"""Capture of a model of transformers for text generation: a forward with caches, cut at the stages of training.

    prefill   columns of a prompt            -->  logits of the last position, caches of all layers
    step      columns of a token, caches     -->  logits, caches that are one position longer

The model's own forward computes both, with a cache that is made of columns, so that its tensors are explicit inputs and
outputs: transformers' DynamicCache, or EncoderDecoderCache for models with an encoder. A cache stays in the stage that
makes it. A stage has the operations that read its parameters, so that no weight moves.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from raypipe.capture.analyse import analyse
from raypipe.capture.cut import assign_by_owner, slice_stages
from raypipe.capture.dependencies import model_graph
from raypipe.capture.explain import Inputs
from raypipe.capture.own_loss import own_forward
from raypipe.capture.source_lines import Lines, ValueKind, lines_of
from raypipe.capture.trace import trace
from raypipe.engine.decoding import DecodeFunction, DecodeProgram
from raypipe.engine.initial.meta_init import stand_ins
from raypipe.engine.stage.mixed_precision import model_in
from raypipe.engine.stage.randomness import evaluating
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import CaptureError, ConfigError
from raypipe.ir.precision import Precision

SAMPLES, PROMPT, PAST = 2, 5, 7
"""Sizes of the examples that are traced; all of them are left open."""
_BY_ITSELF = (
    "Generate with the model itself: model.load_state_dict(raypipe.load_state_dict(...)), then model.generate(...)."
)
_AT_LEAST_TWO = re.compile(r"\w+ >= 2")


def arguments_of(model: Any) -> frozenset[str]:
    """Return the names that the forward of a model of transformers takes; those of the wrapped model with peft."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return frozenset(inspect.signature(base.forward).parameters)


def refuse_without_cache(model: torch.nn.Module) -> None:
    """Raise ConfigError unless this is a model of transformers that generates text with a cache."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if not callable(getattr(model, "generate", None)) or config is None:
        raise ConfigError(
            f"generate() calls the forward of {name} with a cache of keys and values as models of transformers take "
            "it, and this is no such model. Use a model with a head for language, such as GPT2LMHeadModel."
        )
    if getattr(model, "_is_stateful", False):
        raise ConfigError(f"generate() keeps keys and values, but {name} keeps states of another kind. {_BY_ITSELF}")
    if (read := getattr(model, "main_input_name", "input_ids")) != "input_ids":
        raise ConfigError(f"generate() continues token ids, but {name} reads {read}. {_BY_ITSELF}")


@dataclass(frozen=True, slots=True)
class _Mode:
    """A traced forward.

    Attributes:
        lines: the forward; its first output is the logits.
        together: pairs of operations that must share a stage, as positions in execution order.
        caches: names of the other outputs.
    """

    lines: Lines
    together: tuple[tuple[int, int], ...]
    caches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DecodeRecipe:
    """Both forwards of a model, from which the programs of any number of stages are made; ``title`` is its class."""

    prefill: _Mode
    step: _Mode
    title: str

    def programs(self, stages: Sequence[StageProgram]) -> list[DecodeProgram]:
        """Cut the forwards so that each stage reads its own parameters only.

        Args:
            stages: programs of training, of the same model.

        Raises:
            CaptureError: the parts of the model run in another order than in training.
        """
        holders: dict[str, tuple[int, ...]] = {}
        for program in stages:
            for name in program.parameters:
                holders[name] = (*holders.get(name, ()), program.index)
        prefill = self._cut(self.prefill, holders, stages, "prefill")
        # A cache stays where the prompt has made it.
        holders.update({name: (stage,) for stage, function in enumerate(prefill) for name in function.caches})
        step = self._cut(self.step, holders, stages, "step")
        return [DecodeProgram(one, other) for one, other in zip(prefill, step, strict=True)]

    def _cut(
        self, mode: _Mode, holders: Mapping[str, tuple[int, ...]], stages: Sequence[StageProgram], name: str
    ) -> list[DecodeFunction]:
        lines, kept = mode.lines, mode.lines.outputs[1:]
        columns = {n: lines.values[n].of for n in lines.of_kind(ValueKind.COLUMN) if lines.values[n].of in holders}
        places = assign_by_owner(lines, holders, mode.together, columns)
        functions = slice_stages(lines, places, len(stages), f"{self.title} {name}", kept)
        made: list[list[str]] = [[] for _ in stages]
        for cache, number in zip(mode.caches, kept, strict=True):
            made[places[number]].append(cache)
        for function in functions:
            function.precision = stages[0].precision
        return [DecodeFunction(function, tuple(caches)) for function, caches in zip(functions, made, strict=True)]


def decode_recipe(model: torch.nn.Module, precision: Precision) -> DecodeRecipe:
    """Trace a model of transformers for generation. The model is not changed.

    Args:
        precision: number format in which the stages compute.

    Raises:
        ConfigError: the model is not of this kind.
        CaptureError: the model cannot be traced with a cache.
    """
    refuse_without_cache(model)
    forwards = _EncoderDecoder(model) if model.config.is_encoder_decoder else _DecoderOnly(model)  # type: ignore[union-attr]
    held = {name: x.nbytes for name, x in (*model.named_parameters(), *model.named_buffers())}
    with model_in(model, precision), stand_ins(model), evaluating():
        prefill = _Mode(*_traced(model, *forwards.prefill(), held), forwards.caches(step=False))
        step = _Mode(*_traced(model, *forwards.step(), held), forwards.caches(step=True))
    return DecodeRecipe(prefill, step, type(model).__name__)


def _traced(
    model: torch.nn.Module, inputs: Inputs, forward: Callable[..., Any], held: Mapping[str, int]
) -> tuple[Lines, tuple[tuple[int, int], ...]]:
    """Trace the model with another forward; return its lines, and pairs of operations that must share a stage."""

    def called(**columns: torch.Tensor) -> Any:
        return forward(**columns)

    with own_forward(model, called):
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in inputs.columns]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        traced = trace(model, inputs, returns_loss=False, training=False)
    if traced.fixed:
        raise CaptureError(
            f"{type(model).__name__} cannot generate in stages, because prompts have any length: "
            f"{traced.fixed.rstrip('.')}. {_BY_ITSELF}"
        )
    analysis = analyse(traced)
    lines = lines_of(analysis)
    # torch.export assumes two positions at least; no operation of these forwards depends on that.
    conditions = tuple(text for text in lines.conditions if not _AT_LEAST_TWO.fullmatch(text))
    return replace(lines, conditions=conditions), model_graph(analysis, SAMPLES, held).together


class _CacheSizes(NamedTuple):
    """Sizes and dtype of the keys and values of one layer."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, layer: Any) -> _CacheSizes:
        """Return the sizes in a layer of a cache of transformers, whose tensors have shape (b, heads, n, size)."""
        if not isinstance(getattr(layer, "keys", None), torch.Tensor):
            raise CaptureError(f"generate() keeps keys and values, but a layer of the cache is a {layer!r}.")
        return cls(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], layer.keys.dtype)

    def example(self, length: int) -> list[torch.Tensor]:
        """Return keys and values of ``length`` positions."""
        return [torch.zeros(SAMPLES, self.heads, length, n, dtype=self.dtype) for n in (self.key_size, self.value_size)]


class _DecoderOnly:
    """Forwards of a decoder, such as GPT-2 or Llama."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._forward = model.forward
        known = arguments_of(model)
        self._positions = "position_ids" in known
        self._options: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if "logits_to_keep" in known:
            self._options["logits_to_keep"] = 1
        self._sizes: list[_CacheSizes] = []

    def caches(self, *, step: bool) -> tuple[str, ...]:
        """Name the caches that a forward returns."""
        return _names(len(self._sizes), "key", "value")

    def prefill(self) -> tuple[Inputs, Callable[..., Any]]:
        tokens = torch.ones(SAMPLES, PROMPT, dtype=torch.long)
        return self._columns({"input_ids": tokens, "attention_mask": tokens}), self._run_prefill

    def step(self) -> tuple[Inputs, Callable[..., Any]]:
        token = torch.ones(SAMPLES, 1, dtype=torch.long)
        past = [x for sizes in self._sizes for x in sizes.example(PAST)]
        more = {"past_mask": token.expand(SAMPLES, PAST), **dict(zip(self.caches(step=True), past, strict=True))}
        return self._columns({"input_ids": token}, more), self._run_step

    def _columns(self, columns: dict[str, torch.Tensor], more: Mapping[str, torch.Tensor] | None = None) -> Inputs:
        if self._positions:
            columns["position_ids"] = torch.zeros_like(columns["input_ids"])
        return _inputs({**columns, **(more or {})})

    def _run_prefill(self, **columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._run(_cache(), columns)

    def _run_step(
        self, input_ids: torch.Tensor, past_mask: torch.Tensor, **columns: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        past = [columns.pop(name) for name in self.caches(step=True)]
        mask = torch.cat([past_mask, torch.ones_like(input_ids)], 1)
        return self._run(_cache(past), {"input_ids": input_ids, "attention_mask": mask, **columns})

    def _run(self, cache: Any, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        output = self._forward(**columns, past_key_values=cache, **self._options)
        self._sizes = [_CacheSizes.of(layer) for layer in cache.layers]
        return (output.logits[:, -1], *_tensors(cache))


class _EncoderDecoder:
    """Forwards of a model with an encoder, such as T5: the encoder runs in ``prefill`` only."""

    def __init__(self, model: Any) -> None:
        self._forward, self._width = model.forward, model.config.hidden_size
        self._options: dict[str, Any] = {"use_cache": True, "return_dict": True}
        self._own: list[_CacheSizes] = []
        self._cross: list[_CacheSizes] = []

    def caches(self, *, step: bool) -> tuple[str, ...]:
        """Name the caches that a forward returns: those of the encoder's output are made once."""
        return _names(len(self._own), "key", "value") + (() if step else self._crossing)

    @property
    def _crossing(self) -> tuple[str, ...]:
        return _names(len(self._cross), "cross_key", "cross_value")

    def prefill(self) -> tuple[Inputs, Callable[..., Any]]:
        tokens = torch.ones(SAMPLES, PROMPT, dtype=torch.long)
        columns = {"input_ids": tokens, "attention_mask": tokens, "decoder_input_ids": tokens[:, :1]}
        return _inputs(columns), self._run_prefill

    def step(self) -> tuple[Inputs, Callable[..., Any]]:
        tokens = torch.ones(SAMPLES, PROMPT, dtype=torch.long)
        past = [x for sizes in self._own for x in sizes.example(PAST)]
        past += [x for sizes in self._cross for x in sizes.example(PROMPT)]
        columns = {"attention_mask": tokens, "decoder_input_ids": tokens[:, :1]}
        names = (*self.caches(step=True), *self._crossing)
        return _inputs({**columns, **dict(zip(names, past, strict=True))}), self._run_step

    def _run_prefill(self, **columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from transformers import EncoderDecoderCache

        cache = EncoderDecoderCache(_cache(), _cache())
        output = self._forward(**columns, past_key_values=cache, **self._options)
        own, cross = cache.self_attention_cache, cache.cross_attention_cache
        self._own, self._cross = [[_CacheSizes.of(layer) for layer in one.layers] for one in (own, cross)]
        return (output.logits[:, -1], *_tensors(own), *_tensors(cross))

    def _run_step(
        self, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor, **columns: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        from transformers import EncoderDecoderCache
        from transformers.modeling_outputs import BaseModelOutput

        own, cross = ([columns[name] for name in names] for names in (self.caches(step=True), self._crossing))
        cache = EncoderDecoderCache(_cache(own), _cache(cross))
        # Only its shape is read, since keys and values of it are in the cache.
        encoded = torch.zeros(*attention_mask.shape, self._width, dtype=self._own[0].dtype)
        output = self._forward(
            attention_mask=attention_mask, decoder_input_ids=decoder_input_ids,
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded), past_key_values=cache, **self._options,
        )  # fmt: skip
        return (output.logits[:, -1], *_tensors(cache.self_attention_cache))


def _names(num_layers: int, *kinds: str) -> tuple[str, ...]:
    return tuple(f"past_{kind}_{layer}" for layer in range(num_layers) for kind in kinds)


def _cache(past: Sequence[torch.Tensor] = ()) -> Any:
    """Make a cache of transformers that grows; ``past`` has the keys and values of each layer in turn."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, (keys, values) in enumerate(zip(past[::2], past[1::2], strict=True)):
        cache.update(keys[:, :, :0], values[:, :, :0], layer)
        cache.layers[layer].keys, cache.layers[layer].values = keys, values
    return cache


def _tensors(cache: Any) -> list[torch.Tensor]:
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


def _inputs(columns: Mapping[str, torch.Tensor]) -> Inputs:
    """Return named columns, of which every length is left open: dimension 1 of token ids, dimension 2 of caches."""
    columns = {name: x.clone() for name, x in columns.items()}  # equal tensors would be one input of the graph
    lengths = {(name, x.dim() - 1 if x.dim() == 2 else 2) for name, x in columns.items()}
    return Inputs((), columns, tuple(columns), frozenset(at for at in lengths if columns[at[0]].shape[at[1]] > 1))
