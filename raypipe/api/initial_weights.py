"""Initial weights of a new run: from a run, a checkpoint or a file, loaded in this process or by the workers.

    init_from="pretrained"                    the newest checkpoint of that run, in the same storage_path
    init_from="runs/lm/checkpoints/step_..."  a run's folder or one of its checkpoints, a path or a URI
    init_from="gpt.safetensors", "gpt.pt"     a state_dict in a file
    init_from="models/llama"                  a folder with model.safetensors, or with its index and its parts
    weights_on="workers"                      workers read their own tensors of init_from, or initialise their modules

Names and shapes must be those of the model. A .pt file is read with weights_only=True, so that none of its content is
executed. With weights_on="workers" the model, a function, is built without memory for its parameters.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from raypipe.api.export import shared_names
from raypipe.capture.flatten import canonical_names
from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.device.device import memory_bytes
from raypipe.engine.initial.meta_init import ModuleInit, Writes, build_on_meta
from raypipe.engine.initial.weight_files import (
    StoredTensor,
    WeightFiles,
    equal_values,
    is_hugging_face,
    sampled_digest,
    weights_in,
)
from raypipe.engine.io.checkpoint import load_state_dict, newest_step
from raypipe.engine.io.checkpoint.state_source import StateSource
from raypipe.engine.io.storage import Place, PlaceError
from raypipe.engine.stage.module_copy import copy_of
from raypipe.engine.stage.quantized_linear import has_described, without_frozen_state
from raypipe.errors import CheckpointError, ConfigError
from raypipe.preflight.arguments import Unfilled
from raypipe.prepare.inputs import build_model

T = TypeVar("T")

SHOWN = 3
"""Maximum number of names of each kind in an error message."""
MOST_BYTES = 1 << 40
PICKLED = (".pt", ".pth", ".bin")
_QUANTIZED = re.compile(r"\.quant_state\.bitsandbytes__|\.SCB$")
"""Names that bitsandbytes gives to the numbers of a quantized weight."""


class InitialWeights:
    """Callable that builds the user's model with the weights of init_from. The user's own module is never changed.

    Args:
        model: nn.Module, of which a copy gets the weights, or a function that builds one.
        source: value of init_from.
        storage: folder of the runs, in which ``source`` is looked up if it is the name of a run.

    Attributes:
        digest: {"sha256": checksum of the weights} of the model that was built; None before.

    Raises:
        ConfigError: ``source`` is not a path.
    """

    def __init__(self, model: nn.Module | Callable[[], nn.Module], source: Any, storage: Place) -> None:
        if not isinstance(source, str | os.PathLike):
            raise ConfigError(
                f"init_from is of type {type(source).__name__}; give the name of a run, the path of a run or one of "
                "its checkpoints, of a folder with model.safetensors or its index, or of a .pt or .safetensors file."
            )
        self.model, self.source, self.storage = model, os.fspath(source), storage
        self.digest: dict[str, str] | None = None

    def __call__(self) -> nn.Module:
        built = copy_of(self.model) if isinstance(self.model, nn.Module) else self.model()
        if isinstance(built, nn.Module) and not any(map(nn.parameter.is_lazy, built.parameters())):
            weights = read_weights(self.source, self.storage)
            _fill(built, weights, self.source)
            self.digest = {"sha256": _digest(weights)}
        return built

    def note(self, run: str | None, resume: bool | None) -> str:
        """Describe the effect of init_from, in a sentence for the plan's notes.

        Args:
            run: name of the run; None without a name.
            resume: as in PipelineTrainer; a run that is resumed keeps its own weights.
        """
        done = newest_step(self.storage / run) if run and resume is not False else None
        if done is None:
            return f"The run begins with the weights of init_from={self.source!r}."
        return (
            f"init_from={self.source!r} gave the run {run!r} the weights that it began with. It goes on from its own "
            f"checkpoint of step {done} now and takes nothing from there."
        )


def read_weights(source: str, storage: Place, title: str = "init_from") -> dict[str, torch.Tensor]:
    """Read {name: tensor} of a run, a checkpoint or a file.

    Args:
        source, storage: see ``InitialWeights``.
        title: name of the argument that has this value, for messages.

    Raises:
        ConfigError: ``source`` was not found, or has no weights.
        CheckpointError: the checkpoint is incomplete or damaged.
    """
    place = located(source, storage, title)
    try:
        if place.name.endswith(PICKLED):
            return _pickled(place.read_bytes(most_bytes=MOST_BYTES), source, title)
        if place.name.endswith(".safetensors") or is_hugging_face(place):
            weights = weights_in(place, title)
            return dict(WeightFiles.as_stored(weights, title).read(weights))
        return load_state_dict(place.path, storage_filesystem=place.filesystem)
    except PlaceError as error:
        raise ConfigError(f"{title}={source!r} cannot be read: {error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{title}: {error}") from None


def _pickled(data: bytes, source: str, title: str) -> dict[str, torch.Tensor]:
    save = "Save the weights alone: torch.save(model.state_dict(), path)."
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  (reported in one paragraph)
        # torch's message advises to run what is in the file, in bold.
        whole = "Unsupported global" in str(error)
        what = (
            "It holds other objects than tensors, such as a whole module" if whole else "It is damaged, or not torch's"
        )
        raise ConfigError(
            f"{title}={source!r} cannot be read with torch.load(..., weights_only=True), which runs no code that is "
            f"in a file. {what}. {save}"
        ) from None
    if not isinstance(loaded, Mapping) or not all(isinstance(name, str) for name in loaded):
        raise ConfigError(f"{title}={source!r} holds a {type(loaded).__name__}, which is no state_dict. {save}")
    weights = {name: value for name, value in loaded.items() if not name.endswith("_extra_state")}
    others = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConfigError(
            f"{title}={source!r} is no state_dict: {_listed(map(repr, others))} "
            f"{'is no tensor' if len(others) == 1 else 'are no tensors'}. {save}"
        )
    return weights


def located(source: str, storage: Place, title: str = "init_from") -> Place:
    """Find a run, a checkpoint or a file: ``source`` is a path or a URI, else the name of a run in ``storage``.

    Args:
        title: name of the argument that has this value, for messages.

    Returns:
        The place; it exists, unless ``source`` is a URI, which is returned unchecked.

    Raises:
        ConfigError: neither a path nor a run of that name exists, or storage failed.
    """
    try:
        place = Place.of(source)
        if place.exists() or "://" in source:
            return place
        named = storage / source if not source.startswith(("/", ".", "~")) else None
        if named is not None and named.exists():
            return named
    except PlaceError as error:
        raise ConfigError(f"{title}={source!r} cannot be read: {error}") from None
    raise ConfigError(
        f"{title}={source!r}: there is no such file or folder, and no run of that name in {storage}. Give the name "
        "of a run, the path of a run or one of its checkpoints, of a folder with model.safetensors or its index, or of "
        "a .pt or .safetensors file."
    )


def _fill(model: nn.Module, weights: Mapping[str, torch.Tensor], source: str) -> None:
    """Load weights into a model, or raise ConfigError if names or shapes differ."""
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    if any(value.is_meta for value in own.values()):
        raise ConfigError(
            "init_from fills the parameters of the model, but some are on the meta device, which holds no numbers. "
            "Give a function that builds the model and set weights_on='workers', so that each worker fills its own, or "
            "build the model with numbers."
        )
    weights = wanted_of(model, own, weights)
    matched(own, weights, f"init_from={source!r}", type(model).__name__)
    loaded = without_frozen_state(model, weights)
    other = next((n for n in weights.keys() - loaded.keys() if not torch.equal(weights[n], own[n])), None)
    if other is not None:
        raise ConfigError(
            f"init_from={source!r} has another {other!r} than the model: its layers were quantized from other weights, "
            "and bitsandbytes cannot exchange their scales. Load the model from there with from_pretrained, and leave "
            "init_from out."
        )
    model.load_state_dict(loaded, strict=False)


def wanted_of(model: nn.Module, own: Mapping[str, Any], weights: Mapping[str, T]) -> dict[str, T]:
    """Return the weights without those that the model neither has nor needs.

    These are extra state (get_extra_state), and names that a model of transformers ignores.

    Args:
        own: tensors of the model by name.
    """
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return {
        name: value
        for name, value in weights.items()
        if name in own or not (name.endswith("_extra_state") or any(re.search(pattern, name) for pattern in ignored))
    }


def matched(
    own: Mapping[str, Any],
    weights: Mapping[str, T],
    title: str,
    model: str,
    *,
    shared: Mapping[str, str] | None = None,
    equal: Callable[[Any, Any], bool] = torch.equal,
) -> dict[str, T]:
    """Match weights to the names of a model. A shared tensor of the model needs only one of its names.

    Args:
        own: the model's tensors, or objects with dtype and shape, under all their names.
        weights: the weights by name, as tensors or such objects too.
        title: argument and value, for messages: ``init_from='x'``.
        model: name of the model, for messages.
        shared: {further name of a shared tensor: its first name}; None finds them by memory address.
        equal: returns True if two weights have equal values; called for two names of a shared tensor.

    Returns:
        {name: weight} for every name in ``own``.

    Raises:
        ConfigError: names, shapes or kinds of numbers differ, or the weights have two values for a shared tensor.
    """
    first = shared_names(own) if shared is None else shared
    held, unequal = _held(own, weights, first, equal)
    faults = {
        "missing there": [repr(name) for name in own if first.get(name, name) not in held],
        "not in the model": [repr(name) for name in weights if name not in own],
        "of another shape or kind": _other_shapes(own, weights),
        "one tensor in the model and two there": unequal,
    }
    if any(faults.values()):
        these = "; ".join(f"{len(names)} {what}: {_listed(names)}" for what, names in faults.items() if names)
        raise ConfigError(f"{title} does not fit the model {model}. Of its names are {these}. {_cure(own, weights)}")
    return {name: weights[held[first.get(name, name)]] for name in own}


def _held(
    own: Iterable[str], weights: Mapping[str, Any], first: Mapping[str, str], equal: Callable[[Any, Any], bool]
) -> tuple[dict[str, str], list[str]]:
    """Map the first name of each tensor of the model to one of its names in ``weights``; see ``matched``.

    Args:
        first: {further name of a shared tensor: its first name}.

    Returns:
        (the map, descriptions of pairs of names whose weights differ although the model shares one tensor).
    """
    held: dict[str, str] = {}
    unequal = []
    for name in own:
        if name in weights:
            other = held.setdefault(first.get(name, name), name)
            if other != name and not equal(weights[other], weights[name]):
                unequal.append(f"{other!r} and {name!r}")
    return held, unequal


def _other_shapes(own: Mapping[str, Any], weights: Mapping[str, Any]) -> list[str]:
    return [
        f"{name!r} ({_kind(weights[name])} there, {_kind(own[name])} in the model)"
        for name in own
        if name in weights and not _fits(weights[name], own[name])
    ]


def _fits(there: Any, here: Any) -> bool:
    """Return True if shapes agree, and both tensors are floating-point, both complex, or neither is.

    Another floating-point precision fits, because it is converted later.
    """
    kinds = [(t.dtype.is_floating_point, t.dtype.is_complex) for t in (there, here)]
    return tuple(there.shape) == tuple(here.shape) and kinds[0] == kinds[1]


def _kind(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _cure(own: Mapping[str, Any], weights: Mapping[str, Any]) -> str:
    """Describe what to do about names that do not match.

    Weights may be quantized, or have a prefix in all names, or lack one, without which most names would match.
    """
    if any(map(_QUANTIZED.search, weights)):
        return (
            "The weights there are quantized: load the model from there with from_pretrained, which keeps them as they "
            "are, and leave init_from out."
        )
    words = "Give weights that were saved from this model."
    for these, others, where in ((weights, own, "there"), (own, weights, "in the model")):
        prefix = next(iter(these), "").partition(".")[0] + "."
        bare = {name.removeprefix(prefix) for name in these}
        if all(name.startswith(prefix) for name in these) and len(bare & others.keys()) > len(others) // 2:
            return f"All names {where} begin with {prefix!r}, and without that most would be the same. {words}"
    return words


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + more


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous()
        total.update(f"{name} {_kind(tensor)}".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


BuildModel = nn.Module | Callable[[], nn.Module]


class WorkerWeights:
    """Callable that returns the user's model without weights, and the source from which the workers get its weights.

    Args:
        model: function that builds the model; or, with init_from, the model itself on the meta device.
        source: value of init_from; None if the workers call the initialisers of the model's modules.
        storage: folder of the runs, in which ``source`` is looked up if it is the name of a run.
        seed: seed of the run.

    Attributes:
        digest: {"sampled_sha256": checksum of the headers and of some bytes of the weight files}; None before the first
            call, and without init_from.

    Raises:
        ConfigError: ``model`` is a module with weights.
    """

    def __init__(self, model: BuildModel, source: Any, storage: Place, seed: int) -> None:
        if isinstance(model, nn.Module) and not (source and any(p.is_meta for p in model.parameters())):
            raise ConfigError(
                "weights_on='workers' needs a model that has no weights here. Give a function without arguments that "
                "builds it, as in PipelineTrainer(lambda: Model(config), ...), or leave weights_on out."
            )
        self.model, self.source, self.storage, self.seed = model, source, storage, seed
        self.digest: dict[str, str] | None = None
        self._described = False

    def __call__(self) -> Unfilled:
        seen: list[Writes] = []

        def make() -> Any:
            built, writes = build_on_meta(self.model, self.seed)
            seen.append(writes)
            return built

        model = self.model if isinstance(self.model, nn.Module) else build_model(make)
        if self.source is not None:
            weights = stored_weights(self.source, self.storage)
            self.digest = {"sampled_sha256": sampled_digest(weights)}
            return Unfilled(model, (_files_of(model, weights, f"init_from={self.source!r}"),))
        self._described = has_described(model)
        if self._described:
            return Unfilled(model, ())
        return Unfilled(model, (ModuleInit.of(model, seen[-1], self.seed),))

    def note(self, run: str | None, resume: bool | None) -> str:
        """Describe the source of the workers' weights for a note of the plan; for the arguments see InitialWeights."""
        unseen = "This process holds no weights, so that verify='first_step' compares nothing."
        done = newest_step(self.storage / run) if run and resume is not False else None
        if done is not None:
            return f"Workers take their weights from the run's own checkpoint of step {done}. {unseen}"
        if self._described:
            return "The model has 4-bit layers without values: it can be planned, and not trained."
        if self.source is None:
            return (
                f"Workers make the weights that the run begins with, by the model's initialisers, from seed. {unseen}"
            )
        return f"Workers read the weights that the run begins with from init_from={self.source!r}. {unseen}"


