"""Runs whose blocks are streamed from the model's files: the same bytes as when the model is loaded, by whichever way they come about."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import LLAMA_LIKE, SMALL, TEXTS, Notes, tiny_request, wait_for

import harvest
import harvest.stream
from harvest.errors import CancelledError, HarvestError, ModelError, RequestError, StorageError, StreamError
from harvest.forecast import forecast
from harvest.input.directions import read_directions
from harvest.model import streaming
from harvest.model.feed import Feed
from harvest.model.restart import Restart
from harvest.model.waiting import InFile
from harvest.parts import Part
from harvest.progress import Silent
from harvest.reading.verify import verify
from harvest.stop import StopFlag

CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=False),
    "gemma3": transformers.Gemma3TextConfig(**LLAMA_LIKE | {"head_dim": 8, "sliding_window": 8}),
    # Its experts are put together as they are loaded.
    "mixtral": transformers.MixtralConfig(**LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2),
    "falcon": transformers.FalconConfig(**SMALL, hidden_size=32, num_hidden_layers=4, num_attention_heads=4),
    "gpt2": transformers.GPT2Config(**SMALL, n_embd=32, n_layer=4, n_head=4, n_positions=128),
    # Blocks of two kinds, which are given different arguments.
    "jamba": transformers.JambaConfig(
        **LLAMA_LIKE, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, num_experts=2, use_mamba_kernels=False
    ),
}
STREAM = {"weights": "stream", "store_dtype": "float32"}
RESIDENT = {"weights": "resident", "store_dtype": "float32"}


def bytes_of(folder: Path) -> dict[str, str]:
    """The digest of each shard, and of the stats."""
    files = [*sorted((folder / "shards").iterdir()), folder / "stats.safetensors"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def asking(model: Path, **fields: Any) -> harvest.HarvestRequest:
    return harvest.HarvestRequest(model=str(model), prompts=TEXTS, **{"layers": "all", "shard_size": 4, **fields})


@pytest.fixture
def feeds(monkeypatch: pytest.MonkeyPatch) -> list[Feed]:
    """The feeds of this test's runs."""
    made: list[Feed] = []

    class Kept(Feed):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(harvest.stream, "Feed", Kept)
    return made


def block_bytes(folder: Path, n_blocks: int) -> int:
    """Of a model's first blocks, as its files hold them."""
    from safetensors import safe_open

    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                number = re.search(r"\.(?:layers|h)\.(\d+)\.", f".{name}")
                if number and int(number[1]) < n_blocks:
                    total += file.get_tensor(name).nbytes
    return total


@pytest.mark.parametrize("layers", ["all", [1], [0, 2]])
@pytest.mark.parametrize("family", CONFIGS)
def test_streamed_blocks_give_the_bytes_of_resident_ones(
    family: str, layers: Any, save_model: Any, tmp_path: Path, feeds: list[Feed]
) -> None:
    folder = save_model(CONFIGS[family])
    request = asking(folder, layers=layers)
    settings = {"window_tokens": 90, "batch_tokens": 100}
    harvest.run(request, tmp_path / "resident", harvest.Engine(**RESIDENT, **settings))
    harvest.run(request, tmp_path / "stream", harvest.Engine(**STREAM, **settings))
    assert bytes_of(tmp_path / "stream") == bytes_of(tmp_path / "resident")
    deepest = harvest.open(tmp_path / "stream").layers[-1]
    (feed,) = feeds
    n_passes = 1 if deepest < 2 else 4
    assert feed.n_bytes == n_passes * block_bytes(folder, deepest + 1), "each block once a window, and two blocks once in all"
    assert not verify(tmp_path / "stream").findings
    # How the weights were had is no difference: either folder is gone on with by the other's command.
    assert harvest.run(request, tmp_path / "resident", harvest.Engine(**STREAM, **settings)).status == "done"


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
def test_weights_that_are_cast_as_they_are_read(compute_dtype: str, save_model: Any, tmp_path: Path) -> None:
    folder = save_model(CONFIGS["mixtral"])
    for weights in ("resident", "stream"):
        engine = harvest.Engine(weights=weights, compute_dtype=compute_dtype, store_dtype="float32")
        harvest.run(asking(folder), tmp_path / weights, engine)
    assert bytes_of(tmp_path / "stream") == bytes_of(tmp_path / "resident")


