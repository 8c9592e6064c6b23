"""Memos of orders on their way: bytes, which stages keep for the next driver and never read.

driver --Order(memo)--> with_packed_memo --> stage keeps it --> with_read_memo --> the next driver

To unpickle a memo, a stage would import 120 modules of drivers, which took its first step 0.4 s.
"""

from __future__ import annotations

import ray

from raypipe.ir.work_order import Order

__all__ = ["with_packed_memo", "with_read_memo"]


def with_packed_memo(order: Order) -> Order:
    """For a stage."""
    return order._replace(memo=ray.cloudpickle.dumps(order.memo))


def with_read_memo(order: Order) -> Order:
    """Of a stage, as it was ordered."""
    return order._replace(memo=ray.cloudpickle.loads(order.memo))
