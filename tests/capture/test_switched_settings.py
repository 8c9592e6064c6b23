"""What forward switches for a part of it is refused by its line where it is traced, and holds where nothing is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from raypipe.capture import TracedModel, capture
from raypipe.engine.torch_settings import torch_settings
from raypipe.errors import CaptureError

pytestmark = pytest.mark.engine


@contextmanager
def by_hand() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def without_flash() -> Iterator[None]:
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


SWITCHES: dict[str, tuple[Callable[[], AbstractContextManager[object]], str]] = {
    "attention": (partial(sdpa_kernel, SDPBackend.MATH), "_sdp_enabled"),
    "order": (partial(sdpa_kernel, list(SDPBackend.__members__.values())[:0:-1], set_priority=True), "priority_order"),
    "mkldnn": (partial(torch.backends.mkldnn.flags, enabled=False), "mkldnn.enabled"),
    "cudnn": (partial(torch.backends.cudnn.flags, enabled=False), "cudnn.enabled"),
    "products": (by_hand, "get_float32_matmul_precision"),
    "a function": (without_flash, "flash_sdp_enabled"),
}


class Net(nn.Module):
    def __init__(self, switch: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.first, self.last, self.switch = nn.Linear(4, 4), nn.Linear(4, 3), switch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with self.switch():
            y = functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])
        return self.last(y[:, 0])


X, Y = torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(("switch", "what"), SWITCHES.values(), ids=SWITCHES)
def test_a_switch_is_refused_where_it_would_be_lost(
    switch: Callable[[], AbstractContextManager[object]], what: str
) -> None:
    before = torch_settings()
    with pytest.raises(
        CaptureError, match=rf"forward switches torch\.\S*{what} for a part of it at \S*{__name__[-23:]}"
    ):
        capture(Net(switch), (X, Y), (0, 1), functional.cross_entropy)
    assert torch_settings() == before
    capture(nn.Sequential(Net(switch), nn.Linear(3, 3)), (X, Y), (0, 1), functional.cross_entropy)


def test_what_is_so_already_may_be_said_again() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        capture(Net(partial(sdpa_kernel, SDPBackend.MATH)), (X, Y), (0, 1), functional.cross_entropy)
    assert torch.backends.cuda.flash_sdp_enabled()


def is_torchdynamo_exporting() -> bool:  # as files of transformers import it
    return torch.compiler.is_exporting()


class Branching(nn.Linear):
    """Linear layer that computes in another way if torch.export traces it."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x.exp() if is_torchdynamo_exporting() else x.sin()


def test_a_model_of_transformers_goes_the_way_of_eager_mode() -> None:
    before = is_torchdynamo_exporting
    made = capture(Branching(), (torch.ones(2, 4), torch.ones(2, 4)), (0, 1), functional.mse_loss)
    assert is_torchdynamo_exporting is before
    assert isinstance(made.model, TracedModel)
    for mode in (made.model.train, made.model.eval):
        assert mode is not None
        assert [str(node.target) for node in mode.nodes] == ["aten.linear.default", "aten.sin.default"]
