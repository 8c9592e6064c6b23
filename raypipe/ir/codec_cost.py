"""What a codec costs and saves, as plans and the controller count it.

encode --> wire / ratio --> decode          occupancy = max(encode, wire / ratio, decode)
"""

from __future__ import annotations

from dataclasses import dataclass

from raypipe.errors import PlanError

__all__ = ["NO_CODEC", "CodecCost"]


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What compressing one direction of a link costs and saves, as measured.

    Attributes:
        name: as in codec_forward and codec_backward.
        ratio: bytes before over bytes on the wire.
        encode_s_per_byte, decode_s_per_byte: per byte before the codec, on the link's own thread.
    """

    name: str
    ratio: float = 1.0
    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not (self.ratio > 0 and self.encode_s_per_byte >= 0 and self.decode_s_per_byte >= 0):
            raise PlanError(f"{self}: give a ratio above 0 and seconds per byte from 0 up.")

    def taken_s(self, raw_bytes: float, sending_s: float) -> tuple[float, float]:
        """Seconds that a message's way is longer by than what it keeps busy, and those.

        Encoding, wire and decoding work one behind the other, each on a thread of its own.

        Args:
            raw_bytes: of the message, before the codec.
            sending_s: for which its compressed bytes keep the wire busy.
        """
        parts = self.encode_s_per_byte * raw_bytes, sending_s, self.decode_s_per_byte * raw_bytes
        return sum(parts) - max(parts), max(parts)


NO_CODEC = CodecCost("none")
