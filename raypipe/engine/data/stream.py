"""A stream of items, read by position: the place in it is a number, and plain data says how to get there again.

    item       0 1 2 3 4 | 0 1 2 3 4 | 0 ...      passes over the stream, one behind the other
    position   0 1 2 3 4   5 6 7 8 9   10
    mark       (position 7, pass 1, 2 items of it, what state_dict() said there)

A stream is iterated over again for each pass, after ``set_epoch(pass)`` where it has that. Whoever reads forwards goes
on where it stands. Else the newest mark before is taken up: by ``load_state_dict`` where the stream has that and was
seen to go on with the same items, else by passing over the items of that pass once more.
"""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from raypipe.engine.item_randomness import own_generators, seed_generators
from raypipe.engine.user_lines import LEAVING, quoted, short
from raypipe.errors import DataError

__all__ = ["Mark", "StreamReader", "copied", "resumes"]

MOST_MARKS = 64
"""Mini-batches by which a run may go back without beginning the pass anew."""
MOST_HELD = 4096
"""Items that were passed over on the way to others and are kept for whoever asks for them next."""
TRIED = 3


class Mark(NamedTuple):
    """A place in a stream, as plain data.

    Attributes:
        position: items before it.
        number: of the pass.
        within: items of the pass before it.
        state: of the stream there, as JSON; None where it has none.
    """

    position: int = 0
    number: int = 0
    within: int = 0
    state: Any = None

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Mark:
        """What ``_asdict`` made, after its way as JSON.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        return cls(int(told["position"]), int(told["number"]), int(told["within"]), told["state"])


class StreamReader:
    """Reads one stream for one reader.

    Args:
        stream: whose ``__iter__`` begins anew each time.
        name: for messages.
        seed: of the draws of items: the global generators are seeded by (seed, position) around each.
        saves: marks have the state of the stream, see ``resumes``.
        once: items that are read of one pass, which must have so many; None begins anew where a pass ends.
    """

    def __init__(self, stream: Any, name: str, seed: int, *, saves: bool, once: int | None = None) -> None:
        self._stream, self._name, self._seed, self._saves, self._once = stream, name, seed, saves, once
        self._live = stream
        self._items: Iterator[Any] | None = None
        self._at = Mark()
        self._marks: dict[int, Mark] = {0: Mark()}
        self._held: OrderedDict[int, Any] = OrderedDict()

    def read(self, start: int, count: int) -> list[Any]:
        """Items at positions start, start + 1, ...

        Raises:
            DataError: the stream raises, or has no item.
        """
        with own_generators():
            found = []
            for at in range(start, start + count):
                found.append(self._held.pop(at) if at in self._held else self._item(at, marks=at == start))
            return found

    @property
    def marks(self) -> list[Mark]:
        """All that are known, from any thread."""
        return list(self._marks.values())

    def known(self, position: int) -> Mark | None:
        """As ``mark`` where it need not be made, from any thread."""
        return self._marks.get(position)

    def mark(self, position: int) -> Mark | None:
        """How to get there again; None where nobody has begun or stopped to read there lately."""
        if self._items is not None and position == self._at.position:
            self._keep_mark()
        return self._marks.get(position)

    def mark_before(self, position: int) -> Mark:
        """The last place at or before this one from which reading can begin."""
        return self._marks[max(at for at in self._marks if at <= position)]

    def close(self) -> None:
        """Let go of the iteration, which may hold threads and tasks; who reads on begins another one."""
        items, self._items = self._items, None
        if (close := getattr(items, "close", None)) is not None:
            close()

    def learn(self, mark: Mark) -> None:
        """A place that an earlier process has marked; it counts once somebody reads from there on."""
        self._marks[mark.position] = mark

    def _item(self, position: int, *, marks: bool) -> Any:
        """The item there.

        Args:
            marks: somebody may want to go on from here: where a read begins, not in its middle.
        """
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
        """Iterate from a mark on."""
        self._held.clear()
        state = mark.state if self._saves else None  # a checkpoint of an older release may have one
        self._iterate(mark.number, state)
        passed = 0 if state is None else mark.within
        for at in range(mark.position - mark.within + passed, mark.position):
            if self._pull(at) is _END:
                raise DataError(
                    f"{self._name} ended after {at} items, and had {mark.position} of them before. Its items must be "
                    "the same whenever it is iterated over."
                )
        self._at = mark

    def _iterate(self, number: int, state: Any = None) -> None:
        # State that was loaded may outlive an iteration, so each begins with an object that has none.
        self._live = copied(self._stream) if self._saves else self._stream
        self._items = _begun(self._live, number, state)

    def _next(self) -> Any:
        """The item at ``_at``, which moves on."""
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
            raise DataError(f"Item {position} of {self._name} fails{quoted(error)}: {short(error)}") from error

    def _keep_mark(self) -> None:
        at = self._at
        if at.position in self._marks:
            return
        self._marks[at.position] = at._replace(state=_plain(self._live.state_dict()) if self._saves else None)
        if len(self._marks) > MOST_MARKS:
            del self._marks[next(position for position in self._marks if position)]


def resumes(stream: Any, seed: int, same: Callable[[Any, Any], bool]) -> bool:
    """Whether a stream goes on with the same items from what its ``state_dict`` says, tried on the first few.

    A buffer that is shuffled, for one, is in no state: what it held is left out after ``load_state_dict``.

    Args:
        same: whether two items are equal.
    """
    if not all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    if _has_buffer(stream):  # the first items go on all the same where the buffer is filled for many at once
        return False

    def pulled(items: Iterator[Any], first: int) -> list[Any]:
        found = []
        for at in range(first, first + TRIED):
            seed_generators(seed, 0, at)
            found.append(next(items, _END))
        return found

    try:
        with own_generators():
            one, other = copied(stream), copied(stream)
            items = _begun(one, 0, None)
            pulled(items, 0)
            state = _plain(one.state_dict())
            pairs = zip(pulled(items, TRIED), pulled(_begun(other, 0, state), TRIED), strict=True)
            return all(a is b if _END in (a, b) else same(a, b) for a, b in pairs)
    except Exception:  # noqa: BLE001  (it is read without its state then, which is slower and always right)
        return False


def _has_buffer(stream: Any) -> bool:
    """Whether the stream, or one that it is made of, keeps a buffer to shuffle items in."""
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
    """A stream that knows nothing of this one."""
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
    """A copy, as JSON has it.

    Raises:
        ValueError, TypeError: JSON has no such thing, or would make another of it.
    """
    found = json.loads(json.dumps(state, allow_nan=False))
    if found != state:
        raise ValueError("is no plain data")
    return found


class _End:
    """Of a pass; equal to itself only, whatever an item says of equality."""


_END = _End()
