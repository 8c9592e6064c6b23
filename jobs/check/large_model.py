"""A model that only the workers hold: who has how much memory while it is loaded and trained, and how it is planned.

    python jobs/check/large_model.py               4.2 GB in shards, two steps on 4 workers; Llama-2-7B planned
    python jobs/check/large_model.py --only plan
    python jobs/check/large_model.py --gigabytes 8 --workers 8

    shards    a Llama with random weights, written shard by shard to a temporary folder, as Hugging Face has them
    train     PipelineConfig(weights_on="workers"), init_from that folder, SGD; on Ray actors of this machine
    plan      shapes only, from meta: Llama-2-7B on eight stages in bf16

Memory is the high-water mark of each process (VmHWM). What a worker needs for a very small model, which runs first, is
what its process takes without weights; the rest, when its optimizer is made, is what loading took, and is compared
with the bytes of its parameters. The exit status is 1 where a limit was passed: 700 MB for the client and for the
driver, 1.15 of its share for a worker, 60 s and 2 GB for the plan.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.lib.common import Bench, machine_line, table

BENCH = Bench(
    "check_large_model",
    __doc__,
    layout={"figure": r"(\w+_(?:mb|seconds)|worker_of_share)"},
    targets={
        r"(client|driver)_mb": "<= 700",
        "worker_of_share": "<= 1.15",
        "plan_seconds": "<= 60",
        "plan_mb": "<= 2000",
    },
    options={
        "--gigabytes": {"type": float, "default": 4.2, "help": "of weights, in fp32"},
        "--workers": {"type": int, "default": 4},
        "--precision": {"default": "fp32"},
        "--only": {"choices": ("train", "plan")},
    },
)
LIMIT_S = 3600.0
STEPS, SAMPLES, LENGTH, VOCABULARY = 2, 4, 16, 8192
MOST_BYTES, MOST_SHARE = 700e6, 1.15
MOST_PLAN_S, MOST_PLAN_BYTES = 60.0, 2e9


@dataclass
class Llama:
    """Builds a Llama; the unbuilt configuration is sent to workers."""

    layers: int
    width: int = 2048
    vocabulary: int = VOCABULARY
    attention_heads: int = 16

    def __call__(self) -> torch.nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.LlamaConfig(
            num_hidden_layers=self.layers, hidden_size=self.width, intermediate_size=self.width * 11 // 4,
            num_attention_heads=self.attention_heads, num_key_value_heads=self.attention_heads,
            vocab_size=self.vocabulary, max_position_embeddings=4096, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)


def llama_of(gigabytes: float) -> Llama:
    """Choose as many layers as make ``gigabytes``; a small model for less than one layer."""
    one = Llama(1)
    layer_bytes = 4 * (4 * one.width**2 + 3 * one.width * (one.width * 11 // 4))
    table_bytes = 2 * 4 * VOCABULARY * one.width
    layers = round((gigabytes * 1e9 - table_bytes) / layer_bytes)
    return Llama(layers) if layers >= 1 else Llama(4, 32, 64, 2)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, vocabulary: int) -> None:
        self.rows = torch.randint(0, vocabulary, (STEPS * SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[row], "labels": self.rows[row].clone()}


def high_water_bytes(process: int | str = "self") -> int:
    """Read the peak resident bytes of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


