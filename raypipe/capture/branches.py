"""Branches of forward on values of the data that a trace can decide although it has no values.

    if torch.rand([]) < 0.0: ...            LayerDrop that is switched off goes one way, whatever is drawn
    if labels.max() >= num_classes: raise   a check goes on; its other way raises an error, and ends every run
    if x.mean() > 0: x = x / 2              undecided: both ways go on

A branch is a check if forward, traced with the other decision at that branch, ends in a raise statement of the function
of the branch, of one of its callers (``if has_nan(x): raise``), or of a function that only fails (``if bad:
fail("NaN")``). Any other error may have another cause, such as an operation that cannot be traced, or one that another
machine can do (``x = varlen(x)``, which raises where the kernel is missing). Every visit of a branch is tried, because
layers of one class may differ. Stages leave checks out: preflight makes them on the first mini-batch, in plain PyTorch.
"""

from __future__ import annotations

import dis
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from raypipe.errors import RaypipeError
from raypipe.user_lines import line_outside_torch

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"  # with a separator: torchvision is no part of torch
_CHECKING = f"{_TORCH}distributions{os.sep}"
"""Part of torch whose checks are decided as those of user code, as the constraints of validate_args."""
_BELOW = {torch.Tensor.lt: True, torch.Tensor.__lt__: True, torch.Tensor.ge: False, torch.Tensor.__ge__: False}
"""Comparisons of a drawn number with a bound; True if they are true for a number below the bound."""
_COMPARISONS = torch.equal, torch.allclose, torch.Tensor.equal, torch.Tensor.allclose
"""Functions that return a truth value, and not a tensor."""

_CONSTANTS = str, int, float, type(None), torch.SymInt, torch.SymFloat, torch.Size, torch.dtype, torch.device

Traced = TypeVar("Traced")


class _Place(NamedTuple):
    """Branch in one forward: instruction of ``code`` at a position, and the number of its earlier visits.

    The position is (line, end of line, column, end of column) in the source. The byte offset is not used, because
    CPython 3.11 reports another one for a call that it has specialized.
    """

    code: CodeType
    at: tuple[int | None, ...]
    visit: int


def trace_past_checks(trace: Callable[[], Traced]) -> tuple[Traced, tuple[str, ...]] | None:
    """Trace a model, and decide its branches on values of the data if each of them can go only one way.

    Such branches are checks, and comparisons of a random number with a bound outside of its range.

    Args:
        trace: traces the model; called once, and once or twice more for each check.

    Returns:
        (result of ``trace``, FILE:LINE of each check); None if a branch can go both ways.

    Raises:
        Exception: ``trace`` fails, although every branch that it met can go only one way.
    """
    passed: dict[_Place, bool] = {}
    main, traced, error = _attempt(trace, passed)
    while error is not None and main.last not in passed and _fails_check(error, main):
        assert main.last is not None
        passed[main.last] = not main.decisions[main.last]
        main, traced, error = _attempt(trace, passed)
    for place, decision in main.decisions.items():
        if place not in passed:
            other, _, failure = _attempt(trace, passed, otherwise=place)
            if failure is None or other.last != place or not _fails_check(failure, other):
                return None
            passed[place] = decision
    if error is not None:
        raise error
    return traced, tuple(dict.fromkeys(main.lines))  # type: ignore[return-value]


def _attempt(
    trace: Callable[[], Traced], passed: Mapping[_Place, bool], otherwise: _Place | None = None
) -> tuple[_Decided, Traced | None, BaseException | None]:
    """Call ``trace`` in a new ``_Decided(passed, otherwise)``; return (that mode, result or None, error or None)."""
    with _Decided(passed, otherwise) as decided:
        try:
            return decided, trace(), None
        except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever the user's code raises)
            return decided, None, error


def _fails_check(error: BaseException, decided: _Decided) -> bool:
    """Return True if the branch that was decided last is a check, and ``error`` is its failure.

    The error must come from a raise or assert statement in the function of the branch, in a caller of that function, or
    in a function that only fails; a cause of the error must too. A SystemExit always counts: no operation that a
    machine lacks raises one, and libraries wrap sys.exit (wandb.init).
    """
    if isinstance(error, SystemExit):
        return True
    trace, calling = error.__traceback__, None
    while trace is not None and trace.tb_next is not None:
        trace, calling = trace.tb_next, trace
    if trace is None or decided.frame is None or isinstance(error, RaypipeError):
        return False
    raising = trace.tb_frame
    if raising is not decided.frame:
        callers = [frame for frame, _ in walk_stack(decided.frame)]
        own = raising in callers or (
            calling is not None and calling.tb_frame in callers and _only_fails(error, calling)
        )
        if raising.f_code.co_filename.startswith(_TORCH) or not own:
            return False
    causes = (one for one in (error.__cause__, error.__context__) if one is not None and one is not decided.handled)
    if not all(_fails_check(cause, decided) for cause in causes):
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _only_fails(error: BaseException, calling: TracebackType) -> bool:
    """Return True if the function that raised ``error`` cannot compute anything, wherever it runs.

    It never returns, its call is a statement of its own, and nothing but numbers and texts is passed to it. Errors of
    what is missing on this machine are excluded.

    Args:
        calling: traceback entry of the call.
    """
    assert calling.tb_next is not None
    function = calling.tb_next.tb_frame
    if isinstance(error, NotImplementedError | ImportError):
        return False
    if any(one.opname.startswith(("RETURN_", "YIELD_")) for one in dis.get_instructions(function.f_code)):
        return False
    following = [one for one in dis.get_instructions(calling.tb_frame.f_code) if one.offset > calling.tb_lasti]
    if not following or following[0].opname != "POP_TOP":
        return False
    return all(isinstance(one, _CONSTANTS) for one in pytree.tree_leaves(dict(function.f_locals)))


