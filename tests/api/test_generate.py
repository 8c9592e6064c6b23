"""generate() gives the tokens of transformers' own generate, whatever the number of stages."""

from __future__ import annotations

import json
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from raypipe import Callback, attach, load_state_dict
from raypipe.callbacks import Prompts
from raypipe.capture.decode_recipe import DecodeRecipe, decode_recipe
from raypipe.engine.io.checkpoint import checkpoint_name
from raypipe.errors import ConfigError, StageError
from raypipe.ir.precision import FP32
from tests.trainers import trainer_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("shared_captures")]

LENGTHS, NEW = (9, 1, 3, 5, 9, 2, 8, 4), 32
STAGES = (1, 2, 3)
ROWS = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(8)]


def gpt2() -> nn.Module:
    sizes = {"n_layer": 3, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 48}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    sizes = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 48}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=0))


def t5() -> nn.Module:
    sizes = {"num_layers": 2, "num_heads": 2, "d_model": 16, "d_kv": 8, "d_ff": 24, "vocab_size": 64}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=1, tie_word_embeddings=False)
    return transformers.T5ForConditionalGeneration(config)


MODELS = {"gpt2": gpt2, "llama": llama, "t5": t5}


@cache
def model_of(name: str) -> nn.Module:
    """A model with large weights, whose tokens vary."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(4)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.7) if name == "t5" else parameter.mul_(8)
    return model


@cache
def recipe_of(name: str) -> DecodeRecipe:
    return decode_recipe(model_of(name), FP32)


def prompts(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask of sequences of several lengths; padded on the left, or on the right for an encoder."""
    drawn = torch.Generator().manual_seed(5)
    rows = [torch.randint(2, 64, (length,), generator=drawn) for length in LENGTHS]
    side = "right" if name == "t5" else "left"
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
    return tokens, mask


def trainer(name: str, num_stages: int, folder: Path, **more: Any) -> Any:
    made = trainer_of(model_of(name), folder, loss_fn=None, train_data=ROWS, num_stages=num_stages, **more)
    made._decodes = recipe_of(name)  # traced once for all numbers of stages
    return made


def of_transformers(name: str, eos: int) -> torch.Tensor:
    tokens, mask = prompts(name)
    with torch.no_grad():
        return model_of(name).generate(  # type: ignore[operator]
            tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=eos, pad_token_id=0
        )


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    tokens, mask = prompts(name)
    whole = of_transformers(name, eos=-1)
    assert len(whole.unique()) > 15
    end = int(whole[0, -NEW + 8])  # ends the first sequence early, and perhaps others
    ended = of_transformers(name, eos=end)
    drawn = []
    for num_stages in STAGES:
        made = trainer(name, num_stages, tmp_path)
        given = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0, "local": True}
        assert torch.equal(made.generate(tokens, eos_token_id=-1, **given), whole)
        assert torch.equal(made.generate(tokens, eos_token_id=end, group_size=3, **given), ended)
        options = {"do_sample": True, "temperature": 1.5, "top_k": 30, "top_p": 0.9, "eos_token_id": -1}
        drawn += [made.generate(tokens, seed=seed, **options, **given) for seed in (1, 2)]
    assert all(torch.equal(one, drawn[at % 2]) for at, one in enumerate(drawn))
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], whole)


def test_the_weights_are_those_of_the_newest_checkpoint(tmp_path: Path) -> None:
    made = trainer("gpt2", 2, tmp_path)
    tokens, mask = prompts("gpt2")
    given = {"attention_mask": mask, "max_new_tokens": 6, "eos_token_id": -1, "pad_token_id": 0}
    result = made.fit(num_steps=2, local=True, progress=False)
    trained = MODELS["gpt2"]().eval()
    trained.load_state_dict(load_state_dict(result.checkpoint))
    wanted = trained.generate(tokens, do_sample=False, **given)  # type: ignore[operator]
    assert torch.equal(made.generate(tokens, local=True, **given), wanted)
    other = trainer("gpt2", 3, tmp_path / "other")
    assert torch.equal(other.generate(tokens, checkpoint=result.checkpoint, local=True, **given), wanted)


