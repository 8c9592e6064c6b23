"""A bucket of S3 with its endpoint in the address: what a run prints and returns is enough to come back to it."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs
import pytest
import torch
from typer.testing import CliRunner

import raypipe
from raypipe.cli import app
from raypipe.engine.io.storage import Place
from raypipe.starter import write

moto = pytest.importorskip("moto.server", reason="moto[server] is not installed, so there is no S3 to talk to")

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a folder in a bucket of a server of its own."""
    for name, value in {"ACCESS_KEY_ID": "me", "SECRET_ACCESS_KEY": "hunter2", "EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        pyarrow.fs.S3FileSystem(endpoint_override=endpoint, region="us-east-1", allow_bucket_creation=True).create_dir(
            "bucket"
        )
        yield "s3://bucket/my runs?region=us-east-1&endpoint_override=".replace(" ", "%20") + endpoint
    finally:
        server.stop()


def test_every_address_can_be_passed_back(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "model", raising=False)

    def said(*words: str) -> str:
        done = CliRunner().invoke(app, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    def trained(name: str, *more: str) -> dict[str, str]:
        settings = [f"run_config.name={name}", f"run_config.storage_path={bucket}", "num_steps=3", *more]
        lines = said("train", "run.yaml", "--local", *(word for s in settings for word in ("--set", s))).splitlines()
        return {key: line.removeprefix(key).strip() for line in lines for key in ("run folder", "checkpoint")
                if line.startswith(key)}  # fmt: skip

    run = trained("lm")
    folder, checkpoint = run["run folder"], run["checkpoint"]
    assert folder == bucket.replace("?", "/lm?")
    assert f"lm: finished; all steps done; step 3; checkpoint {checkpoint}" in said("status", folder)
    assert said("list", bucket).splitlines()[-1].endswith(folder)
    assert said("report", folder) == f"wrote {folder.replace('?', '/report.html?')}\n"
    assert said("export", folder, "-o", "model.safetensors") == "wrote model.safetensors\n"
    assert said("export", checkpoint, "-o", "same.safetensors") == "wrote same.safetensors\n"
    assert Path("model.safetensors").read_bytes() == Path("same.safetensors").read_bytes()
    writes = {"x.safetensors": "export", "hf": "export --to hf", "x.html": "report", "x.json": "trace"}
    for name, words in writes.items():
        command, *options = words.split()
        output = bucket.replace("?", f"/{name}?")
        assert said(command, folder, "-o", output, *options) == f"wrote {output}\n"
    assert {name for name, _ in Place.of(bucket).list()} == {"lm", *writes}
    for name in ("x.safetensors", "hf/model.safetensors"):
        assert Place.of(bucket).read_bytes(name) == Path("model.safetensors").read_bytes()
    assert not Path("s3:").exists(), "a folder here was taken for the bucket"

    result = raypipe.Result.from_path(folder)
    assert (result.path, result.checkpoint) == (folder, checkpoint)
    assert result.get_best_checkpoint("loss", "min") == checkpoint
    state = raypipe.load_state_dict(result.checkpoint)
    torch.save(state, tmp_path / "x.pt")
    Place.of(bucket).write_bytes("x.pt", (tmp_path / "x.pt").read_bytes())
    for source in (folder, *(bucket.replace("?", f"/{name}?") for name in ("x.safetensors", "x.pt", "hf"))):
        again = trained(f"next-{zlib.crc32(source.encode())}", f"init_from={source}", "optimizer.args.lr=0.0")
        begun = raypipe.load_state_dict(again["checkpoint"])
        assert all(torch.equal(value, begun[name]) for name, value in state.items())
    monkeypatch.delitem(sys.modules, "model")