@dataclass
class Noting:
    """Makes SGD, and notes what its process has needed until then, and for how many bytes of parameters."""

    folder: Path
    home: int

    def __call__(self, named: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(named, lr=1e-3)
        if os.getpid() != self.home:
            share = sum(p.nbytes for group in made.param_groups for p in group["params"])
            line = json.dumps({"high": high_water_bytes(), "share": share})
            with (self.folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        return made


class Observer:
    """Looks at the driver's process, and at what the object store holds, until it is stopped: of this process's Ray."""

    def __init__(self) -> None:
        self.driver_bytes, self.shared_bytes = 0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.2):
            for process, title in _descendants(os.getpid()):
                if title.startswith("ray::") and "Driver" in title:
                    self.driver_bytes = max(self.driver_bytes, high_water_bytes(process))
                elif "raylet" in title:  # which maps the store, and touches what is put there
                    self.shared_bytes = max(self.shared_bytes, _shared_bytes(process))


def _descendants(root: int) -> list[tuple[int, str]]:
    """Process and command of all that this process has started, directly or not."""
    parents: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            parents[int(folder.name)] = parent, (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, ValueError, IndexError):  # it has ended meanwhile
            continue
    found, known = [], {root}
    while more := {pid for pid, (parent, _) in parents.items() if parent in known} - known:
        known |= more
        found += [(pid, parents[pid][1]) for pid in more]
    return found


def _shared_bytes(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem")), 0)


def make_shards(folder: Path, llama: Llama) -> dict[str, Any]:
    """Write random weights of this model, a file for about every 250 MB, and their index."""
    from safetensors.torch import save_file

    from raypipe.engine.initial.meta_init import build_on_meta

    model, _ = build_on_meta(llama, 0)
    generator = torch.Generator().manual_seed(2)
    files: dict[str, list[str]] = {}
    held: dict[str, torch.Tensor] = {}
    held_bytes = 0
    total = 0
    named = list(model.state_dict().items())
    for position, (name, bare) in enumerate(named):
        scale = 1.0 if bare.dim() < 2 else 0.02
        held[name] = torch.empty(bare.shape).normal_(0.0, 1.0, generator=generator).mul_(scale)
        held_bytes += held[name].nbytes
        if held_bytes > 250e6 or position == len(named) - 1:
            file = f"model-{len(files) + 1:05d}.safetensors"
            save_file(held, folder / file, {"format": "pt"})
            files[file] = list(held)
            total, held, held_bytes = total + held_bytes, {}, 0
    index = {"metadata": {"total_size": total}, "weight_map": {name: file for file in files for name in files[file]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return {"bytes": total, "files": len(files)}


def train(folder: Path, llama: Llama, workers: int, precision: str) -> dict[str, Any]:
    """Train two steps from these shards, and return the memory of every process."""
    import raypipe

    notes = folder / f"notes-{time.time_ns()}"
    notes.mkdir()
    os.environ["RAYPIPE_CACHE_DIR"] = str(folder / "profiles")
    trainer = raypipe.PipelineTrainer(
        llama,
        optimizer=Noting(notes, os.getpid()),
        train_data=Tokens(llama.vocabulary),
        init_from=folder / "weights",
        pipeline=raypipe.PipelineConfig(
            num_stages=workers, minibatch_size=SAMPLES, num_microbatches=2, weights_on="workers", precision=precision,
            partitioner="parameters",
        ),
        scaling_config=SimpleNamespace(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=SimpleNamespace(name="run", storage_path=str(notes)),
    )  # fmt: skip
    observer = Observer()
    try:
        begin_s = time.monotonic()
        trainer.plan()
        planned_s = time.monotonic() - begin_s
        result = trainer.fit(num_steps=STEPS, progress=False)
    finally:
        observer.stop()
    lines = [json.loads(line) for path in notes.glob("*.jsonl") for line in path.read_text().splitlines()]
    return {
        "workers": sorted(lines, key=lambda line: -int(line["share"])),
        "client": high_water_bytes(),
        "driver": observer.driver_bytes,
        "shared": observer.shared_bytes,
        "planned_s": planned_s,
        "seconds": time.monotonic() - begin_s,
        "losses": [record.loss for record in result.records],
    }


def plan() -> dict[str, Any]:
    """Plan Llama-2-7B from its shapes."""
    import transformers

    import raypipe

    def llama2() -> torch.nn.Module:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False))

    trainer = raypipe.PipelineTrainer(
        llama2,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4),
        train_data=Tokens(VOCABULARY),
        pipeline=raypipe.PipelineConfig(num_stages=8, minibatch_size=8, num_microbatches=4, weights_on="workers",
                                        precision="bf16"),
    )  # fmt: skip
    begin_s = time.monotonic()
    made = trainer.plan()
    seconds = time.monotonic() - begin_s
    used_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    return {"seconds": seconds, "processor_s": used_s, "bytes": high_water_bytes(), "plan": str(made)}


def in_process(*words: str) -> dict[str, Any]:
    """Run a part of this script in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--one", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_S, check=True, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def one(words: list[str]) -> dict[str, Any]:
    """Run one part in this process."""
    part, rest = words[0], words[1:]
    if part == "plan":
        return plan()
    folder, llama = Path(rest[0]), llama_of(float(rest[1]))
    if part == "shards":
        (folder / "weights").mkdir(parents=True)
        return make_shards(folder / "weights", llama)
    return train(folder, llama, int(rest[2]), rest[3])


def trained(asked: Any, raw: dict[str, Any]) -> dict[str, float]:
    """Train, print the memory figures and return them."""
    workers, gigabytes = asked.workers, 0.001 if asked.quick else asked.gigabytes
    with tempfile.TemporaryDirectory(prefix="large-model-") as name:
        for title, size in (("small", 0.001), ("large", gigabytes)):
            folder = Path(name) / title
            made = in_process("shards", str(folder), str(size))
            print(f"{title}: {made['bytes'] / 1e9:.3f} GB in {made['files']} files; {machine_line()}", flush=True)
            raw[title] = made | in_process("train", str(folder), str(size), str(workers), asked.precision)
    large = raw["large"]
    base = max(line["high"] for line in raw["small"]["workers"])
    rows = [["client", "", large["client"] / 1e6, "", ""], ["driver", "", large["driver"] / 1e6, "", ""]]
    ratios = []
    for number, line in enumerate(large["workers"]):
        ratios.append((line["high"] - base) / line["share"])
        rows.append([f"worker {number}", line["share"] / 1e6, line["high"] / 1e6, base / 1e6, ratios[-1]])
    columns = ("process", "share, MB", "most, MB", "without weights, MB", "loading / share")
    title = f"{STEPS} steps of {large['bytes'] / 1e9:.2f} GB, losses {large['losses']}; {machine_line()}"
    print("\n" + table(title, columns, rows))
    print(f"in shared memory at most {large['shared'] / 1e6:.0f} MB more than before; {large['seconds']:.0f} s in all")
    found = {"client_mb": large["client"] / 1e6, "driver_mb": large["driver"] / 1e6, "worker_of_share": max(ratios)}
    if asked.quick:  # of a share that is smaller than what a process takes one time more than another
        del found["worker_of_share"]
    return found


def main() -> int:
    """Return exit status 1 if a limit is exceeded."""
    if len(sys.argv) > 2 and sys.argv[1] == "--one":
        print(json.dumps(one(sys.argv[2:])))
        return 0
    run = BENCH.begin()
    if run.options.only != "plan":
        run.figures |= trained(run.options, run.raw)
    if run.options.only != "train":
        planned = run.raw["plan"] = in_process("plan")
        print(f"\n{planned['plan']}\nLlama-2-7B planned in {planned['seconds']:.1f} s, {planned['bytes'] / 1e6:.0f} MB")
        run.figures |= {"plan_seconds": planned["seconds"], "plan_mb": planned["bytes"] / 1e6}
    most = {"client_mb": MOST_BYTES / 1e6, "driver_mb": MOST_BYTES / 1e6, "worker_of_share": MOST_SHARE,
            "plan_seconds": MOST_PLAN_S, "plan_mb": MOST_PLAN_BYTES / 1e6}  # fmt: skip
    missed = [name for name, value in run.figures.items() if value > most[name]]
    print(
        "\n".join(f"{name} is {run.figures[name]:.4g}, above {most[name]:g}" for name in missed) or "within all limits"
    )
    run.end(missed=missed)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