def test_what_cannot_be_generated_is_refused(tmp_path: Path) -> None:
    made = trainer("gpt2", 2, tmp_path)
    tokens, mask = prompts("gpt2")
    with pytest.raises(ConfigError, match="group_size=0"):
        made.generate(tokens, attention_mask=mask, group_size=0, local=True)
    with pytest.raises(ConfigError, match="num_beams=4"):
        made.generate(tokens, num_beams=4, local=True)
    with pytest.raises(ConfigError, match="Pad on the left"):
        made.generate(tokens, attention_mask=mask.flip(1), local=True)
    with pytest.raises(ConfigError, match="Give at most 39"):
        made.generate(tokens, attention_mask=mask, max_new_tokens=40, local=True)
    with pytest.raises(ConfigError, match="attention_mask has shape"):
        made.generate(tokens, attention_mask=mask[:, 1:], local=True)
    with pytest.raises(ConfigError, match="input_ids has shape"):
        made.generate(tokens[0], local=True)
    with pytest.raises(ConfigError, match="temperature=0"):
        made.generate(tokens, do_sample=True, temperature=0, local=True)
    rows = [(torch.zeros(2), torch.tensor(n % 2)) for n in range(8)]
    plain = trainer_of(nn.Linear(2, 2), train_data=rows, num_stages=1)
    with pytest.raises(ConfigError, match="transformers"):
        plain.generate(tokens, local=True)


GIVEN: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": -1, "pad_token_id": 0}
DRAWN: dict[str, Any] = {"do_sample": True, "top_k": 30, "temperature": 1.5, "seed": 3}


def generated_at(run: Path) -> list[int]:
    """Steps after which the stages of a run have generated."""
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["decision"] == "generate"]


