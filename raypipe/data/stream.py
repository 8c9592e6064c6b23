"""Reader of a stream of items by position. A mark is plain data from which reading resumes at a position.

    item       0 1 2 3 4 | 0 1 2 3 4 | 0 ...      passes over the stream, one after the other
    position   0 1 2 3 4   5 6 7 8 9   10
    mark       (position 7, pass 1, 2 items of it, its state_dict() there)

Each pass is a new iteration over the stream, after ``set_epoch(pass)`` if the stream has this method. A read at a later
position continues the iteration. A read at an earlier one begins at the last mark before it: with ``load_state_dict``
if the stream has this method and returned the same items in a trial, else by skipping the items of the pass.
"""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from raypipe.data.item_randomness import own_generators, seed_generators
from raypipe.errors import DataError
from raypipe.user_lines import LEAVING, cure_of, quoted, short

MOST_MARKS = 64
"""Maximum number of marks that a reader keeps: reads by which a run can roll back without reading from the start."""
MOST_HELD = 4096
"""Maximum number of skipped items that are kept in memory for later reads."""
TRIED = 3


class Mark(NamedTuple):
    """Position in a stream, as plain data. A pass is one iteration over the whole stream.

    Attributes:
        position: number of items before the mark, over all passes.
        number: number of the pass, from 0.
        within: number of items before the mark in this pass.
        state: ``state_dict()`` of the stream at this position, JSON values; None if the stream's state is not used.
    """

    position: int = 0
    number: int = 0
    within: int = 0
    state: Any = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Mark:
        """Create a mark from the parsed JSON of ``_asdict()``.

        Raises:
            KeyError, TypeError, ValueError: the values are no mark.
        """
        return cls(int(values["position"]), int(values["number"]), int(values["within"]), values["state"])


class StreamReader:
    """Reader of a stream by position, for one stage.

    Args:
        stream: iterable whose ``__iter__`` begins anew each time.
        name: name of the stream, for messages.
        seed: seed of the items' random numbers: the global generators are seeded by (seed, position) before each item.
        saves: True if marks contain the ``state_dict()`` of the stream.
        once: number of items that the stream must have, because it may be iterated over only once; None allows any
            number of passes.
    """

    def __init__(self, stream: Any, name: str, seed: int, *, saves: bool, once: int | None = None) -> None:
        self._stream, self._name, self._seed, self._saves, self._once = stream, name, seed, saves, once
        self._live = stream
        self._items: Iterator[Any] | None = None
        self._at = Mark()
        self._marks: dict[int, Mark] = {0: Mark()}
        self._held: OrderedDict[int, Any] = OrderedDict()

    def read(self, start: int, count: int) -> list[Any]:
        """Read the items at positions start, ..., start + count - 1; raise a DataError if the stream fails or ends."""
        with own_generators():
            return [
                self._held.pop(at) if at in self._held else self._item(at, marks=at == start)
                for at in range(start, start + count)
            ]

    @property
    def marks(self) -> list[Mark]:
        """All stored marks; may be read in any thread."""
        return list(self._marks.values())

    def known(self, position: int) -> Mark | None:
        """Return the stored mark of a position, None if no mark is stored; may be called in any thread."""
        return self._marks.get(position)

    def mark(self, position: int) -> Mark | None:
        """Return the mark of a position; None unless a recent read began there, or the last read ended there."""
        if self._items is not None and position == self._at.position:
            self._keep_mark()
        return self._marks.get(position)

    def mark_before(self, position: int) -> Mark:
        """Return the last stored mark whose position is at most ``position``."""
        return self._marks[max(at for at in self._marks if at <= position)]

    def close(self) -> None:
        """End the iteration, which may hold threads and tasks. The next read begins another iteration."""
        items, self._items = self._items, None
        if (close := getattr(items, "close", None)) is not None:
            close()

    def learn(self, mark: Mark) -> None:
        """Store a mark that another reader or an earlier process has made."""
        self._marks[mark.position] = mark

    def _item(self, position: int, *, marks: bool) -> Any:
        """Read the item at a position; if ``marks`` is True, store a mark of the position first."""
        nearest = self.mark_before(position)
        if self._items is None or not nearest.position <= self._at.position <= position:
            self._begin(nearest)
        while (at := self._at.position) < position:
            self._held[at] = self._next()
            if len(self._held) > MOST_HELD:
                self._held.popitem(last=False)
        if marks:
            self._keep_mark()
        return self._next()

    def _begin(self, mark: Mark) -> None:
        """Begin an iteration at the position of a mark."""
        self._held.clear()
        state = mark.state if self._saves else None  # a checkpoint of an older release may have one
        self._iterate(mark.number, state)
        passed = 0 if state is None else mark.within
        for at in range(mark.position - mark.within + passed, mark.position):
            if self._pull(at) is _END:
                raise DataError(
                    f"{self._name} ended after {at} items, and had {mark.position} of them before. Let it give "
                    "the same items in each iteration."
                )
        self._at = mark

    def _iterate(self, number: int, state: Any = None) -> None:
        # State that was loaded may outlive an iteration, so each begins with an object that has none.
        self._live = copied(self._stream) if self._saves else self._stream
        self._items = _begun(self._live, number, state)

    def _next(self) -> Any:
        """Read the item at the current position, and advance. If the pass has ended, begin the next one."""
        position, number, within, _ = self._at
        item = self._pull(position)
        if item is _END:
            if not within:
                raise DataError(f"{self._name} has no item in pass {number} over it. Give a stream with items.")
            if self._once is not None:
                raise DataError(
                    f"{self._name} has {position} items, and raypipe.data.Stream(..., num_samples={self._once}) takes "
                    f"more of it, of which some would be counted twice. Give num_samples={position}."
                )
            number, within = number + 1, 0
            self._iterate(number)
            item = self._pull(position)
            if item is _END:
                raise DataError(
                    f"{self._name} has {position} items, and none when it is iterated over again. Give an object whose "
                    "__iter__ begins anew each time, or train for fewer steps."
                )
        self._at = Mark(position + 1, number, within + 1)
        return item

    def _pull(self, position: int) -> Any:
        assert self._items is not None
        seed_generators(self._seed, 0, position)
        try:
            return next(self._items, _END)
        except LEAVING:
            raise
        except BaseException as error:
            message = f"Item {position} of {self._name} fails{quoted(error)}: {short(error)} {cure_of(error, '')}"
            raise DataError(message.rstrip()) from error

    def _keep_mark(self) -> None:
        at = self._at
        if at.position in self._marks:
            return
        self._marks[at.position] = at._replace(state=_plain(self._live.state_dict()) if self._saves else None)
        if len(self._marks) > MOST_MARKS:
            del self._marks[next(position for position in self._marks if position)]


