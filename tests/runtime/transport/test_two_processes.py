"""Links over gloo between two processes keep the contract of channels; over NCCL they are in tests/gpu/test_nccl.py."""

from __future__ import annotations

from tests.contract.two_processes import TwoProcesses


class TestGlooBetweenProcesses(TwoProcesses):
    device = "cpu"