def same_weights(one: str, other: str) -> bool:
    mine, theirs = load_state_dict(one), load_state_dict(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gpt2", {"num_stages": 3}),
        ("t5", {"num_stages": 2}),
        ("gpt2", {"num_stages": 2, "num_replicas": 2}),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(map(str, given.values())),
)
def test_a_run_generates_between_two_steps_and_trains_the_same_bits(
    name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    tokens, mask = prompts(name)
    more = {"checkpoint_interval_steps": 1, **more}
    alone = trainer(name, folder=tmp_path / "alone", **more).fit(num_steps=6, local=True, progress=False)
    made = trainer(name, folder=tmp_path, **more)
    handle = made.start(num_steps=6, local=True)
    given = [{}, DRAWN, {}]
    found = [handle.generate(tokens, attention_mask=mask, **GIVEN, **options) for options in given]
    result = handle.wait()
    assert same_weights(result.checkpoint, alone.checkpoint)
    steps = generated_at(tmp_path / "run")
    assert len(steps) == 3
    for step, options, text in zip(steps, given, found, strict=True):
        if step:  # the weights before the first step are in no checkpoint
            path = tmp_path / "run" / checkpoint_name(step)
            wanted = made.generate(tokens, attention_mask=mask, checkpoint=path, local=True, **GIVEN, **options)
            assert torch.equal(text, wanted)


def test_stages_with_large_leaves_train_while_the_model_is_traced_for_text(tmp_path: Path) -> None:
    """Gradients of leaves of 1 MiB are added by hooks, which a trace refuses."""
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 64, "vocab_size": 4096, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    torch.manual_seed(4)
    model = transformers.GPT2LMHeadModel(config)
    alone, made = (
        trainer_of(model, tmp_path / name, loss_fn=None, train_data=ROWS, num_stages=2) for name in ("alone", "other")
    )
    recipe, threads = made._recipe, list[str]()

    def traced() -> DecodeRecipe:
        threads.append(threading.current_thread().name)
        return recipe()

    made._recipe = traced
    handle = made.start(num_steps=20, local=True)
    assert handle.generate(torch.tensor([[3, 5]]), **GIVEN).shape == (1, 8)
    assert threads == ["raypipe run"], "a trace during a step may change its bits"
    whole = alone.fit(num_steps=20, local=True, progress=False)
    assert same_weights(handle.wait().checkpoint, whole.checkpoint)


class Reads(Callback):
    """Reads what the stages write at evaluations."""

    def __init__(self, prompts: Any) -> None:
        self.prompts = prompts
        self.read: list[tuple[str, int, Any]] = []

    def on_eval(self, step: int, metrics: Any) -> None:
        self.read.append(("eval", step, metrics))

    def on_text(self, step: int, tokens: torch.Tensor) -> None:
        self.read.append(("text", step, tokens))


def test_callbacks_get_the_text_of_every_evaluation(tmp_path: Path) -> None:
    tokens, mask = prompts("gpt2")
    greedy, drawn, silent, wrong = (
        Reads(Prompts(tokens, mask, **GIVEN)), Reads(Prompts(tokens, mask, **GIVEN, **DRAWN)), Reads(None),
        Reads(Prompts(tokens + 60, **GIVEN)),
    )  # fmt: skip
    steps = {"eval_interval_steps": 2, "checkpoint_interval_steps": 2}
    made = trainer("gpt2", 2, tmp_path, eval_data=ROWS, callbacks=[silent, greedy, wrong, drawn], **steps)
    result = made.fit(num_steps=4, local=True, progress=False)
    assert [line[:2] for line in silent.read] == [("eval", 2), ("eval", 4)] == [line[:2] for line in wrong.read]
    (alert,) = result.alerts
    assert "No text was generated after 4 steps: Stage 0 failed while it decoded" in str(alert)
    alone = trainer("gpt2", 2, tmp_path / "alone").fit(num_steps=4, local=True, progress=False)
    assert same_weights(result.checkpoint, alone.checkpoint)
    for step in (2, 4):
        whole: Any = MODELS["gpt2"]().eval()
        path = tmp_path / "run" / checkpoint_name(step)
        whole.load_state_dict(load_state_dict(path))
        wanted = whole.generate(tokens, attention_mask=mask, do_sample=False, **GIVEN)
        again = made.generate(tokens, attention_mask=mask, checkpoint=path, local=True, **GIVEN, **DRAWN)
        for callback, text in ((greedy, wanted), (drawn, again)):
            (read,) = [line[2] for line in callback.read if line[:2] == ("text", step)]
            assert torch.equal(read, text)
            assert [line[0] for line in callback.read] == ["eval", "text"] * 2


def test_a_generation_that_fails_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    tokens, mask = prompts("gpt2")
    made = trainer("gpt2", 2, tmp_path)
    handle = made.start(num_steps=1000, local=True)
    with pytest.raises(StageError, match="Stage 0 failed while it decoded"):
        handle.generate(tokens + 60)
    with pytest.raises(ConfigError, match="num_beams=4"):
        handle.generate(tokens, num_beams=4)
    with pytest.raises(StageError, match=r"No text was generated within 0 s"):
        handle.generate(tokens, attention_mask=mask, timeout_s=0)
    with pytest.raises(ConfigError, match=r"from raypipe\.attach"):
        attach("run").generate(tokens)
    handle.stop()
    assert handle.wait().stopped
    with pytest.raises(StageError, match="The run is over"):
        handle.generate(tokens, attention_mask=mask)


def test_an_asynchronous_run_generates_too(tmp_path: Path) -> None:
    tokens, mask = prompts("gpt2")
    made = trainer("gpt2", 2, tmp_path, schedule="2bw")
    handle = made.start(num_steps=40, local=True)
    found = handle.generate(tokens, attention_mask=mask, **GIVEN)
    assert found.shape == (len(tokens), tokens.shape[1] + 6)
    assert handle.wait().metrics["step"] == 40


def test_prompts_without_effect_are_refused(tmp_path: Path) -> None:
    tokens, _ = prompts("gpt2")
    with pytest.raises(ConfigError, match="the trainer has no eval_data"):
        trainer("gpt2", 2, tmp_path, callbacks=[Reads(Prompts(tokens))])
    with pytest.raises(ConfigError, match=r"give raypipe\.callbacks\.Prompts"):
        trainer("gpt2", 2, tmp_path, callbacks=[Reads(["Once upon a time"])], eval_data=ROWS)