def test_projections_of_streamed_blocks(save_model: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "directions.npy", np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32))
    tensor = read_directions(str(tmp_path / "directions.npy"))
    request = harvest.HarvestRequest.check(
        {"model": str(save_model(CONFIGS["llama"])), "prompts": TEXTS, "layers": "all", "project_onto": tensor}
    )
    for weights in ("resident", "stream"):
        harvest.run(request, tmp_path / weights, harvest.Engine(weights=weights))
    assert bytes_of(tmp_path / "stream") == bytes_of(tmp_path / "resident")


def test_a_scratch_folder_holds_what_memory_does_not(save_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, scratch = asking(save_model(CONFIGS["gemma3"])), tmp_path / "scratch"
    scratch.mkdir()
    files: list[InFile] = []

    class Kept(InFile):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            files.append(self)

    monkeypatch.setattr(harvest.stream, "InFile", Kept)
    settings = {"batch_tokens": 100, "window_tokens": 140}
    engine = harvest.Engine(**STREAM, **settings, scratch=str(scratch), window_bytes=1000)
    ahead = forecast(request, tmp_path / "stream", engine, Silent(), StopFlag())
    assert ahead.buffer_bytes == 0
    # Rows of two windows, of 4 layers of 32 values of 4 bytes, and the streams of one.
    assert 100 * 4 * 32 * 4 < ahead.scratch_bytes < 3 * 140 * 4 * 32 * 4
    harvest.run(request, tmp_path / "stream", engine)
    harvest.run(request, tmp_path / "resident", harvest.Engine(**RESIDENT, **settings))
    assert bytes_of(tmp_path / "stream") == bytes_of(tmp_path / "resident")
    assert len(files) == ahead.n_windows > 1
    assert not list(scratch.iterdir())


def test_a_window_is_as_large_as_there_is_room(save_model: Any, tmp_path: Path) -> None:
    # 32 values of 4 bytes a token and layer; a stream of as many waits, padded.
    request = asking(save_model(CONFIGS["llama"]), layers=[3], shard_size=1)
    all_at_once = forecast(request, tmp_path / "run", harvest.Engine(**STREAM), Silent(), StopFlag())
    assert (all_at_once.n_windows, all_at_once.streamed) == (1, True)
    limited = harvest.Engine(**STREAM, window_bytes=30000)
    in_parts = forecast(request, tmp_path / "run", limited, Silent(), StopFlag())
    assert in_parts.n_windows > 1
    assert in_parts.buffer_bytes <= 30000
    assert in_parts.weight_read_bytes == in_parts.n_windows * all_at_once.weight_read_bytes
    on_disk = forecast(request, tmp_path / "run", limited.model_copy(update={"scratch": str(tmp_path)}), Silent(), StopFlag())
    assert (on_disk.n_windows, on_disk.buffer_bytes <= 30000, on_disk.scratch_bytes > 0) == (1, True, True)


def test_a_plan_says_what_is_read(save_model: Any, tmp_path: Path, feeds: list[Feed]) -> None:
    request, engine = asking(save_model(CONFIGS["llama"]), layers=[1, 2]), harvest.Engine(**STREAM, window_tokens=90)
    ahead = forecast(request, tmp_path / "run", engine, Silent(), StopFlag())
    assert "of weights to read, each block once a window" in ahead.to_text()
    harvest.run(request, tmp_path / "run", engine)
    assert feeds[0].n_bytes == ahead.weight_read_bytes
    assert forecast(request, tmp_path / "run", engine, Silent(), StopFlag()).weight_read_bytes == 0


class StopsAfter(StopFlag):
    """A wish to stop that comes with the given look at it."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._looks = looks

    def check(self) -> None:
        self._looks -= 1
        if self._looks == 0:
            raise CancelledError("a test")


def test_gone_on_with_in_the_other_way(save_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = asking(save_model(CONFIGS["mixtral"]), shard_size=2)
    # So small a memory that windows are small; the run that goes on has more, and must keep them.
    small = harvest.Engine(**STREAM, window_bytes=120_000)
    harvest.run(request, tmp_path / "whole", small)
    for name, engine in (("streamed", harvest.Engine(**STREAM, window_bytes=1 << 30)), ("resident", harvest.Engine(**RESIDENT))):
        reads = iter(range(100))
        read = harvest.stream.StreamReader.read

        def stop_in_the_third(self: Any, *arguments: Any, reads: Any = reads, read: Any = read) -> Any:
            if next(reads) == 2:
                raise CancelledError("a test")
            return read(self, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(harvest.stream.StreamReader, "read", stop_in_the_third)
            with pytest.raises(CancelledError):
                harvest.run(request, tmp_path / name, small)
        finished = len(list((tmp_path / name).glob("records/shard_*")))
        assert 2 <= finished < 5
        notes = Notes()
        harvest.run(request, tmp_path / name, engine, notes)
        assert f"{finished} of 5 shards are on disk already" in notes.said
        assert bytes_of(tmp_path / name) == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("looks", [3, 8, 20, 40])
def test_cancelled_in_the_middle_of_a_pass(looks: int, save_model: Any, tmp_path: Path) -> None:
    request, engine = asking(save_model(CONFIGS["llama"]), shard_size=2), harvest.Engine(**STREAM, window_tokens=90, batch_tokens=64)
    with pytest.raises(CancelledError):
        harvest.run(request, tmp_path / "run", engine, stop=StopsAfter(looks + 10))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("harvest-")]
    harvest.run(request, tmp_path / "run", engine)
    harvest.run(request, tmp_path / "whole", engine)
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "whole")


KILLED = """
import sys, time
import harvest.model.feed as feed
read = feed.OpenFiles.read
def slowly(self, *arguments):
    time.sleep(0.02)
    return read(self, *arguments)
feed.OpenFiles.read = slowly
from harvest.cli import cli
cli(sys.argv[1:])
"""


def test_killed_and_resumed(save_model: Any, tmp_path: Path) -> None:
    folder = save_model(CONFIGS["llama"])
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(text) + "\n" for text in TEXTS))
    words = ["run", "--model", str(folder), "--prompts", str(tmp_path / "p.jsonl"), "--layers", "all", "--shard-size", "1"]
    words += ["--weights", "stream", "--window-tokens", "60", "--quiet", "--out"]
    whole = subprocess.run([sys.executable, "-m", "harvest", *words, tmp_path / "whole"], capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen([sys.executable, "-c", KILLED, *words, tmp_path / "run"], stdout=subprocess.DEVNULL)
    records = tmp_path / "run" / "records"
    wait_for(lambda: len(list(records.glob("shard_*"))) >= 2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = {path.name: path.stat().st_mtime_ns for path in records.glob("shard_*")}
    assert 2 <= len(finished) < len(TEXTS), "killed before its end"
    done = subprocess.run([sys.executable, "-m", "harvest", *words, tmp_path / "run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "whole")
    assert all((records / name).stat().st_mtime_ns == written for name, written in finished.items()), "nothing finished is made anew"


def test_parts_share_the_windows(save_model: Any, tmp_path: Path) -> None:
    request, engine = asking(save_model(CONFIGS["falcon"]), shard_size=1), harvest.Engine(**STREAM, window_tokens=60)
    harvest.run(request, tmp_path / "whole", engine)
    harvest.run(request, tmp_path / "parts", engine, part=Part(0, 2))
    assert harvest.run(request, tmp_path / "parts", engine, part=Part(1, 2)).status == "done"
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")


def in_many_files(folder: Path, save_model: Any) -> Path:
    """A copy of a small Llama, its weights in many files."""
    model = transformers.AutoModelForCausalLM.from_pretrained(save_model(CONFIGS["llama"]))
    model.save_pretrained(folder, max_shard_size="20KB")
    transformers.AutoTokenizer.from_pretrained(save_model(CONFIGS["llama"])).save_pretrained(folder)
    return folder


def test_a_checkpoint_in_many_files(save_model: Any, tmp_path: Path) -> None:
    folder = in_many_files(tmp_path / "model", save_model)
    assert len(list(folder.glob("*.safetensors"))) > 5
    for weights in ("resident", "stream"):
        harvest.run(asking(folder), tmp_path / weights, harvest.Engine(weights=weights))
    assert bytes_of(tmp_path / "stream") == bytes_of(tmp_path / "resident")


@pytest.mark.parametrize("fault", ["missing", "short", "lacking"])
def test_files_are_seen_to_be_whole_before_a_window_is_read(fault: str, save_model: Any, tmp_path: Path, feeds: list[Feed]) -> None:
    folder = in_many_files(tmp_path / "model", save_model)
    path = sorted(folder.glob("*.safetensors"))[-2]
    if fault == "missing":
        path.unlink()
    elif fault == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        from safetensors.torch import load_file, save_file

        tensors = load_file(path)
        del tensors[min(tensors)]
        save_file(tensors, path, {"format": "pt"})
    expected = "decoder block 3" if fault == "lacking" else re.escape(path.name)
    with pytest.raises(ModelError, match=expected):
        harvest.run(asking(folder), tmp_path / "run", harvest.Engine(**STREAM))
    assert not feeds
    assert not list((tmp_path / "run").glob("records/shard_*"))


def test_auto_streams_where_the_weights_have_no_room(save_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, notes = asking(save_model(CONFIGS["llama"])), Notes()
    harvest.run(request, tmp_path / "roomy", harvest.Engine(), notes)
    assert not [text for text in notes.said if "streamed" in text]
    monkeypatch.setattr(streaming, "free_bytes", lambda _placement: 100_000)
    harvest.run(request, tmp_path / "tight", harvest.Engine(), notes)
    assert [text for text in notes.said if "have room" in text or "are streamed, each read once a window" in text]
    assert harvest.open(tmp_path / "tight").manifest.local["engine"]["weights"] == "stream"
    assert bytes_of(tmp_path / "tight") == bytes_of(tmp_path / "roomy")
    # One block has room where four have not.
    harvest.run(asking(save_model(CONFIGS["llama"]), layers=[0]), tmp_path / "cut", harvest.Engine(), notes)
    assert harvest.open(tmp_path / "cut").manifest.local["engine"]["weights"] == "resident"
    assert harvest.run(tiny_request(), tmp_path / "tiny", harvest.Engine()).status == "done"


def test_without_out_a_streamed_run_is_found_again(save_model: Any, tmp_path: Path) -> None:
    request, engine = asking(save_model(CONFIGS["llama"]), shard_size=1), harvest.Engine(**STREAM, window_bytes=60_000)
    root = tmp_path / "runs"
    first = forecast(request, None, engine, Silent(), StopFlag(), root)
    harvest.run(request, root=root, engine=engine, part=Part(0, 2))
    # With more room windows would be larger; the run keeps those that it was begun with, and a plan says so too.
    roomier = engine.model_copy(update={"scratch": str(tmp_path)})
    ahead = forecast(request, None, roomier, Silent(), StopFlag(), root)
    assert (ahead.n_windows, ahead.problems, 0 < ahead.n_shards_done < len(TEXTS)) == (first.n_windows, [], True)
    job = harvest.run(request, root=root, engine=roomier, part=Part(1, 2))
    assert job.status == "done"
    assert len(list(root.iterdir())) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device_map": "auto"}, "weights: stream was given, but device_map auto spreads the weights"),
        ({"scratch": "/nowhere/at/all"}, "scratch: there is no folder /nowhere/at/all"),
    ],
)
def test_settings_that_do_not_go_together(fields: dict[str, Any], message: str, save_model: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        harvest.run(asking(save_model(CONFIGS["llama"])), tmp_path / "run", harvest.Engine(weights="stream", **fields))
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_streamed_is_said(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="tiny is made by code and has no files"):
        harvest.run(tiny_request(), tmp_path / "run", harvest.Engine(weights="stream"))
    with pytest.raises(RequestError, match="scratch: it holds what waits while blocks are streamed"):
        harvest.run(tiny_request(), tmp_path / "run", harvest.Engine(weights="resident", scratch=str(tmp_path)))


def test_a_scratch_folder_without_room(save_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    engine = harvest.Engine(**STREAM, scratch=str(tmp_path), window_bytes=1000)
    with pytest.raises(StorageError, match=r"scratch: .* cannot take .* bytes"):
        harvest.run(asking(save_model(CONFIGS["llama"])), tmp_path / "run", engine)


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[tuple[int, int]]]:
    """Let the device hold only so many padded tokens from some block on; answers the shapes that were run there."""

    def shrink(most: int, from_block: int) -> list[tuple[int, int]]:
        run, shapes = Restart.run, []

        def run_if_it_fits(self: Restart, ids_BS: torch.Tensor, block: int, stream_BSH: Any) -> torch.Tensor:
            if block >= from_block:
                if ids_BS.numel() > most:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                shapes.append(tuple(ids_BS.shape))
            return run(self, ids_BS, block, stream_BSH)

        monkeypatch.setattr(Restart, "run", run_if_it_fits)
        return shapes

    return shrink


def test_another_release_of_transformers_is_said(save_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in 5.0.
    def convert(model: Any, state_dict: Any, load_config: Any, tp_plan: Any, dtype_plan: Any = None) -> None: ...

    monkeypatch.setattr("harvest.model.blockwise.convert_and_load_state_dict_in_model", convert)
    with pytest.raises(RequestError, match=r"loads weights in another way than 5\.24"):
        harvest.run(asking(save_model(CONFIGS["llama"])), tmp_path / "run", harvest.Engine(weights="stream"))


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("from_block", [0, 2])
def test_a_batch_that_does_not_fit_is_halved(
    from_block: int, scratch: bool, small_device: Callable[..., Sequence[Any]], save_model: Any, tmp_path: Path
) -> None:
    request, settings = asking(save_model(CONFIGS["llama"])), {"batch_tokens": 500}
    harvest.run(request, tmp_path / "whole", harvest.Engine(**STREAM, **settings))
    if scratch:
        settings |= {"scratch": str(tmp_path), "window_bytes": 100, "window_tokens": 248}
    shapes, notes = small_device(100, from_block), Notes()
    harvest.run(request, tmp_path / "run", harvest.Engine(**STREAM, **settings), notes)
    assert max(n_prompts * width for n_prompts, width in shapes) <= 100
    assert [text for text in notes.said if "did not fit the device's memory" in text]
    run, whole = harvest.open(tmp_path / "run"), harvest.open(tmp_path / "whole")
    for prompt in range(len(TEXTS)):
        assert torch.allclose(run.prompt(prompt), whole.prompt(prompt), rtol=1e-4, atol=1e-5)
    assert set(run.manifest.local["lowered_batch_tokens"]) == {
        "shards/shard_00000.zarr.zip",
        "shards/shard_00001.zarr.zip",
        "shards/shard_00002.zarr.zip",
    }


def test_a_single_prompt_that_does_not_fit(small_device: Callable[..., Any], save_model: Any, tmp_path: Path) -> None:
    small_device(69, 1)
    with pytest.raises(StreamError, match="of 70 tokens, does not fit the device's memory even alone"):
        harvest.run(asking(save_model(CONFIGS["llama"])), tmp_path / "run", harvest.Engine(**STREAM, batch_tokens=500))


def test_values_are_checked_as_the_blocks_come_by(save_model: Any, tmp_path: Path) -> None:
    notes = Notes()
    harvest.run(asking(save_model(CONFIGS["gemma3"])), tmp_path / "run", harvest.Engine(**STREAM, check=True), notes)
    (said,) = [text for text in notes.said if text.startswith("checked: ")]
    assert "2 prompts in a batch are within" in said


def test_a_value_that_is_not_finite_is_named(save_model: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_model(CONFIGS["llama"])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][:] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(HarvestError, match="layer 2, prompt 6, position 0: the model itself computed a value that is not finite"):
        harvest.run(asking(folder), tmp_path / "run", harvest.Engine(**STREAM))


def test_progress_counts_a_token_when_it_is_through_all_blocks(save_model: Any, tmp_path: Path) -> None:
    class Counts(Silent):
        total = 0
        steps = 0

        def advance(self, n_tokens: int) -> None:
            self.total += n_tokens
            self.steps += n_tokens > 0

    counts = Counts()
    harvest.run(asking(save_model(CONFIGS["llama"])), tmp_path / "run", harvest.Engine(**STREAM, batch_tokens=100), counts)
    assert counts.total == 248
    assert counts.steps >= 8


BIG: dict[str, Any] = {
    "vocab_size": 257,
    "bos_token_id": 256,
    "eos_token_id": None,
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
LARGE: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**BIG),
    "gemma3": transformers.Gemma3TextConfig(**BIG | {"head_dim": 80, "sliding_window": 8}),
    "mixtral": transformers.MixtralConfig(
        **BIG | {"hidden_size": 320, "intermediate_size": 640, "num_hidden_layers": 24}, num_local_experts=8
    ),
    "falcon": transformers.FalconConfig(
        **{name: value for name, value in BIG.items() if "intermediate" not in name and "key_value" not in name and "max_" not in name}
    ),
}

# Runs the command and prints by how much the process's own memory (RssAnon) grew at most, after a run of tiny had loaded all libraries.
MEASURE = """
import sys, threading, time
from harvest.cli import cli
prompts, *words = sys.argv[1:]
cli(["run", "--prompts", prompts, "--model", "tiny", "--quiet", "--out", prompts + ".tiny"], standalone_mode=False)
def own():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))
before, peak = own(), [0]
def watch():
    while True:
        peak[0] = max(peak[0], own())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
