"""Stage actors generate the tokens that threads generate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raypipe.errors import StageError
from tests.api.test_generate import prompts, trainer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_captures")]


def test_actors_generate_as_threads_do(cluster: None, tmp_path: Path) -> None:
    made = trainer("gpt2", 2, tmp_path)
    tokens, mask = prompts("gpt2")
    given = {"attention_mask": mask, "max_new_tokens": 8, "eos_token_id": -1, "do_sample": True, "top_k": 20}
    assert torch.equal(made.generate(tokens, **given), made.generate(tokens, local=True, **given))
    with pytest.raises(StageError, match="Stage 0 failed while it decoded"):
        made.generate(tokens + 60, **given)
