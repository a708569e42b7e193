"""Memory does not grow with the number of prompts, nor with the size of a shard: measured on whole commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import harvest

MIB = 1 << 20

# Runs the command in a process of its own and prints the most memory that it ever held.
MEASURE = """
import resource, sys
from harvest.cli import cli
cli(sys.argv[1:], standalone_mode=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
"""


def peak_bytes(prompts: Path, out: Path, *options: str, setup: str = "") -> int:
    command = [sys.executable, "-c", setup + MEASURE, "run", "--model", "tiny", "--layers", "all", "--quiet"]
    command += ["--prompts", str(prompts), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["status"] == "done"
    return int(done.stderr.split()[-1])


def write_prompts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps(f"Prompt {i}: " + "word " * (i % 20)) + "\n" for i in range(count)))
    return path


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shard_size", ["32", "4096"])
def test_4096_prompts_take_no_more_memory_than_1024(shard_size: str, tmp_path: Path) -> None:
    options = ("--window-bytes", str(8 * MIB), "--shard-size", shard_size)
    few = peak_bytes(write_prompts(tmp_path / "few.jsonl", 1024), tmp_path / "few", *options)
    many = peak_bytes(write_prompts(tmp_path / "many.jsonl", 4096), tmp_path / "many", *options)

    runs = harvest.open(tmp_path / "few"), harvest.open(tmp_path / "many")
    captured = [run.n_tokens * len(run.layers) * run.width * 2 for run in runs]
    assert captured[1] - captured[0] > 80 * MIB, "the rows must grow by many times what is allowed below"
    assert many < few + 48 * MIB, f"{many / MIB:.0f} MiB, and {few / MIB:.0f} MiB with 1,024 prompts"
    assert runs[1].n_shards == 4096 // int(shard_size)


# The same on a disk that takes a tenth of a second for each piece of a shard, so that writing falls far behind.
SLOWED = """
import time
from harvest.output.shard import ShardFile
append = ShardFile.append
def slowly(self, rows):
    time.sleep(0.1)
    append(self, rows)
ShardFile.append = slowly
"""


@pytest.mark.timeout(600)
def test_a_slow_disk_makes_the_model_wait_and_memory_stays_bounded(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2048)
    options = ("--window-bytes", str(8 * MIB), "--shard-size", "64")
    fast = peak_bytes(prompts, tmp_path / "fast", *options)
    slow = peak_bytes(prompts, tmp_path / "slow", *options, setup=SLOWED)
    run = harvest.open(tmp_path / "slow")
    assert run.n_tokens * len(run.layers) * run.width * 2 > 56 * MIB, "the rows must be many times what is allowed below"
    assert slow < fast + 24 * MIB, f"{slow / MIB:.0f} MiB, and {fast / MIB:.0f} MiB where the disk keeps up"
