"""One optimizer made of an object that steps several optimizers of torch, as Muon for matrices and AdamW for the rest.

    user's object   step()      state_dict() -> {"muon": ..., "adamw": ...}, or none
      muon          [w1, w2]    state of its own
      adamw         [b1, e]     state of its own
    Together        [w1, w2], [b1, e]         one state, by parameter; one state_dict() of torch's form

Checkpoints keep the state of an optimizer by the names of parameters, so that any number of stages can go on from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

Optimizer = torch.optim.Optimizer


def as_one(optimizer: Any) -> Any:
    """Convert an object that holds several optimizers to one optimizer with ``param_groups`` and ``state_dict()``.

    Returns:
        The new optimizer; or ``optimizer`` unchanged if it has these attributes in torch's form, if the optimizers in
        its attributes do not hold all of its parameters, or if it is a torch optimizer that does more than hold several
        others, such as a wrapper of a single optimizer.
    """
    if not callable(getattr(optimizer, "step", None)) or _is_like_torchs(optimizer):
        return optimizer
    found = {id(x): x for x in pytree.tree_leaves(dict(getattr(optimizer, "__dict__", {}))) if isinstance(x, Optimizer)}
    held = [*found.values()]
    parameters = [id(p) for one in held for group in one.param_groups for p in group["params"]]
    own = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
    if not held or len({*parameters}) < len(parameters) or not own <= {*parameters}:
        return optimizer
    if isinstance(optimizer, Optimizer) and not _only_holds(optimizer, held):
        return optimizer
    kind = type(type(optimizer).__name__, (Together,), {})  # messages and checkpoints name the user's class
    return kind(optimizer, held)


def _is_like_torchs(optimizer: Any) -> bool:
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "state_dict")):
        return False
    return _is_state_dict(optimizer.state_dict())


def _is_state_dict(saved: Any) -> bool:
    return isinstance(saved, dict) and saved.keys() == {"state", "param_groups"}


def _only_holds(optimizer: Optimizer, held: list[Optimizer]) -> bool:
    """Return True if ``optimizer`` has no state of its own: its state_dict() consists of those of several optimizers.

    If its class does not define state_dict(), ``held`` must have several. An entry None is an optimizer without
    parameters, such as the optimizer of biases in a stage that has matrices only.
    """
    inherits = type(optimizer).state_dict is Optimizer.state_dict
    saved = [one.state_dict() for one in held] if inherits else optimizer.state_dict()
    parts = pytree.tree_leaves(saved, is_leaf=_is_state_dict)
    return len(parts) > 1 and all(part is None or _is_state_dict(part) for part in parts)


class Together(Optimizer):
    """Optimizer around a user's object that holds several optimizers; ``step()`` calls the object's ``step()``.

    State and groups are joined from all held optimizers. Each step first assigns them to the held optimizers again,
    because ``load_state_dict`` makes new ones. All other attributes are read from the object.

    Args:
        users: object that holds the optimizers.
        held: optimizers in the object, which have no parameter in common.
    """

    def __init__(self, users: Any, held: list[Optimizer]) -> None:
        self.users, self.held = users, held
        groups = [group for one in held for group in one.param_groups]
        if not all("param_names" in group for group in groups):
            for group in groups:
                group.pop("param_names", None)  # torch takes the names of all parameters or of none
        super().__init__(groups, {})
        for one in held:
            self.state.update(one.state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("users", "held"):
            raise AttributeError(name)
        return getattr(self.users, name)

    def step(self, closure: Any = None) -> Any:
        """Assign state and groups to the held optimizers, and call the object's ``step()``."""
        groups = iter(self.param_groups)
        for one in self.held:
            one.state, one.param_groups = self.state, [next(groups) for _ in one.param_groups]
        if isinstance(self.users, Optimizer):
            own = vars(self.users)
            own.update({name: getattr(self, name) for name in ("state", "param_groups") if name in own})
        return self.users.step() if closure is None else self.users.step(closure)
