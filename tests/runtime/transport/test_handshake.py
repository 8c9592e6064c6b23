"""The handshake: two that know the secret and agree meet; anything else, any bit changed, is refused by both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import LinkError
from raypipe.runtime.transport.handshake import Answer, Conversation, LinkIdentity, Turn, answer, call, run_digest

RUN = run_digest("run")
CALL = LinkIdentity(RUN, 3, 1, 0, 4)
MINE = {peer: LinkIdentity(RUN, 3, 0, peer, 4) for peer in (1, 2)}
SECRET = b"of this run"
GREETING_BYTES, CHALLENGE_BYTES, PROOF_BYTES = 52, 16, 32


class Ended(Exception):  # noqa: N818  (not an error)
    """A conversation is over, with this answer."""

    def __init__(self, given: Answer) -> None:
        self.answer = given


def turn(talk: Conversation, heard: bytes | None) -> Turn:
    try:
        return talk.send(heard)  # type: ignore[arg-type]
    except StopIteration as end:
        raise Ended(end.value) from None


def converse(
    hello: LinkIdentity = CALL, secret: bytes = SECRET, flips: frozenset[int] = frozenset()
) -> tuple[Answer | None, Answer | None]:
    """Answers of caller and answerer when these bits of all that is said are turned over on the way.

    None for whoever still waits when the other has left.
    """
    sides, answers = [call(hello, secret), answer(MINE, SECRET)], [None, None]
    position = 0
    said, speaker = turn(sides[0], None).message, 0
    turn(sides[1], None)
    while said:
        heard = bytearray(said)
        for bit in flips:
            if 0 <= bit // 8 - position < len(said):
                heard[bit // 8 - position] ^= 1 << bit % 8
        position += len(said)
        speaker = 1 - speaker
        try:
            said, wanted_bytes = turn(sides[speaker], bytes(heard))
            if not wanted_bytes:
                turn(sides[speaker], b"")
        except Ended as end:
            answers[speaker] = end.answer  # type: ignore[call-overload]
            if not end.answer.proven or speaker == 0:
                break
    return answers[0], answers[1]


def test_two_that_agree_meet() -> None:
    assert converse() == (Answer(0, True), Answer(1, True))


@pytest.mark.parametrize(
    "stranger",
    [
        CALL._replace(run=run_digest("other")),
        CALL._replace(generation=2),
        CALL._replace(sender=7),
        CALL._replace(receiver=5),
    ],
)
def test_a_stranger_gets_no_answer(stranger: LinkIdentity) -> None:
    assert converse(stranger) == (None, Answer(None, False))


@pytest.mark.parametrize("hello", [CALL, CALL._replace(generation=4), CALL._replace(max_tensors=5)])
@pytest.mark.parametrize("secret", [b"", b"of this ruN", SECRET + b"\0", SECRET * 2])
def test_a_wrong_secret_gets_a_challenge_and_no_more_and_cannot_end_an_opening(
    hello: LinkIdentity, secret: bytes
) -> None:
    assert converse(hello, secret) == (None, Answer(1, False))


def test_disagreement_is_told_to_those_who_know_the_secret() -> None:
    with pytest.raises(LinkError, match=r"worker 1 opens generation 4 .* generation 3, which is obsolete"):
        converse(CALL._replace(generation=4))
    with pytest.raises(LinkError, match=r"worker 1 sends up to 5 .* worker 0 expects up to 4"):
        converse(CALL._replace(max_tensors=5))


def test_a_caller_with_another_plan_is_told_too() -> None:
    """Each end may be the first to hear it, and leaves: the other must not wait for its deadline."""
    caller, answerer = call(CALL._replace(max_tensors=5), SECRET), answer(MINE, SECRET)
    turn(answerer, None)
    challenge = turn(answerer, turn(caller, None).message)
    refusal = turn(answerer, turn(caller, challenge.message).message)
    with pytest.raises(LinkError, match="worker 1 sends up to 5"):
        turn(answerer, b"")
    with pytest.raises(LinkError, match=r"worker 0 does not expect up to 5 tensors .* same plan"):
        turn(caller, refusal.message)


SAID_BITS = 8 * (GREETING_BYTES + CHALLENGE_BYTES + 2 * PROOF_BYTES)


@pytest.mark.slow
@given(st.sets(st.integers(0, SAID_BITS - 1), min_size=1, max_size=4))
def test_any_changed_bit_is_noticed(flips: set[int]) -> None:
    """Who hears the changed bit, or a proof over it, does not accept; a changed welcome only the caller can see."""
    caller, answerer = converse(flips=frozenset(flips))
    assert caller is None or not caller.proven
    if min(flips) // 8 < GREETING_BYTES + CHALLENGE_BYTES + PROOF_BYTES:
        assert answerer is not None
        assert not answerer.proven


@pytest.mark.slow
@given(st.binary(min_size=GREETING_BYTES, max_size=GREETING_BYTES), st.binary(min_size=32, max_size=32))
def test_noise_is_not_accepted(greeting: bytes, proof: bytes) -> None:
    answerer = answer(MINE, SECRET)
    turn(answerer, None)
    with pytest.raises(Ended) as caught:
        turn(answerer, greeting)
    assert caught.value.answer == (None, False)
    answerer, caller = answer(MINE, SECRET), call(CALL, SECRET)
    turn(answerer, None)
    turn(answerer, turn(caller, None).message)
    with pytest.raises(Ended) as caught:
        turn(answerer, proof)
    assert caught.value.answer == (1, False)
    turn(caller, greeting[:16])
    with pytest.raises(Ended) as caught:
        turn(caller, proof)
    assert not caught.value.answer.proven


def test_nothing_said_once_is_good_again() -> None:
    """Not a recorded call, not the caller's own proof turned around."""
    caller, first = call(CALL, SECRET), answer(MINE, SECRET)
    turn(first, None)
    greeting = turn(caller, None).message
    proof = turn(caller, turn(first, greeting).message).message
    second = answer(MINE, SECRET)
    turn(second, None)
    turn(second, greeting)
    with pytest.raises(Ended) as caught:
        turn(second, proof)
    assert not caught.value.answer.proven
    with pytest.raises(Ended) as caught:
        turn(caller, proof)
    assert not caught.value.answer.proven
    assert turn(first, proof).message != proof
