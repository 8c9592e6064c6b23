"""Ring of weight versions of one stage: every backward uses the weights of its forward.

    slot      0         1         2
    version   4         5         6  <- newest: the optimizer's own parameters
    used by   F7 F8     F9        -            an update while F9 is in flight copies 6 into an unused slot

The optimizer changes the newest version in place, unless a micro-batch still needs it: then it changes a copy in
another slot. So a stage that runs no micro-batch ahead has one slot. Slots are created when first needed, up to the
capacity. Buffers (BatchNorm's statistics) are not versioned.

If a stage computes in 16 bits (``Precision.leaves``), the optimizer's parameters are not a slot: they stay in fp32, and
after a step the newest slot is filled from them. A stage that predicts weights has no slot for them either. Its slots
hold what the version will have become when its gradients are applied, if updates go on as the last one (SpecTrain,
arXiv:1809.02839; XPipe, arXiv:1911.04610; d is the delay in updates):

    predicted   w_v + d (w_v - w_(v-1));  w_v for the first version after the pipeline was empty
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from raypipe.engine.stage.mixed_precision import leaf_dtype
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import StageError
from raypipe.ir.weights import VersionRule


@dataclass(slots=True, eq=False)
class _Slot:
    """Weights of one version.

    Attributes:
        version: number of updates of the weights since the ring was created.
        tensors: weights of the trainable parameters, in their order.
        leaves: one per use of a parameter, in the order of ``program.train.sites``. Each is a separate autograd leaf in
            the memory of its tensor, so that autograd returns a gradient per use.
        trained: leaves that require a gradient.
        users: number of micro-batches between their forward and their backward that use this version.
    """

    version: int
    tensors: list[torch.Tensor]
    leaves: list[torch.Tensor]
    trained: list[torch.Tensor] = field(init=False)
    users: int = 0

    def __post_init__(self) -> None:
        self.trained = [leaf for leaf in self.leaves if leaf.requires_grad]


class WeightRing:
    """Ring of weight versions of one stage: the leaves that forwards use, and the slots that updates write.

    Args:
        parameters: parameters of the stage; in fp32 they share the memory of the newest slot.
        rule: rule that selects the version of a forward.
        capacity: maximum number of slots, each with the weights of one version.
        ahead: number of forwards that stage 0 runs ahead of its backwards; used by the rule STAMPED.
        replicas: number of replicas of the stage; after micro-batch k a replica computes k + replicas.
        lookahead: d, number of updates by which weights are predicted; 0 uses them as they are.
        watch: called with (index of a parameter's use in ``program.train.sites``, leaf) for every new leaf.
    """

    def __init__(
        self,
        program: StageProgram,
        parameters: Mapping[str, torch.nn.Parameter],
        rule: VersionRule = VersionRule.NEWEST,
        capacity: int = 1,
        ahead: int = 0,
        replicas: int = 1,
        lookahead: float = 0.0,
        watch: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        # Stages before the first trainable one have one version only, so the first trainable stage stamps.
        below = program.index < program.first_trainable
        stamps = rule is VersionRule.STAMPED and program.index == program.first_trainable
        self._rule = VersionRule.NEWEST if below or stamps else rule
        self._capacity, self._ahead, self._replicas, self._watch = capacity, ahead, replicas, watch
        self._sites = program.train.sites
        self._parameters = parameters
        self._names = [name for name in program.parameters if name in program.trainable]
        self._dtype = leaf_dtype(program.precision)
        self._lookahead = lookahead if self._names else 0.0
        self._before: list[torch.Tensor] = []  # weights before the newest update; empty before the first one
        self._apart = self._dtype is not None or bool(self._lookahead)  # slots do not share memory with parameters
        # Frozen parameters are converted once.
        self._constant = {name: self._leaf(p) for name, p in parameters.items() if name not in program.trainable}
        self._newest = self._slot(0, [self._leaf(parameters[name], copies=self._apart) for name in self._names])
        self._slots = [self._newest]
        self._used: dict[int, _Slot] = {}
        self._first, self._base, self._interval = 0, 0, 1
        self._wanted = 0

    @property
    def newest(self) -> int:
        """Number of the newest version."""
        return self._newest.version

    @property
    def held(self) -> int:
        """Number of existing slots."""
        return len(self._slots)

    def begin(self, first_microbatch: int, interval: int) -> None:
        """Reset the version counters for an empty pipeline, with ``interval`` micro-batches per update from now on."""
        assert not self._used, "a version is in use, but the pipeline is empty"
        self._first, self._interval = first_microbatch, interval
        self._base = self._wanted = self.newest
        if self._lookahead:
            self._fill_newest()

    def enter(self, microbatch: int, stamp: int) -> int:
        """Select the weight version of a micro-batch before its forward; return the version's number.

        The version stays unchanged until ``leave``.

        Args:
            stamp: version that was sent with the micro-batch; used by the rule STAMPED.

        Raises:
            StageError: the ring does not hold the version.
        """
        match self._rule:
            case VersionRule.NEWEST:
                version = self.newest
            case VersionRule.STAMPED:
                version = stamp
                self._wanted = self._late(microbatch + self._replicas - self._ahead)
            case VersionRule.DELAYED:
                version = self._late(microbatch - self._interval)
                self._wanted = self._late(microbatch + self._replicas - self._interval)
        slot = next((slot for slot in self._slots if slot.version == version), None)
        if slot is None:
            held = sorted(slot.version for slot in self._slots)
            raise StageError(f"Micro-batch {microbatch} needs weight version {version}, but the stage holds {held}.")
        slot.users += 1
        self._used[microbatch] = slot
        return version

    def leaves(self, microbatch: int) -> Sequence[torch.Tensor]:
        """Return the leaves of the version that a micro-batch uses, one per use of a parameter."""
        return self._used[microbatch].leaves

    def trained(self, microbatch: int) -> Sequence[torch.Tensor]:
        """Return the entries of ``leaves`` that require a gradient."""
        return self._used[microbatch].trained

    def version(self, microbatch: int) -> int:
        """Return the version that a micro-batch in flight uses; 0 if ``enter`` was not called for it."""
        slot = self._used.get(microbatch)
        return 0 if slot is None else slot.version

    def newest_leaves(self) -> Sequence[torch.Tensor]:
        """Return the leaves of the newest version, for a forward without backward."""
        return self._newest.leaves

    def leave(self, microbatch: int) -> None:
        """Release the version of a micro-batch after its backward."""
        self._used.pop(microbatch).users -= 1

    def has_room(self) -> bool:
        """Return True if an update can be made now: in place, in an unused slot or in a new one."""
        return not self._needed(self._newest) or len(self._slots) < self._capacity or self._spare() is not None

    def advance(self) -> None:
        """Begin the next version, in another slot if a micro-batch needs the newest; the optimizer may then step."""
        if self._lookahead:
            held = [self._parameters[name].detach() for name in self._names]
            self._before = self._before or [torch.empty_like(tensor) for tensor in held]
            torch._foreach_copy_(self._before, held)
        if self._needed(self._newest):
            slot = self._spare()
            if slot is None:
                assert len(self._slots) < self._capacity, "has_room() comes first"
                slot = self._slot(self.newest, [torch.empty_like(tensor) for tensor in self._newest.tensors])
                self._slots.append(slot)
            slot.version = self.newest
            if not self._apart:
                if slot.tensors:
                    torch._foreach_copy_(slot.tensors, self._newest.tensors)
                for name, tensor in zip(self._names, slot.tensors, strict=True):
                    self._parameters[name].data = tensor
            self._newest = slot
        self._newest.version += 1

    def follow(self) -> None:
        """Update the newest slot after a step of the optimizer.

        This is needed if the optimizer assigned ``parameter.data`` instead of changing it in place, or if the slot has
        another dtype than the parameters, or predicted weights.
        """
        if self._apart:
            if self._lookahead:
                self._predict()
            else:
                self._fill_newest()
            return
        slot, moved = self._newest, set()
        for position, name in enumerate(self._names):
            parameter = self._parameters[name]
            if slot.tensors[position].data_ptr() != parameter.data_ptr():
                slot.tensors[position] = parameter.data
                moved.add(name)
        if moved:
            for leaf, site in zip(slot.leaves, self._sites, strict=True):
                if site.parameter in moved:
                    leaf.data = self._parameters[site.parameter].data

    def fill(self) -> None:
        """Fill the newest slot, if it is apart from the parameters, from loaded ones, in an empty pipeline."""
        if self._apart:
            self._fill_newest()
        if self._dtype is not None:
            for name, tensor in self._constant.items():
                tensor.copy_(self._parameters[name].detach())

    def _fill_newest(self) -> None:
        if self._names:
            torch._foreach_copy_(self._newest.tensors, [self._parameters[name].detach() for name in self._names])

    def _predict(self) -> None:
        """Fill the newest slot with predicted weights. Each operation rounds, so that all devices can repeat them."""
        held, moved = [self._parameters[name].detach() for name in self._names], self._before
        torch._foreach_neg_(moved)
        torch._foreach_add_(moved, held)
        torch._foreach_mul_(moved, self._lookahead)
        torch._foreach_add_(moved, held)
        torch._foreach_copy_(self._newest.tensors, moved)

    def _leaf(self, parameter: torch.Tensor, *, copies: bool = False) -> torch.Tensor:
        """Return a parameter's data; a copy with ``copies``, or if forwards have another dtype (``leaf_dtype``)."""
        return parameter.data.to(self._dtype or parameter.dtype, copy=copies)

    def _late(self, microbatch: int) -> int:
        """Return the version that includes all updates of micro-batches before this one."""
        return self._base + max(0, (microbatch - self._first) // self._interval)

    def _needed(self, slot: _Slot) -> bool:
        """Return True if a micro-batch in flight uses the version in this slot, or a later micro-batch may use it."""
        return slot.users > 0 or (self._rule is not VersionRule.NEWEST and slot.version >= self._wanted)

    def _spare(self) -> _Slot | None:
        return next((slot for slot in self._slots if slot is not self._newest and not self._needed(slot)), None)

    def _slot(self, version: int, tensors: list[torch.Tensor]) -> _Slot:
        # .detach() of plain tensors, not of the parameter: leaves that shared the parameter's version counter would
        # make autograd refuse the backwards of old versions once the optimizer has stepped on another slot.
        own = dict(zip(self._names, tensors, strict=True))
        held = {**self._constant, **own}
        leaves = [held[site.parameter].detach().requires_grad_(site.parameter in own) for site in self._sites]
        if self._watch is not None:
            for position, leaf in enumerate(leaves):
                self._watch(position, leaf)
        return _Slot(version, tensors, leaves)
