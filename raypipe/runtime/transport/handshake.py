"""Handshake of a connection: both ends identify themselves and prove that they have the run's secret, without sockets.

    caller (sends messages)                            answerer (receives them)
      | greeting: run, generation, from, to,              |
      |           max_tensors, nonce -------------------> |   expected? else closed
      | <----------------------------------- challenge    |   a nonce
      | proof: HMAC(secret, "caller", both) ------------> |   right? else closed
      | <-------- welcome: HMAC(secret, "answerer", both) |   only after a valid proof

Both HMACs cover the greeting and the challenge ("both"), so that neither can be replayed, reflected or moved to another
run, generation, link or direction. A caller without the secret learns nothing, because an error in a greeting is
reported only after the caller's proof. A caller whose plan differs gets HMAC(secret, "other plan", both) instead of a
welcome, so that both ends report the difference. The challenge is shorter than the greeting: nothing is amplified.

The frames that follow are neither encrypted nor authenticated (docs/design/0006-links.md).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Generator, Mapping
from typing import NamedTuple

from raypipe.errors import LinkError

_HELLO = struct.Struct("<4sH16sIIIH")  # magic, version, run, generation, sender, receiver, max_tensors
_MAGIC, _VERSION = b"RPHI", 2
_NONCE_BYTES = 16
_PROOF_BYTES = hashlib.sha256().digest_size
_CALLER, _ANSWERER, _OTHER_PLAN = (b"raypipe link %s\0" % role for role in (b"caller", b"answerer", b"other plan"))


class LinkIdentity(NamedTuple):
    """Identity of one direction of a link, which a greeting carries.

    Attributes:
        run: result of ``run_digest`` for the run.
        generation: see LinkSetup.
        sender, receiver: numbers of the workers.
        max_tensors: maximum number of tensors in a message.
    """

    run: bytes
    generation: int
    sender: int
    receiver: int
    max_tensors: int

    def pack(self) -> bytes:
        return _HELLO.pack(_MAGIC, _VERSION, *self)


class Turn(NamedTuple):
    """Step of a conversation.

    Attributes:
        message: bytes to write to the connection.
        wanted_bytes: number of bytes to read from the connection afterwards; may be 0.
    """

    message: bytes
    wanted_bytes: int


class Answer(NamedTuple):
    """Result of a conversation.

    Attributes:
        sender: number of the worker at the other end; None if the other end is not a peer.
        proven: True if the other end has proved that it has the secret; if False, the connection has to be closed.
    """

    sender: int | None
    proven: bool


Conversation = Generator[Turn, bytes, Answer]
"""Generator that yields turns, receives by ``send`` the bytes that were read, and returns an Answer."""


def run_digest(run_id: str | bytes) -> bytes:
    """Return the 16 bytes that identify a run in greetings."""
    return hashlib.blake2b(run_id if isinstance(run_id, bytes) else run_id.encode(), digest_size=16).digest()


def call(hello: LinkIdentity, secret: bytes) -> Conversation:
    """Run the caller's side of the conversation; its Answer has ``proven=True`` if the peer's welcome is right.

    Args:
        hello: identity of the direction from this worker to the peer.
        secret: the run's secret.

    Raises:
        LinkError: the peer, which has the secret, has another plan.
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


def answer(mine: Mapping[int, LinkIdentity], secret: bytes) -> Conversation:
    """Run the answerer's side of the conversation.

    Args:
        mine: identity of the direction from this worker to each peer, by worker number. The greeting of a peer must
            have the same values, with sender and receiver exchanged.
        secret: the run's secret.

    Raises:
        LinkError: a peer with the secret has a newer generation or another plan.
    """
    greeting = yield Turn(b"", _HELLO.size + _NONCE_BYTES)
    magic, version, *fields = _HELLO.unpack_from(greeting)
    hello = LinkIdentity(*fields)
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
    """Compute the HMAC that proves that an end has the secret; ``role`` is caller, answerer or other plan.

    Its input is unambiguous: greeting and challenge have fixed sizes, and the role ends with a zero byte. The key is a
    digest of the secret, because HMAC pads short keys with zeros: secrets that differ in trailing zeros would be equal.
    """
    return hmac.digest(hashlib.sha256(secret).digest(), role + greeting + challenge, "sha256")


def _concerns(ours: LinkIdentity, hello: LinkIdentity) -> bool:
    """Return True if a greeting (``hello``) is for this worker of this run, in the present or a later generation."""
    return hello.run == ours.run and hello.receiver == ours.sender and hello.generation >= ours.generation


def _check_same(ours: LinkIdentity, hello: LinkIdentity) -> None:
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
