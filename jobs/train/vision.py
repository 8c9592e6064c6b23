"""Train an image classifier on two stages: scikit-learn's digits, a CIFAR folder, or a folder of images.

    python jobs/train/vision.py                                   the digits, 8 x 8 pixels, which scikit-learn brings
    python jobs/train/vision.py --data cifar-10-batches-bin       CIFAR's binary files, 10 or 100 classes
    python jobs/train/vision.py --data photos --size 64           photos/train/CLASS/*.jpg and photos/val/CLASS/*.jpg
    python jobs/train/vision.py --config digits.yaml --local      the same names in a file; in threads, without Ray
    ray job submit --working-dir . -- python jobs/train/vision.py --name digits --storage /shared/runs

It prints the accuracy on held-out data, and exits with 1 if anything fails. A name that was used resumes its run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.train.images import Split, read_images, write_split
from jobs.train.options import add_common, arguments_of, chosen, data_folder, exit_status, goes_on, train


class Block(nn.Module):
    """Two convolutions with a shortcut; x is (batch, width, height, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return x + self.conv2(F.relu(self.norm2(y)))


class Net(nn.Module):
    """Rows of bytes (batch, channels * size * size) in, logits (batch, classes) out.

    Group norms, so that no sample's output depends on the others of its micro-batch.
    """

    def __init__(self, channels: int, size: int, classes: int, width: int, depth: int) -> None:
        super().__init__()
        self.shape = (channels, size, size)
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.pools = max(0, min(depth - 1, size.bit_length() - 3))  # down to 4 pixels
        self.norm = nn.GroupNorm(4, width)
        self.head = nn.Linear(width, classes)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixels.float().div(127.5).sub(1.0).unflatten(1, self.shape))
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number < self.pools:
                x = F.max_pool2d(x, 2)
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the mean cross entropy in nats."""
    return F.cross_entropy(logits, labels.long())


def main() -> int:
    """Read the images, train, and print how many of those held out are classified correctly."""
    options = parse()
    torch.manual_seed(options.seed)
    images = read_images(options.data, options.size)
    folder = data_folder(options)
    paths = {name: write_split(split, f"{folder}/{name}.parquet") for name, split in images.splits.items()}
    net = Net(images.channels, images.size, len(images.classes), options.width, options.depth)
    trainer, result = train(options, net, loss_fn=loss_fn, train_data=paths["train"], eval_data=paths["heldout"])
    if goes_on(options, result):
        return 0
    held: Split = images.splits["heldout"]
    logits = trainer.predict(paths["heldout"], chosen(options, result), local=options.local)
    right = int((logits.argmax(1) == torch.from_numpy(held.labels).long()).sum())
    print(f"accuracy     {right / len(held.labels):.4f}   ({right} of {len(held.labels)} held out)")
    return 0


def parse() -> argparse.Namespace:
    """Parse the command line; the defaults take about a minute on two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser, name="vision", minibatch_size=64, learning_rate=3e-3)
    parser.add_argument("--data", type=Path, help="a folder of images or of CIFAR; scikit-learn's digits without it")
    parser.add_argument("--size", type=int, default=32, help="pixels of a side, of a folder of images")
    parser.add_argument("--width", type=int, default=32, help="channels, a multiple of 4")
    parser.add_argument("--depth", type=int, default=3, help="residual blocks")
    return arguments_of(parser)


if __name__ == "__main__":
    sys.exit(exit_status(main))
