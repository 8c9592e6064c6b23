"""Weights that this process never holds: each worker fills those of its stages, from files or as the constructor would.

    weights_on="workers", init_from="models/llama"    safetensors files that all workers can read
    weights_on="workers"                              as the constructor would, keyed by PipelineConfig(seed=...)

The model, a function, is built without memory for its parameters. Names, shapes and kinds are compared with those in
the files before anything is started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from raypipe.api.init_from import PICKLED, InitialWeights, located, matched, wanted_of
from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.checkpoint import StateSource, newest_step
from raypipe.engine.initial.building import built_without_weights
from raypipe.engine.initial.files import (
    StoredTensor,
    WeightFiles,
    equal_values,
    is_hugging_face,
    sampled_digest,
    weights_in,
)  # fmt: skip
from raypipe.engine.initial.tape import InitTape
from raypipe.engine.out_of_memory import memory_bytes
from raypipe.engine.storage import Place, PlaceError
from raypipe.errors import ConfigError
from raypipe.prepare.arguments import Unfilled
from raypipe.prepare.inputs import build_model

__all__ = ["WorkerWeights", "begun_with", "files_for", "stored_weights", "weights_for"]

BuildModel = nn.Module | Callable[[], nn.Module]


class WorkerWeights:
    """Builds the user's model without its weights, and says where the workers find them.

    Args:
        model: a function that builds it; or a module on the meta device, with init_from.
        source: what init_from was given as; None for what the model's constructor makes.
        storage: where runs that are named by their name alone lie.
        seed: of the run.

    Attributes:
        digest: checksum of the files, by their headers and samples, once the model was built; None without.
    """

    def __init__(self, model: BuildModel, source: Any, storage: Place, seed: int) -> None:
        if isinstance(model, nn.Module) and not (source and any(p.is_meta for p in model.parameters())):
            raise ConfigError(
                "weights_on='workers' needs a model that has no weights here. Give a function without arguments that "
                "builds it, as in PipelineTrainer(lambda: Model(config), ...), or leave weights_on out."
            )
        self.model, self.source, self.storage, self.seed = model, source, storage, seed
        self.digest: dict[str, str] | None = None

    def __call__(self) -> Unfilled:
        tapes: list[InitTape] = []

        def make() -> Any:
            built, tape = built_without_weights(self.model, self.seed)
            tapes.append(tape)
            return built

        model = self.model if isinstance(self.model, nn.Module) else build_model(make)
        if self.source is not None:
            found = stored_weights(self.source, self.storage)
            self.digest = {"sampled_sha256": sampled_digest(found)}
            return Unfilled(model, (_files_of(model, found, f"init_from={self.source!r}"),))
        keyed = tapes[0].source(model.named_parameters(), self.seed)
        keyed.check()
        return Unfilled(model, (keyed,))

    def note(self, run: str | None, resume: bool | None) -> str:
        """What it does in a run of this name (None for a new one): a run that goes on has its own weights."""
        unseen = "This process holds no weights, so that verify='first_step' compares nothing."
        done = newest_step(self.storage / run) if run and resume is not False else None
        if done is not None:
            return f"Workers take their weights from the run's own checkpoint of step {done}. {unseen}"
        if self.source is None:
            return f"Workers make the weights that the run begins with, as the constructor does, from seed. {unseen}"
        return f"Workers read the weights that the run begins with from init_from={self.source!r}. {unseen}"


def weights_for(
    model: BuildModel, init_from: Any, pipeline: PipelineConfig, storage: Place
) -> InitialWeights | WorkerWeights | None:
    """What the model begins with, and who makes it; None where the model comes with its weights."""
    given = None if init_from is None else InitialWeights(model, init_from, storage)
    source = None if given is None else given.source
    if pipeline.weights_on == "workers" or (
        pipeline.weights_on == "auto" and source is not None and _too_many(model, source, storage)
    ):
        return WorkerWeights(model, source, storage, pipeline.seed)
    return given


def begun_with(
    model: BuildModel, weights: InitialWeights | WorkerWeights | None
) -> tuple[BuildModel, WorkerWeights | None]:
    """(the model or what builds it, what builds it without weights) as Arguments takes them."""
    if isinstance(weights, WorkerWeights):
        return model, weights
    return weights or model, None


def files_for(
    own: Mapping[str, Any],
    aliases: Mapping[str, str],
    found: Mapping[str, StoredTensor],
    title: str,
    model: str,
) -> StateSource:
    """What the stages of a model read of these files.

    Args:
        own: the tensors of its state_dict, by all their names.
        aliases: further names of shared tensors -> their first names.
        title, model: for messages, see ``matched``.

    Raises:
        ConfigError: names are missing or surplus, or shapes or kinds are others.
    """
    values = matched(own, found, title, model, shared=aliases, equal=equal_values)
    first = {name: stored for name, stored in values.items() if name not in aliases}
    return WeightFiles.like_model(first, own, title)


def stored_weights(source: str, storage: Place, title: str = "init_from") -> dict[str, StoredTensor]:
    """Where every tensor of these weights lies.

    Args:
        source: what init_from takes.
        title: of the argument, for messages.

    Raises:
        ConfigError: nothing there, or a file of torch.save.
        CheckpointError: a checkpoint or a file that is damaged.
    """
    if source.endswith(PICKLED):
        raise ConfigError(
            f"{title}={source!r} cannot be read tensor by tensor, as weights_on='workers' asks for. Save the weights "
            "as safetensors (safetensors.torch.save_file, save_pretrained), or set weights_on='client'."
        )
    try:
        return weights_in(located(source, storage, title), f"{title}={source!r}")
    except PlaceError as error:
        raise ConfigError(f"{title}={source!r} cannot be read: {error}") from None


def _files_of(model: nn.Module, found: Mapping[str, StoredTensor], title: str) -> StateSource:
    own = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, torch.Tensor)}
    first = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    aliases = {name: first[id(x)] for name, x in own.items() if first.get(id(x), name) != name}
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in own]
    if lost:
        raise ConfigError(
            f"weights_on='workers': the buffer {lost[0]!r} is on the meta device and in no file, because it is not "
            "persistent. Give a function that builds the model (lambda: Model(config)) instead of a module."
        )
    return files_for(own, aliases, wanted_of(model, own, found), title, type(model).__name__)


def _too_many(model: Any, source: str, storage: Place) -> bool:
    """Whether a folder of Hugging Face or a safetensors file has more than half of what this process could hold."""
    if isinstance(model, nn.Module) or source.endswith(PICKLED):
        return False
    place = located(source, storage)
    if not (place.name.endswith(".safetensors") or is_hugging_face(place)):
        return False
    size_bytes = sum(stored.info.size_bytes for stored in stored_weights(source, storage).values())
    return size_bytes > memory_bytes() / 2
