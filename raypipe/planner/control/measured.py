"""What the candidates are scored on: seconds of the stages and of the messages, as they were measured.

A codec changes a message's way. Encoding, wire and decoding work one behind the other, each on a thread of its own, so
the slowest of them decides how often a message can follow, and all three how long one takes:

    occupancy = max(encode, wire / ratio, decode)        latency + the other two

What small messages take tells little of larger ones: those that fit into a token bucket pass at once on any link. So
what messages took while they were whole counts for choices that compress them less than they are now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from raypipe.ir.links import LinkEstimate
from raypipe.planner.control.choice import NO_CODEC, Choice, CodecCost
from raypipe.planner.search.replay import Wire, compiled, step_s
from raypipe.planner.search.routes import Routes

__all__ = ["Measured", "busiest_hops", "predicted_s", "squeezed"]


@dataclass(frozen=True, slots=True)
class Measured:
    """One state of the pipeline, without codecs.

    Attributes:
        num_microbatches: M that it was measured with.
        routes: workers and the links between them.
        forward_s, backward_s, optimizer_s: by worker.
        links: estimates of link 0 forward, link 0 backward, link 1 forward, ...; None where nothing is known (free).
        replays: steps that each candidate is run for.
        split_backward_s: by worker, (I, W) of a split backward, which may take longer than a whole one; empty where it
            was not measured.
        whole_s: by place in ``links``, what a message took of it before it was compressed; empty for nothing.
        ratios: by place in ``links``, that of the codec in use; with ``whole_s``.
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
        """By stage, forward and backward of one micro-batch on the slowest of its workers."""
        by_worker = [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]
        return [max(by_worker[worker] for worker in workers) for workers in self.routes.homes]

    def hop_of(self, place: int) -> int:
        """The hop of a place in ``links``."""
        return self.routes.hops[place // 2]

    def draws_s(self, place: int, ratio: float = 1.0) -> tuple[float, ...]:
        """What messages compressed by ``ratio`` occupy a link for, one by one."""
        link = self.links[place]
        if link is None:
            return ()
        least_s = self.whole_s[place] if self.whole_s and ratio < self.ratios[place] else 0.0
        if ratio == 1.0 and not least_s:
            return link.draws_s
        return tuple(max(s, least_s) / ratio for s in link.draws_s)

    def slowest_s(self, seconds: Callable[[LinkEstimate], float]) -> list[float]:
        """Of hop 0 forward, hop 0 backward, hop 1 forward, ...: of its slowest link, 0 where nothing is known."""
        hops = [self.routes.links_of(hop) for hop in range(self.routes.num_stages - 1)]
        return [
            max((seconds(found) for link in links if (found := self.links[2 * link + way])), default=0.0)
            for links in hops
            for way in (0, 1)
        ]

    def round_trip_s(self, hop: int, quantile: float = 0.5) -> float:
        """Transfer forward and back on an idle link, by quantile of the messages; of several the slowest."""
        return max(self._round_trip_s(link, quantile) for link in self.routes.links_of(hop))

    def _round_trip_s(self, link: int, quantile: float) -> float:
        total_s = 0.0
        for place in (2 * link, 2 * link + 1):
            found, draws_s = self.links[place], sorted(self.draws_s(place))
            if found is not None and draws_s:
                total_s += found.latency_s + draws_s[min(len(draws_s) - 1, int(quantile * len(draws_s)))]
        return total_s

    def scaled(self, num_microbatches: int, seconds_ratio: float) -> Measured:
        """With another number of micro-batches, whose F and B take ``seconds_ratio`` times as long."""
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
    """Seconds of a step under ``choice``.

    Args:
        codecs: by name and whether forward; "none" need not be there.
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
    """Links as messages in the codecs of ``choice`` find them.

    Args:
        codecs: as in ``predicted_s``.
    """
    wires = zip(measured.links, _wires(measured, choice, codecs), strict=True)
    links = tuple(link and replace(link, latency_s=wire.latency_s, draws_s=wire.draws_s) for link, wire in wires)
    return replace(measured, links=links, whole_s=())


def busiest_hops(measured: Measured) -> Sequence[int]:
    """Hops by the time that their messages take, the longest first."""
    return sorted(range(measured.routes.num_stages - 1), key=lambda h: -measured.round_trip_s(h))


def _wires(measured: Measured, choice: Choice, codecs: Mapping[tuple[str, bool], CodecCost]) -> Iterator[Wire]:
    """Of all links, as messages in the codecs of a choice find them."""
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
