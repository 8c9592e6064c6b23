"""The handshake of a connection, as two conversations without sockets: who calls, and that both know the secret.

    caller (sends messages)                            answerer (receives them)
      | greeting: run, generation, from, to,              |
      |           max_tensors, nonce -------------------> |   expected? else closed
      | <----------------------------------- challenge    |   a nonce
      | proof: HMAC(secret, "caller", both) ------------> |   right? else closed
      | <-------- welcome: HMAC(secret, "answerer", both) |   only who proved itself gets one

Both HMACs cover the greeting and the challenge, so neither can be replayed, turned around or moved to
another run, generation, link or direction. What says nothing true learns nothing: the answerer's replies are
shorter than what it was sent, and it complains about a greeting only after that greeting's proof. A caller
whose plan differs gets HMAC(secret, "other plan", both) for a welcome, so that both ends say so.

Left out: the frames that follow are neither encrypted nor authenticated (docs/design/0006-sockets.md).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Generator, Mapping
from typing import NamedTuple

from raypipe.errors import LinkError

__all__ = ["Answer", "Conversation", "Hello", "Turn", "answer", "call", "run_digest"]

_HELLO = struct.Struct("<4sH16sIIIH")  # magic, version, run, generation, sender, receiver, max_tensors
_MAGIC, _VERSION = b"RPHI", 2
_NONCE_BYTES = 16
_PROOF_BYTES = hashlib.sha256().digest_size
_CALLER, _ANSWERER, _OTHER_PLAN = (b"raypipe link %s\0" % role for role in (b"caller", b"answerer", b"other plan"))


class Hello(NamedTuple):
    """What one connection is for. ``run`` is a ``run_digest``."""

    run: bytes
    generation: int
    sender: int
    receiver: int
    max_tensors: int

    def pack(self) -> bytes:
        return _HELLO.pack(_MAGIC, _VERSION, *self)


class Turn(NamedTuple):
    """Bytes to write, then the exact number to read and to hand back; 0 of them: go on at once."""

    say: bytes
    wanted_bytes: int


class Answer(NamedTuple):
    """How an answered conversation ended.

    Attributes:
        sender: worker that called, if it is one of ours.
        proven: whether it knows the secret; only then there is a link.
    """

    sender: int | None
    proven: bool


Conversation = Generator[Turn, bytes, Answer]
"""Yields turns, is sent what came. Whoever drives it closes the connection unless the answer is proven."""


def run_digest(run_id: str | bytes) -> bytes:
    """16 bytes that stand for a run in greetings."""
    return hashlib.blake2b(run_id if isinstance(run_id, bytes) else run_id.encode(), digest_size=16).digest()


def call(hello: Hello, secret: bytes) -> Conversation:
    """The caller's side; its answer is proven when the peer's welcome is.

    Raises:
        LinkError: the peer, which knows the secret, has another plan.
    """
    greeting = hello.pack() + secrets.token_bytes(_NONCE_BYTES)
    challenge = yield Turn(greeting, _NONCE_BYTES)
    welcome = yield Turn(_proof(secret, _CALLER, greeting, challenge), _PROOF_BYTES)
    proven = hmac.compare_digest(welcome, _proof(secret, _ANSWERER, greeting, challenge))
    if hmac.compare_digest(welcome, _proof(secret, _OTHER_PLAN, greeting, challenge)):
        raise LinkError(
            f"worker {hello.receiver} does not expect up to {hello.max_tensors} tensors per message from "
            f"worker {hello.sender}: they do not run the same plan."
        )
    return Answer(hello.receiver, proven)


def answer(mine: Mapping[int, Hello], secret: bytes) -> Conversation:
    """The other side.

    Args:
        mine: what this worker itself says to each peer, by worker number; the peer must say the same.
        secret: of the run.

    Raises:
        LinkError: a peer that knows the secret has a newer generation or another plan.
    """
    greeting = yield Turn(b"", _HELLO.size + _NONCE_BYTES)
    magic, version, *said = _HELLO.unpack_from(greeting)
    hello = Hello(*said)
    ours = mine.get(hello.sender)
    if magic != _MAGIC or version != _VERSION or ours is None or not _concerns(ours, hello):
        return Answer(None, False)
    challenge = secrets.token_bytes(_NONCE_BYTES)
    proof = yield Turn(challenge, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, _CALLER, greeting, challenge)):
        return Answer(hello.sender, False)
    same = hello.max_tensors == ours.max_tensors
    if hello.generation == ours.generation:
        yield Turn(_proof(secret, _ANSWERER if same else _OTHER_PLAN, greeting, challenge), 0)
    _check_same(ours, hello)
    return Answer(hello.sender, True)


def _proof(secret: bytes, role: bytes, greeting: bytes, challenge: bytes) -> bytes:
    """All parts but the role have a fixed size, and roles end in a zero byte: no two inputs run together.

    HMAC pads short keys with zeros; a digest for a key keeps a secret and the same with a zero behind it apart.
    """
    return hmac.digest(hashlib.sha256(secret).digest(), role + greeting + challenge, "sha256")


def _concerns(ours: Hello, hello: Hello) -> bool:
    """Whether a greeting is for this worker of this run, now or in a generation to come."""
    return hello.run == ours.run and hello.receiver == ours.sender and hello.generation >= ours.generation


def _check_same(ours: Hello, hello: Hello) -> None:
    if hello.generation > ours.generation:
        raise LinkError(
            f"worker {hello.sender} opens generation {hello.generation} while worker {ours.sender} "
            f"opens generation {ours.generation}, which is obsolete."
        )
    if hello.max_tensors != ours.max_tensors:
        raise LinkError(
            f"worker {hello.sender} sends up to {hello.max_tensors} tensors per message, "
            f"worker {ours.sender} expects up to {ours.max_tensors}: they do not run the same plan."
        )
