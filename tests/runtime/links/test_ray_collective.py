"""Links through Ray's own groups: the contract between two actors, what cannot be done, and a whole run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.engine.device import CPU
from raypipe.errors import ConfigError, LinkError, PlanError
from raypipe.runtime.links.device_channel import DeviceChannel
from raypipe.runtime.links.endpoint import Opening
from raypipe.runtime.links.listener import SocketListener
from raypipe.runtime.links.opening import make_endpoint
from raypipe.runtime.links.ray_collective import RayCollectiveEndpoint, RayGroup
from tests.contract.channel import WAIT_S, ChannelContract, Pair, b
from tests.exactness import same_bits
from tests.fake_device import FakeDevice
from tests.models import CASES
from tests.prepare.test_resume import outcome, unhurried, wait_for
from tests.runtime.links.ends import open_channels

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

HOST = "127.0.0.1"


@ray.remote(num_cpus=0, max_concurrency=16)
class _End:
    """One rank: its endpoint, and after it channels over further connections and the group that it has joined."""

    def __init__(self) -> None:
        self.endpoint = RayCollectiveEndpoint(HOST, CPU)
        self.channels: dict[int, Any] = {}

    def address(self) -> Any:
        return self.endpoint.address

    def process(self) -> int:
        return os.getpid()

    def join(self, me: int, peer: Any, timeout_s: float = WAIT_S, generation: int = 3) -> str:
        names = {1 - me: "link"}
        opening = Opening(me, {1 - me: peer}, generation, "run", {1 - me: 4}, timeout_s, names, b"secret")
        try:
            self.channels[0] = self.endpoint.open(opening)[1 - me]
        except LinkError as error:
            return str(error)
        self.group = self.channels[0]._group_out._name
        return ""

    def listen(self) -> Any:
        self.listener = SocketListener(HOST)
        return self.listener.address

    def open(self, number: int, me: int, peer: Any, max_tensors: int) -> str:
        """Another link in the same group, as a test needs a new one."""

        def made(peer: int, found: Any) -> DeviceChannel:
            return DeviceChannel(*found, CPU, (RayGroup(self.group, peer), RayGroup(self.group, peer)))

        with self.listener as listener:
            opened = open_channels(
                listener, me, {1 - me: peer}, 3, "run", max_tensors, WAIT_S, secret=b"secret", make=made
            )
        self.channels[number] = opened[1 - me]
        return str(self.channels[number].name)

    def call(self, number: int, name: str, *args: Any) -> tuple[Any, Exception | None]:
        try:
            return getattr(self.channels[number], name)(*args), None
        except Exception as error:  # noqa: BLE001  (raised again where it was asked for)
            return None, error

    def set_generation(self, number: int, generation: int) -> None:
        self.channels[number].generation = generation


class _Far:
    """A channel in an actor. What comes is copied once more on its way here, to memory that lies as torch has it."""

    on_device = True  # as DeviceChannel, also on a processor

    def __init__(self, actor: Any, number: int, name: str) -> None:
        self._actor, self._number, self.name = actor, number, name
        self._generation = 3

    def _call(self, name: str, *args: Any) -> Any:
        found, error = ray.get(self._actor.call.remote(self._number, name, *args), timeout=4 * WAIT_S)
        if error is not None:
            raise error
        return found

    @property
    def generation(self) -> int:
        return self._generation

    @generation.setter
    def generation(self, value: int) -> None:
        self._generation = value
        ray.get(self._actor.set_generation.remote(self._number, value))

    def send(self, action: Any, tensors: Any, weight_version: int = 0) -> None:
        flagged = [x if not isinstance(x, torch.Tensor) or x.is_leaf else _leaf(x) for x in tensors]
        self._call("send", action, flagged, weight_version)

    def recv(self, action: Any, timeout_s: float) -> Any:
        return self._call("recv", action, timeout_s)

    def use(self, *codecs: Any) -> None:
        self._call("use", *codecs)

    def leave_coded(self) -> None:
        self._call("leave_coded")

    def abort(self, reason: str) -> None:
        self._call("abort", reason)

    def leave(self, reason: str) -> None:
        self._call("leave", reason)

    def close(self) -> None:
        self._call("close")


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_(x.requires_grad)


def started() -> tuple[Any, Any]:
    ends = _End.remote(), _End.remote()
    addresses = ray.get([end.address.remote() for end in ends], timeout=WAIT_S)
    said = ray.get([end.join.remote(me, addresses[1 - me]) for me, end in enumerate(ends)], timeout=2 * WAIT_S)
    assert said == ["", ""]
    return ends


@pytest.fixture(scope="module")
def ends(local_ray: None) -> Iterator[list[Any]]:
    """Two actors that have joined a group, which is clean as long as every header was followed by its payload."""
    made = [*started()]
    yield made
    for end in made:
        ray.kill(end)


class TestRayCollective(ChannelContract):
    test_one_gib = test_large_messages_in_a_codec = test_one_byte_to_64_mib = None  # type: ignore[assignment]
    """What these would measure is the way from here to the actors."""
    number = 0
    spoiled = False

    @pytest.fixture(autouse=True)
    def _ends(self, ends: list[Any]) -> None:
        if TestRayCollective.spoiled:
            for end in ends:
                ray.kill(end)
            ends[:], TestRayCollective.spoiled = started(), False
        self.ends = ends

    def open_pair(self, max_tensors: int = 4) -> Pair:
        TestRayCollective.number += 1
        at = ray.get([end.listen.remote() for end in self.ends], timeout=WAIT_S)
        opened = [end.open.remote(self.number, me, at[1 - me], max_tensors) for me, end in enumerate(self.ends)]
        names = ray.get(opened, timeout=2 * WAIT_S)
        one, other = (_Far(end, self.number, name) for end, name in zip(self.ends, names, strict=True))
        return one, other  # type: ignore[return-value]

    def test_a_newer_generation_is_an_error_on_both_sides(self, pair: Pair) -> None:
        """Nobody takes the payload of that message, and no send can be ended: other tests need another group."""
        TestRayCollective.spoiled = True
        super().test_a_newer_generation_is_an_error_on_both_sides(pair)


def test_a_process_opens_its_links_once(ends: list[Any]) -> None:
    addresses = ray.get([end.address.remote() for end in ends], timeout=WAIT_S)
    said = ray.get(ends[0].join.remote(0, addresses[1], WAIT_S, 4), timeout=WAIT_S)
    assert "worker 0 cannot open its links again" in said
    assert "transport='tcp'" in said


def test_a_peer_that_dies_is_told_at_once_and_one_that_never_comes_after_the_deadline(ends: list[Any]) -> None:
    TestRayCollective.spoiled = True
    TestRayCollective.number += 1
    number = TestRayCollective.number
    at = ray.get([end.listen.remote() for end in ends], timeout=WAIT_S)
    ray.get([end.open.remote(number, me, at[1 - me], 4) for me, end in enumerate(ends)], timeout=WAIT_S)
    # From the second to the first: the other way a message of the tests above may be left.
    waits = ends[0].call.remote(number, "recv", b(0), WAIT_S)
    ends[1].call.remote(number, "send", b(0), [torch.ones(1 << 22)])
    first, error = ray.get(waits, timeout=WAIT_S)
    assert error is None
    assert first[0].sum() == 1 << 22
    os.kill(ray.get(ends[1].process.remote(), timeout=WAIT_S), signal.SIGKILL)
    begin_s = time.monotonic()
    _, error = ray.get(ends[0].call.remote(number, "recv", b(1), WAIT_S), timeout=2 * WAIT_S)
    assert isinstance(error, LinkError)
    assert time.monotonic() - begin_s < WAIT_S / 2
    alone = _End.remote()
    said = ray.get(alone.join.remote(0, ray.get(alone.address.remote()), 1.0), timeout=WAIT_S)
    assert "worker 0 cannot join Ray's group of 2 workers within 1 s: nobody else came" in said
    ray.kill(alone)


def trainer(folder: Path, name: str, **more: Any) -> PipelineTrainer:
    case = CASES["mlp"]
    return PipelineTrainer(
        case.model(),
        loss_fn=case.loss_fn,
        optimizer=unhurried,
        train_data=case.data(80_000),
        pipeline=PipelineConfig(
            num_stages=3, minibatch_size=8, num_microbatches=4, partitioner="parameters", transport="ray_collective",
            checkpoint_interval_steps=10_000,
        ),
        scaling_config=SimpleNamespace(num_workers=3, resources_per_worker={"CPU": 0.1}),
        run_config=SimpleNamespace(name=name, storage_path=str(folder), **more),
    )  # fmt: skip


def test_a_run_has_the_bits_of_threads_and_keeps_its_workers(local_ray: None, tmp_path: Path) -> None:
    handle = trainer(tmp_path, "run").start(num_steps=5_000)
    wait_for(lambda: handle.status().step >= 3, 2 * WAIT_S)
    with pytest.raises(PlanError, match=r"transport='ray_collective': the links of a run are opened once"):
        handle.resize(2)
    handle.stop()
    steps = len(handle.wait().records)
    assert 3 <= steps < 5_000
    trainer(tmp_path, "threads").fit(num_steps=steps, local=True, progress=False)
    (rows, state), (expected_rows, expected) = (outcome(tmp_path / name) for name in ("run", "threads"))
    assert rows == expected_rows
    assert [name for name in expected if not same_bits(state[name], expected[name])] == []


def test_what_it_cannot_do_is_refused_by_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"transport='ray_collective' is not possible on GPUs.*'collective'"):
        make_endpoint("ray_collective", HOST, None, FakeDevice(eager=False))
    with pytest.raises(ConfigError, match=r"link_ports=\(5000, 5009\) cannot be kept by transport='ray_collective'"):
        make_endpoint("ray_collective", HOST, (5000, 5009))
    with pytest.raises(ConfigError, match=r"link_checksum='on' is not possible with transport='ray_collective'"):
        PipelineConfig(transport="ray_collective", link_checksum="on")
    with pytest.raises(ConfigError, match=r"'ray_collective' does not go with FailureConfig\(max_failures"):
        trainer(tmp_path, "run", failure_config=SimpleNamespace(max_failures=1))
