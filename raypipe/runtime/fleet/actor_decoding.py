"""Text generation by stage actors: each call is a chain of actor calls, of which Ray moves the results.

    caller --call--> stage 0 --boundary tensors--> stage 1 --> ... --logits--> caller

The tensors between two stages go from actor to actor. Links of training are not used: their messages come in the order
of a schedule, and a generation has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import ray
import torch

from raypipe.engine.decoding import DecodeCall, DecodeProgram, StageDecoder, Tensors, failure_of
from raypipe.engine.executor import Executor
from raypipe.errors import StageError
from raypipe.runtime.fleet.roster import results
from raypipe.runtime.worker.orders import sendable

DECODE_TIMEOUT_S = 600.0
"""Timeout in seconds of the slowest call, which is the prompt of a group."""


class ActorDecoding:
    """Decoding stages in stage actors. To be used as a context manager.

    Args:
        actors: actor of each stage.
        programs: program of each stage.
        term: the driver's term, see Fence.
    """

    def __init__(self, actors: Sequence[Any], programs: Sequence[DecodeProgram], term: int) -> None:
        self._actors, self._programs, self._term = actors, programs, term
        self._waiting: dict[Any, int] = {}  # reference of the last stage's result -> group

    def __enter__(self) -> ActorDecoding:
        stages = enumerate(zip(self._actors, self._programs, strict=True))
        begun = [actor.__ray_call__.remote(_begin, self._term, stage, program) for stage, (actor, program) in stages]
        try:
            results(begun, DECODE_TIMEOUT_S, "beginning to decode")
        except BaseException:
            self.__exit__()  # the actors that live would keep weights and caches
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self._actors:
            actor.__ray_call__.remote(_end)

    def submit(self, call: DecodeCall) -> None:
        """See DecodePipeline."""
        previous: tuple[Any, ...] = ()
        for stage, (actor, program) in enumerate(zip(self._actors, self._programs, strict=True)):
            read = (program.prefill if call.prefill else program.step).function.columns
            own = call._replace(columns={name: x for name, x in call.columns.items() if name in read})
            previous = (actor.__ray_call__.remote(_run, stage, own, *previous),)
        self._waiting[previous[0]] = call.group

    def take(self) -> tuple[int, torch.Tensor]:
        """See DecodePipeline.

        Raises:
            StageError: a stage failed or did not answer in time; names it.
        """
        done, _ = ray.wait(list(self._waiting), num_returns=1, timeout=DECODE_TIMEOUT_S)
        if not done:
            raise StageError(f"No stage finished decoding within {DECODE_TIMEOUT_S:g} s. Give fewer sequences.")
        group = self._waiting.pop(done[0])
        ((logits,),) = results(done, DECODE_TIMEOUT_S, "decoding")
        return group, logits


_decoders = WeakKeyDictionary[Executor, dict[int, StageDecoder]]()
"""Decoding stages of this process, which is that of one worker. They hold state of this executor, and go with it."""


def _begin(worker: Any, term: int, stage: int, program: DecodeProgram) -> None:
    """Make a stage of a StageActor ready to decode with its present weights; Ray runs this in the actor."""
    worker._fence.check(term)
    executor = worker._executor
    if executor not in _decoders:
        _decoders.clear()
    _decoders.setdefault(executor, {})[stage] = StageDecoder(program, executor.works[stage].state, executor.transfer)


def _run(worker: Any, stage: int, call: DecodeCall, inputs: Tensors = ()) -> Tensors:
    try:
        return _decoders[worker._executor][stage].run(call, inputs)
    except Exception as error:  # noqa: BLE001  (raised in the caller's process)
        failure = failure_of(stage, error)
        raise (sendable(failure) if isinstance(failure, StageError) else failure) from None


def _end(_worker: Any) -> None:
    _decoders.clear()
