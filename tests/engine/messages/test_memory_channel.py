"""The in-memory channel keeps the contract of every channel."""

from __future__ import annotations

from raypipe.engine.messages.channel import InMemoryChannel
from tests.contract.channel import ChannelContract, Pair


class TestInMemoryChannel(ChannelContract):
    def open_pair(self, max_tensors: int = 4) -> Pair:
        return InMemoryChannel.pair("stage 0 <-> stage 1", generation=3, max_tensors=max_tensors)