cli(["run", "--prompts", prompts, *words], standalone_mode=False)
print(peak[0] - before, file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", LARGE)
def test_a_model_of_some_hundred_megabytes_takes_less_than_a_third_of_its_weights(family: str, tmp_path: Path, save_model: Any) -> None:
    folder = save_model(LARGE[family])
    n_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert n_bytes > 250e6
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(text) + "\n" for text in TEXTS))
    words = [str(tmp_path / "p.jsonl"), "--model", str(folder), "--layers", "all", "--quiet", "--out"]
    started = time.monotonic()
    command = [sys.executable, "-c", MEASURE, *words, str(tmp_path / "stream"), "--weights", "stream"]
    # glibc keeps freed pieces of up to 32 MiB for itself, which are most of a block here, and nothing of one of gigabytes.
    settings = {"OMP_NUM_THREADS": "2", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 240
    peak = int(done.stderr.split()[-1])
    assert peak < n_bytes / 3, f"{peak / 1e6:.0f} MB of {n_bytes / 1e6:.0f} MB of weights"
    resident = subprocess.run(
        [sys.executable, "-m", "harvest", "run", "--prompts", *words, str(tmp_path / "resident"), "--weights", "resident"],
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert resident.returncode == 0
    assert bytes_of(tmp_path / "stream") == bytes_of(tmp_path / "resident")
    for path in folder.glob("*.safetensors"):
        path.unlink()
