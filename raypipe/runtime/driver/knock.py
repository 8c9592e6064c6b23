"""Whether a Ray cluster answers at an address, before ray.init waits minutes for one that does not."""

from __future__ import annotations

import importlib
import socket

__all__ = ["REACH_TIMEOUT_S", "knock"]

REACH_TIMEOUT_S = 3.0
KNOCK_TIMEOUT_S = 10.0


def knock(address: str) -> None:
    """Ask for anything at all: ray.init waits long for a cluster that is not there, or that refuses our token.

    Raises:
        AuthenticationError: the cluster wants a token, or another one.
        ConnectionError: nothing of Ray answers.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in host:
        return  # "auto" or an address of another kind, which Ray knows how to look up
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(f"nothing listens there ({error.strerror or error})") from None
    from ray.exceptions import AuthenticationError, RayError

    client = getattr(importlib.import_module("ray._raylet"), "GcsClient", None)
    if client is None:  # it is no public part of Ray; ray.init will tell, only later
        return
    try:
        client(address=address).internal_kv_get(b"raypipe", b"doctor", timeout=KNOCK_TIMEOUT_S)
    except AuthenticationError:
        raise
    except RayError as error:
        raise ConnectionError(f"what listens there is no Ray cluster that answers: {error}") from error
