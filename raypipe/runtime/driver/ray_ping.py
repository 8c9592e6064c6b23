"""Ping of a Ray cluster, because ray.init waits minutes for a cluster that does not answer.

Ray is imported only when a function needs it.
"""

from __future__ import annotations

import importlib
import os
import socket
from pathlib import Path
from typing import Any

REACH_TIMEOUT_S = 3.0
KNOCK_TIMEOUT_S = 10.0
_TOKENS = "_private.authentication.authentication_token_setup"


def ping_cluster(address: str) -> None:
    """Send one request to the cluster, to find out within seconds if ray.init would fail.

    Addresses that are neither HOST:PORT nor "auto", such as "ray://...", are not checked.

    Raises:
        AuthenticationError: the cluster requires a token, or rejects ours.
        ConnectionError: no Ray cluster answers, or RAY_AUTH_MODE requires a token and this machine has none.
    """
    if auth_mode(address) == "token" and not token_place():
        # Ray ends a process that sends a request without a token in this mode.
        raise ConnectionError("RAY_AUTH_MODE=token, and there is no token on this machine")
    host, _, port = (resolved := cluster_address(address)).rpartition(":")
    if not host or not port.isdigit() or "://" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(f"nothing listens there ({error.strerror or error})") from None
    from ray.exceptions import AuthenticationError, RayError

    client = _private("_raylet", "GcsClient")
    if client is None:  # not a public part of Ray; ray.init raises too, only later
        return
    if address == "auto" and (enable := _private(_TOKENS, "maybe_enable_token_auth_if_token_available")):
        enable(warn_if_disabled=False)  # as ray.init does for a cluster that it finds by itself
    try:
        client(address=resolved).internal_kv_get(b"raypipe", b"doctor", timeout=KNOCK_TIMEOUT_S)
    except AuthenticationError:
        raise
    except RayError as error:
        raise ConnectionError(f"what listens there is no Ray cluster, or does not answer: {error}") from error


def cluster_address(address: str) -> str:
    """Resolve "auto" to the HOST:PORT of the cluster that Ray finds; return other addresses unchanged.

    "auto" is also returned unchanged if this Ray version has no function to resolve it.

    Raises:
        ConnectionError: Ray finds no cluster.
    """
    find = _private("_private.services", "get_ray_address_from_environment") if address == "auto" else None
    return address if find is None else find(address, None) or address


def token_place() -> str:
    """Return the place of Ray's token: "RAY_AUTH_TOKEN" for the environment variable, or a path; "" without a token.

    The places are searched in Ray's order.
    """
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return path if Path(path).expanduser().is_file() else ""
    usual = Path("~/.ray/auth_token")
    return str(usual) if usual.expanduser().is_file() else ""


def auth_mode(address: str) -> str:
    """Return Ray's authentication mode, in lower case.

    The mode is the value of RAY_AUTH_MODE. If that variable is not set, the mode is "token" for the address "auto" on a
    machine with a token, else "disabled".
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token" if address == "auto" and token_place() else "disabled")
    return mode.lower()


def _private(module: str, name: str) -> Any:
    """Return the attribute ``name`` of the private module ``ray.<module>``; None if this Ray version lacks it."""
    try:
        return getattr(importlib.import_module(f"ray.{module}"), name, None)
    except ImportError:
        return None
