"""Weights that a new run begins with: those of another run, of one of its checkpoints, or of a file.

    init_from="pretrained"                    the newest checkpoint of that run, in the same storage_path
    init_from="runs/lm/checkpoints/step_..."  a run's folder or one of its checkpoints, a path or a URI
    init_from="gpt.safetensors", "gpt.pt"     a state_dict in a file
    init_from="models/llama"                  a folder with model.safetensors, or with its index and its parts

Names and shapes must be those of the model. A .pt file is read with weights_only=True: it can bring no code.
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
from raypipe.engine.checkpoint import load_state_dict, newest_step
from raypipe.engine.copies import copy_of
from raypipe.engine.initial.files import WeightFiles, is_hugging_face, weights_in
from raypipe.engine.storage import Place, PlaceError
from raypipe.engine.user_lines import short
from raypipe.errors import CheckpointError, ConfigError

__all__ = ["PICKLED", "InitialWeights", "located", "matched", "read_weights", "wanted_of"]

T = TypeVar("T")

SHOWN = 3
"""Names of each kind that a refusal lists."""
MOST_BYTES = 1 << 40
PICKLED = (".pt", ".pth", ".bin")
_FILES = (*PICKLED, ".safetensors")


class InitialWeights:
    """Builds the user's model with these weights in it; the user's own is not changed.

    Args:
        model: nn.Module, or a function that builds one.
        source: what init_from was given as.
        storage: where runs that are named by their name alone lie.

    Attributes:
        digest: checksum of the weights by its kind, once a model was built; None before.
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
            found = read_weights(self.source, self.storage)
            _fill(built, found, self.source)
            self.digest = {"sha256": _digest(found)}
        return built

    def note(self, run: str | None, resume: bool | None) -> str:
        """What it does in a run of this name (None for a new one): a run that goes on has its own weights."""
        done = newest_step(self.storage / run) if run and resume is not False else None
        if done is None:
            return f"The run begins with the weights of init_from={self.source!r}."
        return (
            f"init_from={self.source!r} gave the run {run!r} the weights that it began with. It goes on from its own "
            f"checkpoint of step {done} now and takes nothing from there."
        )


def read_weights(source: str, storage: Place, title: str = "init_from") -> dict[str, torch.Tensor]:
    """{name: tensor} of a run, a checkpoint or a file.

    Args:
        source: see the top of this file.
        title: of the argument, for messages.

    Raises:
        ConfigError: nothing there, or not weights; says what there is.
        CheckpointError: a checkpoint that is incomplete or damaged.
    """
    place = located(source, storage, title)
    try:
        if source.endswith(_FILES):
            return _of_file(place, source, title)
        return _of_folder(place, title) if is_hugging_face(place) else _of_checkpoint(place, title)
    except PlaceError as error:
        raise ConfigError(f"{title}={source!r} cannot be read: {error}") from None


def _of_folder(place: Place, title: str) -> dict[str, torch.Tensor]:
    found = weights_in(place, title)
    return dict(WeightFiles.as_stored(found, title).read(found))


def _of_checkpoint(place: Place, title: str) -> dict[str, torch.Tensor]:
    try:
        return load_state_dict(place.path, storage_filesystem=place.filesystem)
    except PlaceError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{title}: {error}") from None


def _of_file(place: Place, source: str, title: str) -> dict[str, torch.Tensor]:
    data = place.read_bytes(most_bytes=MOST_BYTES)
    return _pickled(data, source, title) if source.endswith(PICKLED) else _safetensors(data, source, title)


def _safetensors(data: bytes, source: str, title: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, ValueError) as error:
        raise ConfigError(f"{title}={source!r} is no safetensors file: {short(error)}") from None


def _pickled(data: bytes, source: str, title: str) -> dict[str, torch.Tensor]:
    save = "Save the weights alone: torch.save(model.state_dict(), path)."
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  (told in one paragraph)
        # In words of our own: torch's advise to run what is in the file, in bold.
        whole = "Unsupported global" in str(error)
        what = (
            "It holds other objects than tensors, such as a whole module"
            if whole
            else "It is damaged, or none of torch's"
        )
        raise ConfigError(
            f"{title}={source!r} cannot be read with torch.load(..., weights_only=True), which runs no code that is "
            f"in a file. {what}. {save}"
        ) from None
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{title}={source!r} holds a {type(found).__name__}, which is no state_dict. {save}")
    weights = {name: value for name, value in found.items() if not name.endswith("_extra_state")}
    others = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConfigError(
            f"{title}={source!r} is no state_dict: {_listed(map(repr, others))} "
            f"{'is no tensor' if len(others) == 1 else 'are no tensors'}. {save}"
        )
    return weights


