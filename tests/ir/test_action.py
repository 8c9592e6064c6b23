"""What messages say of an action; its text in files stays that of ``parse_action``."""

from __future__ import annotations

import pytest

from raypipe.ir.action import EVALUATION, Action, Op, microbatch_words, parse_action

pytestmark = pytest.mark.core


def test_micro_batches_of_evaluations_are_counted_from_their_own_begin() -> None:
    trains, evaluates = Action(2, Op.F, 7), Action(1, Op.RECV_F, EVALUATION + 1)
    assert (trains.label, trains.words) == ("2F7", "2F7 (micro-batch 7)")
    assert evaluates.label == "1RECV_F1 of the evaluations"
    assert evaluates.words == "1RECV_F1 (micro-batch 1 of the evaluations)"
    assert microbatch_words(EVALUATION) == "micro-batch 0 of the evaluations"
    assert parse_action(str(evaluates)) == evaluates
