"""Train a small byte-level language model on two stages: ``make train``.

    python jobs/train/lm.py                       Ray embedded, two stage actors
    python jobs/train/lm.py --local               the same plan in threads, without Ray
    python jobs/train/lm.py --stages 4 --schedule kfkb --steps 100
    python jobs/train/lm.py --name lm             again under the same name: resumes where it was stopped
    ray job submit --working-dir . -- python jobs/train/lm.py --name lm --storage /shared/runs --data /shared/data

The text is the Python standard library's own source. The yardstick is the corpus's bigram entropy: a model
that ends below it has learned more than which byte follows which.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

import raypipe
from raypipe.callbacks.base import absolute

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.train.corpus import bigram_cross_entropy_nats, bigram_entropy_nats, build_corpus

if TYPE_CHECKING:
    from ray.train import RunConfig

VOCABULARY = 256


class Block(nn.Module):
    """Pre-norm attention and MLP; x is (batch, context, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, width // self.heads).unbind(2)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes (batch, context) in, logits (batch, context, 256) out."""

    def __init__(self, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens.long()) + self.position(at)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the mean cross entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten().long())


def main() -> None:
    """Build the data, plan, train, evaluate, print the paths."""
    from ray.train import ScalingConfig  # here, for the model above is imported where there is no Ray

    arguments = parse()
    torch.manual_seed(0)
    corpus = build_corpus(arguments.data, context=arguments.context, max_bytes=arguments.corpus_bytes)
    trainer = raypipe.PipelineTrainer(
        GPT(arguments.context, arguments.width, arguments.depth, heads=4),
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=arguments.learning_rate, betas=(0.9, 0.95)),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_then_cosine(step, arguments.decay_steps or arguments.steps)
        ),
        train_data=corpus.train,
        eval_data=corpus.heldout,
        pipeline=raypipe.PipelineConfig(
            num_stages=arguments.stages,
            minibatch_size=arguments.minibatch_size,
            num_microbatches=arguments.microbatches,
            schedule=arguments.schedule,
            max_grad_norm=1.0,
        ),
        scaling_config=ScalingConfig(num_workers=arguments.stages),
        run_config=run_config(arguments),
    )
    print(trainer.plan())
    predicted = trainer.simulate()
    print(
        f"predicted: {predicted.makespan_s * 1e3:.0f} ms per step, workers idle {predicted.bubble_fraction:.0%} of it "
        "(every stage was timed here; sending takes no time)\n"
    )
    began_s = time.monotonic()
    result = trainer.fit(num_steps=arguments.steps, local=arguments.local)
    took_s = time.monotonic() - began_s
    table = result.metrics_dataframe
    print(f"\n{arguments.steps} steps in {took_s:.0f} s, median step {table.seconds.median() * 1e3:.0f} ms")
    entropy = bigram_entropy_nats(corpus.heldout_text)
    print(f"bigram entropy of the held-out text     {entropy:.3f} nats per byte")
    fitted = bigram_cross_entropy_nats(corpus.train_text, corpus.heldout_text)
    print(f"bigram model fitted on the train text   {fitted:.3f}")
    print(f"held-out loss of this model             {result.metrics['eval_loss']:.3f}")
    print(f"run folder   {result.path}")
    print(f"checkpoint   {result.checkpoint}   (raypipe.load_state_dict reads it)")
    print(f"timeline     {result.path}/timeline/trace.json   (open in https://ui.perfetto.dev)")


def run_config(arguments: argparse.Namespace) -> RunConfig:
    """Make the RunConfig: a URI (s3://, gs://) as it is, a path made absolute."""
    from ray.train import RunConfig

    return RunConfig(name=arguments.name, storage_path=absolute(arguments.storage))


def warmup_then_cosine(step: int, steps: int) -> float:
    """Compute the factor on the learning rate: 5 % warm-up, then cosine decay to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the defaults take under three minutes on two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--schedule", default="auto", help="auto, gpipe, 1f1b, kfkb, slack, pipedream or 2bw")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--decay-steps", type=int, help="the learning rate falls over so many; as many as --steps")
    parser.add_argument("--minibatch-size", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--data", default="data/stdlib", help="folder that every node can read, for Parquet files")
    parser.add_argument("--corpus-bytes", type=int, default=4_000_000)
    parser.add_argument("--storage", default="runs", help="where run folders go, a URI perhaps")
    parser.add_argument("--name", default=time.strftime("train_lm-%Y%m%d-%H%M%S"), help="a name goes on where it was")
    parser.add_argument("--local", action="store_true", help="threads of this process instead of Ray actors")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
