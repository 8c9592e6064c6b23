"""Where workers listen and whom they reach: interfaces, ports, and what is another machine."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.errors import LinkError
from raypipe.runtime.links import addresses
from raypipe.runtime.links.tcp import Address, SocketListener
from tests.contract.channel import WAIT_S
from tests.runtime.links.ends import HOST, open_channels

ROOT = Path(__file__).parents[3]


def test_loopback_is_refused_on_both_sides_when_a_peer_is_on_another_machine() -> None:
    """On each side before it connects; a wildcard is no better."""
    for host in (HOST, "0.0.0.0"):
        with SocketListener(host) as first:
            other = Address("192.0.2.7", 4000, "", "another")
            with pytest.raises(LinkError) as caught:
                open_channels(first, 0, {3: other, 4: first.address}, 0, "run", 1, WAIT_S)
            assert f"worker 0 listens at {host}" in str(caught.value)
            assert "workers [3]" in str(caught.value)
            assert "lo 127.0.0.1" in str(caught.value)
            assert "ray start --node-ip-address" in str(caught.value)
    with pytest.raises(LinkError, match=r"worker 5 listens at 127.0.0.1.*worker 2 is on another.*--node-ip-address"):
        addresses.check_reachable(2, other, {5: Address(HOST, 1, "", "this")})
    addresses.check_reachable(2, Address(HOST, 1), {5: other})  # nobody knows where worker 2 is
    addresses.check_reachable(2, Address("::1", 1, "", "this"), {5: Address("::1", 2, "", "this")})


NEIGHBOUR = """
import socket, sys
from raypipe.runtime.links.addresses import Address, machine
print(machine())
print(socket.socket(socket.AF_UNIX).connect_ex(Address("", 0, sys.argv[1]).unix_path()))
"""


@pytest.mark.net
@pytest.mark.slow
def test_another_network_namespace_is_another_machine_though_the_hostname_is_the_same() -> None:
    """And loopback and abstract names of the two do not meet."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare(1)")
    with SocketListener(HOST) as first:
        results = []
        for prefix in ((), ("unshare", "--net")):
            command = [*prefix, sys.executable, "-c", NEIGHBOUR, first.address.unix]
            results.append(subprocess.run(command, capture_output=True, text=True, timeout=240, check=True, cwd=ROOT))
    here, there = (result.stdout.splitlines() for result in results)
    assert here == [addresses.machine(), "0"]
    assert there[0] != addresses.machine()
    assert there[1] == str(errno.ECONNREFUSED)


def test_the_interfaces_are_those_that_can_be_listened_on() -> None:
    found = addresses.interfaces()
    assert ("lo", HOST) in found
    for name, address in found:
        with SocketListener(address) as made:
            assert made.address.host == address, name