def weights_for(
    model: BuildModel, init_from: Any, pipeline: PipelineConfig, storage: Place
) -> InitialWeights | WorkerWeights | None:
    """Choose the source of a run's initial weights.

    Returns:
        InitialWeights if this process loads them, WorkerWeights if the workers do, None if the model has its own.
    """
    initial = None if init_from is None else InitialWeights(model, init_from, storage)
    source = None if initial is None else initial.source
    if pipeline.weights_on == "workers" or (
        pipeline.weights_on == "auto" and source is not None and _too_many(model, source, storage)
    ):
        return WorkerWeights(model, source, storage, pipeline.seed)
    return initial


def begun_with(
    model: BuildModel, weights: InitialWeights | WorkerWeights | None
) -> tuple[BuildModel, WorkerWeights | None]:
    """Return the values of the fields ``model`` and ``unfilled`` of the run's Arguments.

    Args:
        weights: result of ``weights_for``.
    """
    if isinstance(weights, WorkerWeights):
        return model, weights
    return weights or model, None


def files_for(
    own: Mapping[str, Any],
    aliases: Mapping[str, str],
    weights: Mapping[str, StoredTensor],
    title: str,
    model: str,
) -> StateSource:
    """Create the source from which stages read their own tensors in files.

    Args:
        own, weights, title, model: see ``matched``.
        aliases: {further name of a shared tensor: its first name}.

    Raises:
        ConfigError: names are missing or surplus, or shapes or kinds differ.
    """
    values = matched(own, weights, title, model, shared=aliases, equal=equal_values)
    first = {name: stored for name, stored in values.items() if name not in aliases}
    return WeightFiles.like_model(first, own, title)


