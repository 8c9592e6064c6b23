"""Text generation by stages: programs that decode with a cache of keys and values, and the stage that runs them.

    prefill   prompt (b, n)          -->  logits (b, vocabulary), and the keys and values of n positions
    step      token (b, 1), caches   -->  logits (b, vocabulary), and caches that are one position longer

Each stage keeps the caches of its own layers; only what crosses a cut in a forward crosses it here. The sequences of a
batch are divided into groups, which go through the stages one behind the other:

    stage 0   A B C A B C A B C          the next token of A is known when A has left the last stage, and the
    stage 1     A B C A B C A B          stages work on B and C meanwhile
    stage 2       A B C A B C A
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch

from raypipe.engine.device.device import TransferKind
from raypipe.engine.device_functions import placed
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.state import StageState
from raypipe.engine.stage.randomness import RandomKey, evaluating
from raypipe.engine.stage.stage import GraphFunction
from raypipe.engine.torch_settings import one_thread
from raypipe.errors import RaypipeError, StageError
from raypipe.user_lines import LEAVING, short

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class DecodeFunction:
    """Function of one stage for a prompt or for a token.

    Attributes:
        function: its columns are tensors of the call and caches of the stage; its last outputs are new caches.
        caches: names of these caches, in the order of the outputs.
    """

    function: GraphFunction
    caches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DecodeProgram:
    """Functions of one stage: ``prefill`` for the prompt of a group, ``step`` for each further token."""

    prefill: DecodeFunction
    step: DecodeFunction


class DecodeCall(NamedTuple):
    """Forward of one group of sequences through all stages.

    Attributes:
        group: number of the group.
        columns: tensors by name, which stages read; token ids, masks and positions.
        prefill: True for the prompt of the group, which begins new caches.
        done: groups that have ended, whose caches are dropped.
    """

    group: int
    columns: Mapping[str, torch.Tensor]
    prefill: bool
    done: tuple[int, ...] = ()


class StageDecoder:
    """One stage that decodes: its functions, the weights of its state, and the caches of each group.

    The state's tensors are used where they are, so that generated tokens follow the stage's weights.
    """

    def __init__(self, program: DecodeProgram, state: StageState, transfer: DeviceTransfer) -> None:
        self._state, self._transfer = state, transfer
        self._functions = {True: program.prefill, False: program.step}
        self._placed = {first: placed(one.function, transfer) for first, one in self._functions.items()}
        self._caches: dict[int, dict[str, torch.Tensor]] = {}

    def run(self, call: DecodeCall, inputs: Sequence[torch.Tensor]) -> Tensors:
        """Run a call on this stage.

        Args:
            inputs: outputs of the previous stage, in host memory; none for the first stage.

        Returns:
            What the next stage reads, in host memory; on the last stage (logits of the last position,).
        """
        for group in call.done:
            self._caches.pop(group, None)
        function, state, transfer = self._placed[call.prefill], self._state, self._transfer
        with transfer.device.prepare_thread(), evaluating():
            columns: dict[str, Any] = dict(transfer.named(call.columns, TransferKind.COLUMNS))
            columns.update({} if call.prefill else self._caches[call.group])
            outputs = function(
                [state.parameters[site.parameter] for site in function.sites],
                [state.buffers[name] for name in function.buffers],
                transfer.to_device(tuple(inputs), TransferKind.INPUTS),  # type: ignore[arg-type]
                [columns[name] for name in function.columns],
                RandomKey(0, 0, 0),
            )
            names = self._functions[call.prefill].caches
            sent, caches = outputs[: len(outputs) - len(names)], outputs[len(outputs) - len(names) :]
            self._caches.setdefault(call.group, {}).update(zip(names, caches, strict=True))
            return transfer.to_host(sent, TransferKind.OUTPUTS)  # type: ignore[return-value]


class DecodePipeline(Protocol):
    """Stages that decode. Calls of one group must follow one another; those of several groups overlap."""

    def submit(self, call: DecodeCall) -> None:
        """Send a call to the first stage; return at once."""

    def take(self) -> tuple[int, torch.Tensor]:
        """Wait for the next call that has left the last stage; return its group and logits of shape (b, vocabulary)."""


class ThreadDecoding:
    """Decoding stages as threads of this process, one for each worker. To be used as a context manager.

    Args:
        decoders: the stages.
        workers: worker of each stage.
    """

    def __init__(self, decoders: Sequence[StageDecoder], workers: Sequence[int]) -> None:
        self._decoders, self._workers = decoders, workers
        self._results: SimpleQueue[tuple[int, torch.Tensor] | BaseException] = SimpleQueue()
        self._queues = {worker: SimpleQueue[tuple[int, DecodeCall, Tensors] | None]() for worker in workers}
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"raypipe decoder {worker}", daemon=True)
            for worker, queue in self._queues.items()
        ]
        self._limit = one_thread()  # as in an actor, since sums over several threads round differently

    def __enter__(self) -> ThreadDecoding:
        self._limit.__enter__()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()
        self._limit.__exit__(None, None, None)

    def submit(self, call: DecodeCall) -> None:
        """See DecodePipeline."""
        self._queues[self._workers[0]].put((0, call, ()))

    def take(self) -> tuple[int, torch.Tensor]:
        """See DecodePipeline.

        Raises:
            StageError: a stage failed; names it.
        """
        while True:  # in short waits, so that Ctrl-C gets through
            try:
                result = self._results.get(timeout=0.5)
            except Empty:
                continue
            if isinstance(result, BaseException):
                raise result
            return result

    def _work(self, queue: SimpleQueue[tuple[int, DecodeCall, Tensors] | None]) -> None:
        while (task := queue.get()) is not None:
            stage, call, inputs = task
            try:
                outputs = self._decoders[stage].run(call, inputs)
            except BaseException as error:  # noqa: BLE001  (raised in the caller's thread)
                self._results.put(failure_of(stage, error))
                continue
            if stage + 1 == len(self._decoders):
                self._results.put((call.group, outputs[0]))
            else:
                self._queues[self._workers[stage + 1]].put((stage + 1, call, outputs))


def failure_of(stage: int, error: BaseException) -> BaseException:
    """Return the error to raise for a failure of a stage: a StageError that names the stage."""
    if isinstance(error, (*LEAVING, RaypipeError)):
        return error
    failure = StageError(f"Stage {stage} failed while it decoded: {short(error)}")
    failure.__cause__ = error
    return failure
