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
    """Return an optimizer with torch's ``param_groups`` and ``state_dict()``, for an object that holds several.

    Returns:
        ``optimizer`` itself if it has these, or if the optimizers in its attributes do not hold all its parameters.
    """
    if not callable(getattr(optimizer, "step", None)) or _is_like_torchs(optimizer):
        return optimizer
    found = {id(x): x for x in pytree.tree_leaves(dict(getattr(optimizer, "__dict__", {}))) if isinstance(x, Optimizer)}
    held = [*found.values()]
    parameters = [id(p) for one in held for group in one.param_groups for p in group["params"]]
    own = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
    if not held or len({*parameters}) < len(parameters) or not own <= {*parameters}:
        return optimizer
    kind = type(type(optimizer).__name__, (Together,), {})  # messages and checkpoints name the user's class
    return kind(optimizer, held)


def _is_like_torchs(optimizer: Any) -> bool:
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "state_dict")):
        return False
    saved = optimizer.state_dict()
    return isinstance(saved, dict) and saved.keys() == {"state", "param_groups"}


class Together(Optimizer):
    """Optimizer that steps the optimizers in an object of the user's by calling the object's ``step()``.

    All have one state and the same groups, which are handed to them before each step, because ``load_state_dict`` makes
    new ones. Other attributes are those of the object.

    Args:
        users: the object.
        held: optimizers in it, each with other parameters.
    """

    def __init__(self, users: Any, held: list[Optimizer]) -> None:
        self.users, self.held = users, held
        super().__init__([group for one in held for group in one.param_groups], {})
        for one in held:
            self.state.update(one.state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("users", "held"):
            raise AttributeError(name)
        return getattr(self.users, name)

    def step(self, closure: Any = None) -> Any:
        """Hand state and groups to the held optimizers, and call the object's ``step()``."""
        groups = iter(self.param_groups)
        for one in self.held:
            one.state, one.param_groups = self.state, [next(groups) for _ in one.param_groups]
        if isinstance(self.users, Optimizer):
            own = vars(self.users)
            own.update({name: getattr(self, name) for name in ("state", "param_groups") if name in own})
        return self.users.step() if closure is None else self.users.step(closure)