def _version(value: torch.Tensor) -> float:
    """Return the number of changes of a tensor in place; NaN, unequal to itself, if torch does not count them."""
    return math.nan if value.is_inference() else value._version


class _Decided(TorchFunctionMode):
    """Function mode that decides branches which torch.export cannot decide, because they depend on values.

    Models with LayerDrop compare a random number for every layer with a probability that is 0 by default (Hugging
    Face's OPT, BART and Whisper before 5.23). This random operation stays in the graph, so that the numbers of later
    random operations do not change.

    Args:
        passed: place -> truth value, for branches that are known to be checks. Other branches get False.
        otherwise: place whose branch is decided the other way; None for no such place.

    Attributes:
        decisions: decision at every place so far, in the order of the visits.
        last: place of the latest decision; None before the first.
        frame: frame of the latest decision.
        lines: the user's line, as FILE:LINE, of every decision and of every call of ``torch._assert``.
        handled: error that was handled when the trace began, or None; it is the context of every error of forward.
    """

    def __init__(self, passed: Mapping[_Place, bool], otherwise: _Place | None = None) -> None:
        super().__init__()
        self._passed, self._otherwise = passed, otherwise
        self.decisions: dict[_Place, bool] = {}
        self.last: _Place | None = None
        self.frame: FrameType | None = None
        self._visits: Counter[tuple[CodeType, tuple[int | None, ...]]] = Counter()
        self.lines: list[str] = []
        self.handled = sys.exception()
        # By id, because tensors compare elementwise; held, so that no other tensor gets the id.
        self._drawn: dict[int, tuple[torch.Tensor, float]] = {}
        self._known: dict[int, tuple[torch.Tensor, float, bool]] = {}
        self._symbols = _symbols_decided(self._decide)

    def __enter__(self) -> _Decided:
        self._symbols.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._symbols.__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__bool__:
            known, version, truth = self._known.get(id(args[0]), (args[0], math.nan, False))
            if version == _version(known):
                return truth
            try:
                return func(*args)
            except GuardOnDataDependentSymNode:
                if (decision := self._decide(sys._getframe(1))) is None:
                    raise
                self._keep_truth(args[0], decision)  # as in ``return a.any() or b.any()``: asked twice
                return decision
        if func in _COMPARISONS:
            try:
                return func(*args, **(kwargs or {}))
            except DataDependentOutputException:
                if (decision := self._decide(sys._getframe(1))) is None:
                    raise
                return decision
        if func is torch._assert and isinstance(args[0], torch.Tensor):
            self._note(sys._getframe(1))
            return None
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and isinstance(result, torch.Tensor) and result.numel() == 1:
            self._drawn[id(result)] = result, _version(result)
        elif func in _BELOW and len(args) == 2 and id(args[0]) in self._drawn:
            bound, (_, version) = args[1], self._drawn[id(args[0])]
            if isinstance(bound, (int, float)) and not 0 < bound < 1 and version == _version(args[0]):
                self._keep_truth(result, (bound >= 1) is _BELOW[func])
        return result

    def _keep_truth(self, value: torch.Tensor, truth: bool) -> None:
        self._known[id(value)] = value, _version(value), truth

    def _decide(self, frame: FrameType) -> bool | None:
        """Decide and record which way the code in ``frame`` goes at a branch on a value that the trace does not have.

        The decision is that of ``passed``, else False; at the place ``otherwise`` it is the opposite.

        Returns:
            The truth value of the branch's condition. None, and nothing is recorded, if the branch is in torch's own
            code; code of torch.distributions counts as the user's.
        """
        branching = frame
        while branching.f_code.co_name == "__torch_function__" and branching.f_back is not None:
            branching = branching.f_back  # from a function mode of torch.export to its caller
        positions = islice(branching.f_code.co_positions(), branching.f_lasti // 2, None)
        instruction = branching.f_code, next(positions)
        file = branching.f_code.co_filename
        if file.startswith(_TORCH) and not file.startswith(_CHECKING):
            return None
        place = _Place(*instruction, self._visits[instruction])
        self._visits[instruction] += 1
        decision = self._passed.get(place, False) is not (place == self._otherwise)
        self.decisions[place] = decision
        self.last, self.frame = place, branching
        self._note(frame)
        return decision

    def _note(self, frame: FrameType) -> None:
        self.lines.append(line_outside_torch(frame).removeprefix(" at "))


@contextmanager
def _symbols_decided(decide: Callable[[FrameType], bool | None]) -> Iterator[None]:
    """Decide branches on symbolic truth values by ``decide(frame of the branch)``; None raises torch's own error."""
    original = torch.SymBool.__bool__

    def decided(self: torch.SymBool) -> bool:
        try:
            return original(self)
        except GuardOnDataDependentSymNode:
            if (decision := decide(sys._getframe(1))) is None:
                raise
            return decision

    torch.SymBool.__bool__ = decided  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.SymBool.__bool__ = original  # type: ignore[method-assign]