def located(source: str, storage: Place, title: str = "init_from") -> Place:
    """Where this is.

    Raises:
        ConfigError: there is nothing of that name.
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


def _fill(model: nn.Module, found: Mapping[str, torch.Tensor], source: str) -> None:
    """Raises: ConfigError where names or shapes are others."""
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    if any(value.is_meta for value in own.values()):
        raise ConfigError(
            "init_from fills the parameters of the model, but some are on the meta device, which holds no numbers. "
            "Give a function that builds the model and set weights_on='workers', so that each worker fills its own, or "
            "build the model with numbers."
        )
    found = wanted_of(model, own, found)
    matched(own, found, f"init_from={source!r}", type(model).__name__)
    model.load_state_dict(found, strict=False)


def wanted_of(model: nn.Module, own: Mapping[str, Any], found: Mapping[str, T]) -> dict[str, T]:
    """Without what the model has no use for: state of modules that is no tensor there, and what it says it ignores."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return {
        name: value
        for name, value in found.items()
        if name in own or not (name.endswith("_extra_state") or any(re.search(pattern, name) for pattern in ignored))
    }


def matched(
    own: Mapping[str, Any],
    found: Mapping[str, T],
    title: str,
    model: str,
    *,
    shared: Mapping[str, str] | None = None,
    equal: Callable[[Any, Any], bool] = torch.equal,
) -> dict[str, T]:
    """By each name of the model, what was found for it; tensors that the model shares need to be there once.

    Args:
        own: the model's tensors, or what says their dtype and shape, under all their names.
        found: likewise.
        title: who gave them, for messages: ``init_from='x'``.
        model: what it is called.
        shared: further names of tensors that the model shares -> their first names; None where their memory tells.
        equal: whether two of those that were found are the same.

    Raises:
        ConfigError: names or shapes are others.
    """
    first = shared_names(own) if shared is None else shared
    held, unequal = _held(own, found, first, equal)
    faults = {
        "missing there": [repr(name) for name in own if first.get(name, name) not in held],
        "not in the model": [repr(name) for name in found if name not in own],
        "of another shape or kind": _other_shapes(own, found),
        "one tensor in the model and two there": unequal,
    }
    if any(faults.values()):
        told = "; ".join(f"{len(names)} {what}: {_listed(names)}" for what, names in faults.items() if names)
        raise ConfigError(
            f"{title} does not fit the model {model}. Of its names are {told}.{_hint(own, found)} Give weights that "
            "were saved from this model."
        )
    return {name: found[held[first.get(name, name)]] for name in own}


def _held(
    own: Iterable[str], found: Mapping[str, Any], first: Mapping[str, str], equal: Callable[[Any, Any], bool]
) -> tuple[dict[str, str], list[str]]:
    """By each tensor of the model, a name that was found; and names of one tensor under which two were."""
    held: dict[str, str] = {}
    unequal = []
    for name in own:
        if name in found:
            other = held.setdefault(first.get(name, name), name)
            if other != name and not equal(found[other], found[name]):
                unequal.append(f"{other!r} and {name!r}")
    return held, unequal


def _other_shapes(own: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    return [
        f"{name!r} ({_kind(found[name])} there, {_kind(own[name])} in the model)"
        for name in own
        if name in found and not _fits(found[name], own[name])
    ]


def _fits(there: Any, here: Any) -> bool:
    """Numbers of another precision are converted, whole numbers do not become weights."""
    kinds = [(t.dtype.is_floating_point, t.dtype.is_complex) for t in (there, here)]
    return tuple(there.shape) == tuple(here.shape) and kinds[0] == kinds[1]


def _kind(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _hint(own: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Names with one prefix too many or too few."""
    for these, others, words in ((found, own, "there"), (own, found, "in the model")):
        prefix = next(iter(these), "").partition(".")[0] + "."
        bare = {name.removeprefix(prefix) for name in these}
        if all(name.startswith(prefix) for name in these) and len(bare & others.keys()) > len(others) // 2:
            return f" All names {words} begin with {prefix!r}, and without that most would be the same."
    return ""


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more


def _digest(found: Mapping[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(found):
        tensor = found[name].detach().contiguous()
        total.update(f"{name} {_kind(tensor)}".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
