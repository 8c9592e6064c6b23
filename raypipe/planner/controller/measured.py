"""Measurements that candidates are scored on: seconds of stages and messages.

With a codec, a message passes through encoding, wire and decoding, each on a thread of its own. The slowest of the
three bounds the rate of messages, and the other two add to the latency:

    occupancy = max(encode, wire / ratio, decode)        latency + the other two

A choice (``Choice``) is one schedule together with the codecs of all hops, the links between neighbouring stages.

Times of small messages do not predict those of larger ones, because messages that fit into a token bucket pass at once
on any link. So when a codec is switched on, the controller keeps the earlier times, and uses them to score choices that
compress less. They are forgotten when the link changes, and after some time in any case, because a change that only
large messages show is found only by sending some again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from raypipe.ir.communication import NO_CODEC, CodecCost, LinkEstimate
from raypipe.planner.controller.events import Choice
from raypipe.planner.replay import Routes, Wire, compiled, step_s


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured seconds of the pipeline, with messages converted to their uncompressed size.

    Attributes:
        num_microbatches: M with which it was measured.
        routes: workers and the links between them.
        forward_s, backward_s, optimizer_s: seconds of forward, backward and optimizer step, by worker.
        links: estimates of link 0 forward, link 0 backward, link 1 forward, ...; None if unknown, which counts as free.
        replays: number of steps for which each candidate is replayed.
        split_backward_s: by worker, seconds of (I, W) of a split backward, which may take longer than a whole one;
            empty if not measured.
        whole_s: by index into ``links``, measured occupancy of a message before a codec was switched on; empty if
            unknown.
        ratios: by index into ``links``, compression ratio of the codec in use; set together with ``whole_s``.
    """

    num_microbatches: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]
    links: tuple[LinkEstimate | None, ...]
    replays: int = 1
    split_backward_s: tuple[tuple[float, float], ...] = ()
    whole_s: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    routes: Routes = field(kw_only=True)

    @property
    def busy_s(self) -> list[float]:
        """Seconds of forward and backward of one micro-batch by stage, on the slowest of its workers."""
        by_worker = [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]
        return [max(by_worker[worker] for worker in workers) for workers in self.routes.homes]

    def hop_of(self, place: int) -> int:
        """Return the hop that ``links[place]`` belongs to."""
        return self.routes.hops[place // 2]

    def draws_s(self, place: int, ratio: float = 1.0) -> tuple[float, ...]:
        """List the seconds for which each message would occupy a link if it were compressed by ``ratio``.

        Args:
            place: index into ``links``.
            ratio: uncompressed bytes over compressed bytes.
        """
        link = self.links[place]
        if link is None:
            return ()
        least_s = self.whole_s[place] if self.whole_s and ratio < self.ratios[place] else 0.0
        if ratio == 1.0 and not least_s:
            return link.draws_s
        return tuple(max(s, least_s) / ratio for s in link.draws_s)

    def slowest_s(self, seconds: Callable[[LinkEstimate], float]) -> list[float]:
        """List, for hop 0 forward, hop 0 backward, hop 1 forward, ..., the largest value over its links; 0 if unknown.

        Args:
            seconds: returns the value of a link, from its estimate.
        """
        hops = [self.routes.links_of(hop) for hop in range(self.routes.num_stages - 1)]
        return [
            max((seconds(estimate) for link in links if (estimate := self.links[2 * link + way])), default=0.0)
            for links in hops
            for way in (0, 1)
        ]

    def round_trip_s(self, hop: int, quantile: float = 0.5) -> float:
        """Compute the seconds of one message forward and one backward on the slowest link of a hop, without queueing.

        Args:
            hop: 0 for the boundary between stages 0 and 1, and so on. With replicas a hop has several links.
            quantile: which quantile of the measured seconds per message is used, from 0 to 1.
        """
        return max(self._round_trip_s(link, quantile) for link in self.routes.links_of(hop))

    def _round_trip_s(self, link: int, quantile: float) -> float:
        total_s = 0.0
        for place in (2 * link, 2 * link + 1):
            estimate, draws_s = self.links[place], sorted(self.draws_s(place))
            if estimate is not None and draws_s:
                total_s += estimate.latency_s + draws_s[min(len(draws_s) - 1, int(quantile * len(draws_s)))]
        return total_s

    def scaled(self, num_microbatches: int, seconds_ratio: float) -> Measured:
        """Convert the measurements to another number of micro-batches of the same mini-batch.

        Args:
            num_microbatches: the other number.
            seconds_ratio: seconds of a micro-batch then (forward plus backward), divided by the measured seconds.
        """
        share = self.num_microbatches / num_microbatches
        return replace(
            self,
            num_microbatches=num_microbatches,
            forward_s=tuple(s * seconds_ratio for s in self.forward_s),
            backward_s=tuple(s * seconds_ratio for s in self.backward_s),
            split_backward_s=tuple((i * seconds_ratio, w * seconds_ratio) for i, w in self.split_backward_s),
            whole_s=tuple(s * share for s in self.whole_s),
            links=tuple(
                link
                and replace(
                    link,
                    raw_bytes=round(link.raw_bytes * share),
                    occupancy_s=link.occupancy_s * share,
                    draws_s=tuple(s * share for s in link.draws_s),
                )
                for link in self.links
            ),
        )


def predicted_s(
    measured: Measured,
    choice: Choice,
    codecs: Mapping[tuple[str, bool], CodecCost],
) -> float:
    """Predict the seconds of a step under ``choice``.

    Args:
        codecs: codecs by (name, True for forward messages); "none" may be missing.
    """
    program = compiled(choice.spec, measured.routes.num_stages)
    counts = (measured.replays * count for count in program.messages for _ in (0, 1))
    wires = [
        Wire(wire.latency_s, wire.draws_s[-newest:] if newest else ())
        for wire, newest in zip(_wires(measured, choice, codecs), counts, strict=True)
    ]
    return step_s(
        program,
        measured.forward_s,
        measured.backward_s,
        wires,
        measured.optimizer_s,
        replays=measured.replays,
        split_backward_s=measured.split_backward_s,
    )


def squeezed(measured: Measured, choice: Choice, codecs: Mapping[tuple[str, bool], CodecCost]) -> Measured:
    """Return the measurements as if all messages had been compressed with the codecs of ``choice``.

    Args:
        codecs: as in ``predicted_s``.
    """
    wires = zip(measured.links, _wires(measured, choice, codecs), strict=True)
    links = tuple(link and replace(link, latency_s=wire.latency_s, draws_s=wire.draws_s) for link, wire in wires)
    return replace(measured, links=links, whole_s=())


def busiest_hops(measured: Measured) -> Sequence[int]:
    """List all hops by the round trip of their messages, the longest first."""
    return sorted(range(measured.routes.num_stages - 1), key=lambda h: -measured.round_trip_s(h))


def _wires(measured: Measured, choice: Choice, codecs: Mapping[tuple[str, bool], CodecCost]) -> Iterator[Wire]:
    """Yield latency and occupancies of every link and direction, for messages compressed by the choice's codecs."""
    for place in range(len(measured.links)):
        forward = place % 2 == 0
        name = choice.codec(measured.hop_of(place), forward)
        yield _wire(measured, place, NO_CODEC if name == "none" else codecs[name, forward])


def _wire(measured: Measured, place: int, codec: CodecCost) -> Wire:
    link = measured.links[place]
    if link is None:
        return Wire()
    if codec == NO_CODEC:
        return Wire(link.latency_s, measured.draws_s(place))
    shorter_s = measured.draws_s(place, codec.ratio)
    occupancy_s = tuple(codec.taken_s(link.raw_bytes, s)[1] for s in shorter_s)
    behind_s, _ = codec.taken_s(link.raw_bytes, median(shorter_s) if shorter_s else 0.0)
    return Wire(link.latency_s + behind_s, occupancy_s)


@dataclass(frozen=True, slots=True)
class UncompressedTimes:
    """Seconds of messages before a codec was switched on.

    Attributes:
        seconds: occupancy of one message, for link 0 forward, link 0 backward, link 1 forward, ...; 0 if messages are
            not compressed now, or their occupancy is unknown. Empty if nothing is known.
        num_microbatches: M of these messages; with another M their bytes change in proportion.
        until: first step in which ``seconds`` is no longer valid.
    """

    seconds: tuple[float, ...] = ()
    num_microbatches: int = 1
    until: int = 0

    def at(self, step: int) -> UncompressedTimes:
        """Return these times if they are still valid in this step, else empty ones."""
        return self if step < self.until else UncompressedTimes()

    def without(self, links: Sequence[int]) -> UncompressedTimes:
        """Return a copy without the seconds of these links, which have changed."""
        return replace(self, seconds=tuple(0.0 if p // 2 in links else s for p, s in enumerate(self.seconds)))

    def after_switch(self, before: Choice, after: Choice, measured: Measured, until: int) -> UncompressedTimes:
        """Return the known times of uncompressed messages after a change of settings from ``before`` to ``after``.

        For messages that only ``after`` compresses, this is the median of the newest measured occupancies. Times of
        messages that both compress are kept; times of messages that ``after`` leaves uncompressed are dropped.

        Args:
            measured: measurements of steps with ``before``.
            until: first step in which the times added here are no longer valid. If none is added, the limit stays as
                it was.
        """
        count, seconds, new = before.num_microbatches, list[float](), False
        known = self._seconds_with(count) or (0.0,) * len(measured.links)
        for place, known_s in enumerate(known):
            hop, forward = measured.hop_of(place), place % 2 == 0
            newest_s = measured.draws_s(place)[-count:]
            if after.codec(hop, forward) == "none":
                seconds.append(0.0)
            elif before.codec(hop, forward) == "none" and newest_s:
                seconds.append(median(newest_s))
                new = True
            else:
                seconds.append(known_s)
        return UncompressedTimes(tuple(seconds), count, until if new else self.until)

    def added_to(self, measured: Measured, ratios: Sequence[float]) -> Measured:
        """Return ``measured`` with these times added; unchanged if no times are known.

        Args:
            ratios: compression ratios in use, in the order of ``measured.links``.
        """
        if not self.seconds:
            return measured
        return replace(measured, whole_s=self._seconds_with(measured.num_microbatches), ratios=tuple(ratios))

    def _seconds_with(self, num_microbatches: int) -> tuple[float, ...]:
        return tuple(s * self.num_microbatches / num_microbatches for s in self.seconds)
