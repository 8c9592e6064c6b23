"""Ray's fake nodes, which its autoscaler starts and stops on this machine, as many as are granted.

Ray loads ``GrantedNodes`` by name in the process of its autoscaler; see jobs/lib/autoscaled.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

__all__ = ["GrantedNodes"]


class GrantedNodes(FakeMultiNodeProvider):
    """Node provider that grants as many nodes as a file allows: ``node_config={"granted": FILE}``.

    Requests beyond that are not fulfilled, without an error, as by a cloud that has no machine left.
    """

    def create_node_with_resources_and_labels(
        self, node_config: dict[str, Any], tags: dict[str, str], count: int, resources: Any, labels: Any
    ) -> None:
        granted = int(Path(node_config["granted"]).read_text())
        with self.lock:
            for _ in range(min(count, granted - len(self._nodes) + 1)):  # the head is one of them
                self._create_node_with_resources_and_labels(node_config, tags, count, resources, labels)
