"""Whether a Ray cluster answers at an address, before ray.init waits minutes for one that does not."""

from __future__ import annotations

import importlib
import os
import socket
from pathlib import Path
from typing import Any

__all__ = ["REACH_TIMEOUT_S", "auth_mode", "found_at", "knock", "token_place"]

REACH_TIMEOUT_S = 3.0
KNOCK_TIMEOUT_S = 10.0


def knock(address: str) -> None:
    """Ask for anything at all: ray.init waits long for a cluster that is not there, or that refuses our token.

    Args:
        address: HOST:PORT, "auto", or one of another kind, which Ray knows how to look up.

    Raises:
        AuthenticationError: the cluster wants a token, or another one.
        ConnectionError: nothing of Ray answers, or Ray was told of a token that is not there.
    """
    if auth_mode(address) == "token" and not token_place():
        # Ray ends a process that asks without a token when it was told that there is one.
        raise ConnectionError("RAY_AUTH_MODE=token, and there is no token on this machine")
    host, _, port = (found := found_at(address)).rpartition(":")
    if not host or not port.isdigit() or "://" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(f"nothing listens there ({error.strerror or error})") from None
    from ray.exceptions import AuthenticationError, RayError

    client = _private("_raylet", "GcsClient")
    if client is None:  # it is no public part of Ray; ray.init will tell, only later
        return
    if address == "auto" and (enable := _private(_TOKENS, "maybe_enable_token_auth_if_token_available")):
        enable(warn_if_disabled=False)  # as ray.init does, for a cluster that it finds by itself
    try:
        client(address=found).internal_kv_get(b"raypipe", b"doctor", timeout=KNOCK_TIMEOUT_S)
    except AuthenticationError:
        raise
    except RayError as error:
        raise ConnectionError(f"what listens there is no Ray cluster that answers: {error}") from error


def found_at(address: str) -> str:
    """HOST:PORT where Ray finds a cluster for "auto", as it is where that cannot be told; other addresses themselves.

    Raises:
        ConnectionError: Ray finds none.
    """
    find = _private("_private.services", "get_ray_address_from_environment") if address == "auto" else None
    return address if find is None else find(address, None) or address


def token_place() -> str:
    """Where Ray would find a token, in the order in which it looks; empty where there is none."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return path if Path(path).expanduser().is_file() else ""
    usual = Path("~/.ray/auth_token")
    return str(usual) if usual.expanduser().is_file() else ""


def auth_mode(address: str) -> str:
    """Ray's own rule: what RAY_AUTH_MODE says; where it says nothing and Ray finds the cluster, a token is used."""
    mode = os.environ.get("RAY_AUTH_MODE", "token" if address == "auto" and token_place() else "disabled")
    return mode.lower()


_TOKENS = "_private.authentication.authentication_token_setup"


def _private(module: str, name: str) -> Any:
    """A part of Ray that is not public; None where this Ray has no such thing."""
    try:
        return getattr(importlib.import_module(f"ray.{module}"), name, None)
    except ImportError:
        return None
