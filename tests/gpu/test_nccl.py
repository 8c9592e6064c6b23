"""Links over NCCL between two processes that share a GPU: the contract of channels, steps, giving up, generations.

NCCL refuses two ranks on one GPU by the hash of their host and the GPU's bus (src/init.cc, "Duplicate GPU detected").
With NCCL_HOSTIDs of their own, two processes pass as two hosts, which NCCL joins over its sockets; from NCCL 2.30 on,
NCCL_MULTI_RANK_GPU_ENABLE permits it. That shows that links work, not how fast they are between two GPUs: both
processes get the GPU in turn. The same tests run with gloo in NCCL's place (tests/runtime/transport).
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from raypipe.engine.device.cuda_device import CudaDevice
from raypipe.errors import LinkError
from raypipe.runtime.transport.process_group import ProcessGroupEndpoint, why_no_nccl
from tests.contract.two_processes import HOST, TwoProcesses
from tests.runtime.transport.ends import opening

AS_TWO_HOSTS = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_FAMILY": "AF_INET", "NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_RAS_ENABLE": "0", "NCCL_MAX_NCHANNELS": "2",
    "NCCL_PROTO": "Simple", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "WARN",
}  # fmt: skip
"""Variables with which NCCL joins two processes of one machine as if they were on two, over the loopback interface."""


@pytest.fixture(autouse=True, scope="module")
def _nccl() -> None:
    if reason := why_no_nccl():
        pytest.skip(reason, allow_module_level=True)


class TestNcclBetweenProcesses(TwoProcesses):
    device = "cuda"

    @classmethod
    def environment(cls, rank: int) -> Mapping[str, str]:
        return {**AS_TWO_HOSTS, "NCCL_HOSTID": f"host-{rank}"}


def test_two_workers_on_one_gpu_are_refused() -> None:
    device = CudaDevice()
    first, second = (ProcessGroupEndpoint(HOST, None, device) for _ in range(2))
    try:
        with pytest.raises(LinkError, match="share a GPU, between which NCCL makes no link"):
            first.open(opening(0, {1: second.address}))
    finally:
        for end in (first, second):
            end.close()