def resumes(stream: Any, seed: int, same: Callable[[Any, Any], bool]) -> bool:
    """Return True if the stream continues with the right items after ``load_state_dict``.

    This is tried with a few items of two copies. A stream with a shuffle buffer is not tried, and the result is False:
    its state lacks the items in the buffer, which ``load_state_dict`` loses.

    Args:
        seed: as in ``StreamReader``.
        same: (item, item) -> True if the items are equal.
    """
    if not all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    if _has_buffer(stream):  # which may hold more items than are tried here
        return False

    def pulled(items: Iterator[Any], first: int) -> list[Any]:
        tried = []
        for at in range(first, first + TRIED):
            seed_generators(seed, 0, at)
            tried.append(next(items, _END))
        return tried

    try:
        with own_generators():
            one, other = copied(stream), copied(stream)
            items = _begun(one, 0, None)
            pulled(items, 0)
            state = _plain(one.state_dict())
            pairs = zip(pulled(items, TRIED), pulled(_begun(other, 0, state), TRIED), strict=True)
            return all(a is b if _END in (a, b) else same(a, b) for a, b in pairs)
    except Exception:  # noqa: BLE001  (reading without the state is slower and always right)
        return False


def _has_buffer(stream: Any) -> bool:
    """Return True if the stream, or a stream that it reads, has a shuffle buffer."""
    library = type(stream).__module__.partition(".")[0]
    seen: set[int] = set()
    waiting: list[Any] = [stream]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, list | tuple):
            waiting += one
        elif type(one).__module__.partition(".")[0] == library or one is stream:
            held = getattr(one, "__dict__", {})
            if "buffer_size" in held:
                return True
            waiting += held.values()
    return False


def copied(stream: Any) -> Any:
    """Deep-copy a stream, so that an iteration over the copy does not change the original."""
    for _ in range(2):
        try:
            return copy.deepcopy(stream)
        except RuntimeError:  # a file system of fsspec, copied, enters this thread's own into the cache that is copied
            continue
    return copy.deepcopy(stream)


def _begun(stream: Any, number: int, state: Any) -> Iterator[Any]:
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(number)
    if state is not None:
        stream.load_state_dict(copy.deepcopy(state))
    return iter(stream)


def _plain(state: Any) -> Any:
    """Copy a state through JSON; raise ValueError or TypeError if the state is not plain data."""
    plain = json.loads(json.dumps(state, allow_nan=False))
    if plain != state:
        raise ValueError("not plain data")
    return plain


_END = object()  # the end of a pass; equal to itself only
