"""The congestion control of a link's connections: not BBR, where there is a choice and nobody asks for it.

    out   ======#########======>     BBR remembers the shortest round trip, and allows itself twice what fits into it;
    back  <=ack===########======     a pipeline's link is full both ways, so acknowledgements wait behind messages

It then stands still in the middle of a message until they come, and every ten seconds for 200 ms to measure that round
trip anew. CUBIC counts losses instead, and fills the link (docs/design/0022 has both). BBR is some systems' default
because it is good at what a link is not: one long flow over a path that loses packets. Where stages are joined by such
a path, ``RAYPIPE_CONGESTION`` in their environment names the one to take, whatever the system's default is. Each end
decides for what it sends; what a socket receives does not depend on it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from raypipe.errors import LinkError

__all__ = ["choose_congestion_control"]

ASKED = "RAYPIPE_CONGESTION"
_NAME_BYTES = 16  # TCP_CA_NAME_MAX


def choose_congestion_control(sock: socket.socket, environment: Mapping[str, str] | None = None) -> str:
    """Take another one than BBR for what this connection sends, where it is TCP and the system lets us.

    Args:
        environment: instead of os.environ.

    Returns:
        The one in use; "" for a socket that is not TCP, or where the system does not tell.

    Raises:
        LinkError: the environment asks for one that this system does not have, or not for us.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    option = getattr(socket, "TCP_CONGESTION", None)
    asked = (os.environ if environment is None else environment).get(ASKED, "")
    if asked:
        if option is None or not _take(sock, option, asked):
            raise LinkError(
                f"{ASKED}={asked} is not possible on host {socket.gethostname()}: its system does not have it, or not "
                "without rights (sysctl net.ipv4.tcp_allowed_congestion_control lists what anybody may take). Without "
                "the variable links take the system's own, or CUBIC instead of BBR."
            )
    elif option is not None and _in_use(sock, option).startswith("bbr") and not _take(sock, option, "cubic"):
        _take(sock, option, "reno")  # where that is for root only too, BBR stays
    return "" if option is None else _in_use(sock, option)


def _take(sock: socket.socket, option: int, name: str) -> bool:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, option, name.encode())
    except OSError:
        return False
    return True


def _in_use(sock: socket.socket, option: int) -> str:
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, option, _NAME_BYTES).rstrip(b"\0").decode()
    except OSError:
        return ""
