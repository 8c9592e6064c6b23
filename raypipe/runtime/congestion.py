"""The congestion control of a link's connections: never BBR, unless somebody asks for it.

    out   ======#########======>     BBR remembers the shortest round trip, and allows itself twice what fits into it;
    back  <=ack===########======     a pipeline's link is full both ways, so acknowledgements wait behind messages

It then stands still in the middle of a message until they come, and every ten seconds for 200 ms to measure that round
trip anew. CUBIC counts losses instead, and fills the link (docs/design/0022 has both). BBR is some systems' default
because it is good at what a link is not: one long flow over a path that loses packets. Where stages are joined by such
a path, ``RAYPIPE_CONGESTION`` in their environment names the one to take, whatever the system's default is.
"""

from __future__ import annotations

import contextlib
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
        The one in use; "" where there is none to choose.

    Raises:
        LinkError: the environment asks for one that this system does not have, or not for us.
    """
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    asked = (os.environ if environment is None else environment).get(ASKED, "")
    if asked:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, option, asked.encode())
        except OSError as error:
            raise LinkError(
                f"{ASKED}={asked} is not possible here: {error}. sysctl net.ipv4.tcp_allowed_congestion_control lists "
                "what is, without rights; leave it away to take the system's, or CUBIC instead of BBR."
            ) from error
        return asked
    if _in_use(sock, option).startswith("bbr"):
        for name in (b"cubic", b"reno"):  # the first may be for root only where the system's default is another
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, name)
                break
    return _in_use(sock, option)


def _in_use(sock: socket.socket, option: int) -> str:
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, option, _NAME_BYTES).rstrip(b"\0").decode()
    except OSError:
        return ""