def stored_weights(source: str, storage: Place, title: str = "init_from") -> dict[str, StoredTensor]:
    """Locate the tensors of a run, a checkpoint or safetensors files, without reading their values.

    For the arguments see ``read_weights``.

    Raises:
        ConfigError: ``source`` was not found, or is a file of torch.save.
        CheckpointError: a checkpoint or a file is damaged.
    """
    place = located(source, storage, title)
    if place.name.endswith(PICKLED):
        raise ConfigError(
            f"{title}={source!r} cannot be read tensor by tensor, which weights_on='workers' needs. Save the weights "
            "as safetensors (safetensors.torch.save_file, save_pretrained), or set weights_on='client'."
        )
    try:
        return weights_in(place, f"{title}={source!r}")
    except PlaceError as error:
        raise ConfigError(f"{title}={source!r} cannot be read: {error}") from None


def _files_of(model: nn.Module, weights: Mapping[str, StoredTensor], title: str) -> StateSource:
    own = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, torch.Tensor)}
    aliases = {name: first for name, first in canonical_names(model).items() if first != name and name in own}
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in own]
    if lost:
        raise ConfigError(
            f"weights_on='workers': the buffer {lost[0]!r} is on the meta device and in no file, because it is not "
            "persistent. Give a function that builds the model (lambda: Model(config)) instead of a module."
        )
    return files_for(own, aliases, wanted_of(model, own, weights), title, type(model).__name__)


def _too_many(model: Any, source: str, storage: Place) -> bool:
    """Return True if init_from names safetensors files with more bytes than half of this process's memory.

    The result is False if ``model`` is a module, and for sources other than safetensors files.
    """
    if isinstance(model, nn.Module):
        return False
    place = located(source, storage)
    if not (place.name.endswith(".safetensors") or is_hugging_face(place)):
        return False
    size_bytes = sum(stored.info.size_bytes for stored in stored_weights(source, storage).values())
    return size_bytes > memory_bytes() / 2
