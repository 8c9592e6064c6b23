"""What a test leaves on the shared node is named and ended, so that the next one finds the node as it was."""

from __future__ import annotations

import pytest
import ray
from ray.util.placement_group import placement_group

from tests.runtime.left_over import NOTHING, leave_nothing, living, ours

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class _Stays:
    def hello(self) -> str:
        print("said before it was forgotten", flush=True)
        return "hello"


@pytest.mark.usefixtures("cluster")
def test_actors_and_places_that_stay_are_named_with_what_they_wrote_and_are_ended() -> None:
    before, actors = ours(), living()
    group = placement_group([{"CPU": 1}], name="raypipe/forgotten/0", lifetime="detached")
    assert group.wait(60)
    stays = ray.remote(num_cpus=1)(_Stays)
    named = stays.options(name="raypipe/forgotten", namespace="raypipe", lifetime="detached", max_restarts=-1).remote()
    nameless = stays.remote()
    assert ray.get([named.hello.remote(), nameless.hello.remote()], timeout=60) == ["hello"] * 2
    found = [actor for key, actor in living().items() if key not in actors]
    with pytest.raises(pytest.fail.Exception) as told:
        leave_nothing(before, actors, patience_s=0.0)
    lines = str(told.value).splitlines()
    assert "  name raypipe/forgotten" in lines
    assert "  placement group raypipe/forgotten/0: CREATED, {0: {'CPU': 1.0}}" in lines
    assert "  3 CPUs" in lines
    for actor in found:
        assert f"  actor {actor.name or '(no name)'} of _Stays: ALIVE, process {actor.process}" in lines
    assert sum("said before it was forgotten" in line for line in lines) == 2
    assert ours().beyond(before) == NOTHING
    leave_nothing(before, actors, patience_s=0.0)
