"""Runs and shards of the API's first version, read through the same interface as harvest's own.

The files are made here with safetensors itself, from what is known of the API, and not by harvest's export.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import harvest
from harvest.errors import NotARunError
from harvest.output.folder import RunFolder


def make_api_folder(run: harvest.Run, folder: Path, packed: bool = False, below: str = "") -> Path:
    """The files of a run as someone has them who downloaded them from the API, shards of other sizes than the run's among them."""
    (folder / below).mkdir(parents=True, exist_ok=True)
    manifest = json.loads(run.manifest.to_json())
    del manifest["local"]
    manifest["compression"] = "gzip" if packed else "none"
    manifest["shards"] = []
    for index, first in enumerate(range(0, run.n_prompts, 5)):
        prompts = range(first, min(first + 5, run.n_prompts))
        named = [(f"prompt_{i}", run.prompt(i)) for i in prompts] + [(f"tokens_{i}", run.token_ids(i)) for i in prompts]
        data = safetensors.torch.save(dict(named))
        name = f"shard_{index:05d}.safetensors" + (".gz" if packed else "")
        (folder / below / name).write_bytes(gzip.compress(data) if packed else data)
        tensors = [{"name": name, "shape": list(tensor.shape)} for name, tensor in named]
        manifest["shards"].append({"key": f"harvest/{manifest['run_id']}/{name}", "prompt_indices": list(prompts), "tensors": tensors})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "stats.safetensors").write_bytes((run.path / "stats.safetensors").read_bytes())
    return folder


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_folder_of_either_kind_answers_the_same(packed: bool, tiny_run: Path, tmp_path: Path) -> None:
    own = harvest.open(tiny_run)
    api = harvest.open(make_api_folder(own, tmp_path / "api", packed))
    assert (api.layers, api.n_prompts, api.n_tokens, api.width, api.dtype) == (
        own.layers,
        own.n_prompts,
        own.n_tokens,
        own.width,
        own.dtype,
    )
    assert (own.n_shards, api.n_shards) == (3, 2)
    for i in range(own.n_prompts):
        assert api.prompt(i).dtype == torch.bfloat16
        assert torch.equal(api.prompt(i), own.prompt(i))
        assert torch.equal(api.token_ids(i), own.token_ids(i))
        assert api.text(i) == own.text(i)
    assert torch.equal(api.stats.std, own.stats.std)
    assert api.stats.mean_token_norm == own.stats.mean_token_norm
    assert api.job is None
    for layer in own.layers:
        whole = own.layer(layer)[:]
        assert torch.equal(torch.cat(list(api.layer(layer))), whole)
        for start, stop in [(0, 1), (0, 248), (50, 200), (247, 248), (100, 100), (-5, None), (300, 400)]:
            assert torch.equal(api.layer(layer)[start:stop], whole[start:stop]), (start, stop)


def test_a_shard_is_found_by_its_key_before_it_is_found_by_its_name(tiny_run: Path, tmp_path: Path) -> None:
    own = harvest.open(tiny_run)
    folder = make_api_folder(own, tmp_path, below=f"harvest/{own.manifest.run_id}")
    (tmp_path / "shard_00000.safetensors").write_text("another file of that name")
    assert torch.equal(harvest.open(folder).prompt(0), own.prompt(0))


@pytest.mark.parametrize("key", ["/etc/shard_00000.safetensors", "../shard_00000.safetensors", "harvest/../../shard_00000.safetensors"])
def test_a_key_does_not_lead_out_of_the_folder(key: str, tmp_path: Path) -> None:
    (tmp_path / "shard_00000.safetensors").touch()
    assert RunFolder(tmp_path / "run").find(key) == tmp_path / "run" / "shard_00000.safetensors"


def test_shards_of_either_kind_are_one_interface(tiny_run: Path, tmp_path: Path) -> None:
    own = harvest.open(tiny_run)
    path = make_api_folder(own, tmp_path) / "shard_00001.safetensors"
    with harvest.open_shard(path, layers=own.layers) as api, own.shard(1) as zarr_shard:
        assert set(api) == {f"{kind}_{i}" for kind in ("prompt", "tokens") for i in range(5, 9)}
        # Start tokens and bytes of the last four texts: 10, 70, 4 and 36.
        assert (api.prompts, api.token_offsets, api.n_tokens) == ([5, 6, 7, 8], [0, 10, 80, 84, 120], 120)
        assert (api.width, api.dtype, api.layers) == (zarr_shard.width, zarr_shard.dtype, zarr_shard.layers)
        for i in (5, 6, 7):
            assert torch.equal(api[f"prompt_{i}"], zarr_shard[f"prompt_{i}"])
            for shard in (api, zarr_shard):
                start, stop = shard.token_offsets[shard.prompts.index(i) :][:2]
                assert torch.equal(shard.layer(2, start, stop), own.prompt(i)[2])
        assert api.layer(0, 7, 7).shape == (0, 64)
        with pytest.raises(KeyError):
            api["prompt_05"]
        with pytest.raises(IndexError):
            api.layer(4)


def test_a_safetensors_shard_alone_does_not_guess_its_layers(tiny_run: Path, tmp_path: Path) -> None:
    path = make_api_folder(harvest.open(tiny_run), tmp_path) / "shard_00000.safetensors"
    with harvest.open_shard(path) as shard:
        assert shard["prompt_0"].shape == (4, 12, 64)
        assert "layers" not in repr(shard)
        with pytest.raises(NotARunError, match=r"open its run with harvest\.open"):
            shard.layers  # noqa: B018
    with pytest.raises(NotARunError, match=r"holds 4 layers, and 2 were named for it: \[1, 2\]"):
        harvest.open_shard(path, layers=[1, 2])


ROWS, IDS = torch.zeros(2, 3, 4), torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"mean": torch.zeros(2, 4)}, "but no shard: a shard holds prompt_i"),
        ({"prompt_0": ROWS}, "tokens_0"),
        ({"prompt_0": ROWS, "tokens_0": IDS[:2]}, "but no shard"),
        ({"prompt_0": ROWS[0], "tokens_0": IDS}, "but no shard"),
        ({"prompt_0": ROWS.to(torch.int8), "tokens_0": IDS}, "but no shard"),
        ({"prompt_0": ROWS, "tokens_0": IDS, "prompt_1": ROWS[:, :, 1:].clone(), "tokens_1": IDS.clone()}, "but no shard"),
        ({"prompt_0": ROWS, "tokens_0": IDS, "prompt_1": ROWS.half(), "tokens_1": IDS.clone()}, "but no shard"),
    ],
)
def test_safetensors_that_are_no_shard(tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "x.safetensors")
    with pytest.raises(NotARunError, match=message):
        harvest.open_shard(tmp_path / "x.safetensors")


def test_a_shard_that_is_damaged(tiny_run: Path, tmp_path: Path) -> None:
    own = harvest.open(tiny_run)
    for packed, name in ((False, "shard_00000.safetensors"), (True, "shard_00000.safetensors.gz")):
        path = make_api_folder(own, tmp_path, packed) / name
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(NotARunError, match=f"{name}: is no shard file that can be read"):
            harvest.open(tmp_path).prompt(0)
    data = bytearray((tiny_run / "shards" / "shard_00000.zarr.zip").read_bytes())
    # In the middle of the first chunk of rows, whose entry's checksum then does not hold.
    data[data.index(b"activations/c/0/0/0") + 2000] ^= 1
    (tmp_path / "flipped.zarr.zip").write_bytes(data)
    with harvest.open_shard(tmp_path / "flipped.zarr.zip") as shard, pytest.raises(NotARunError, match=r"flipped.*\(Bad CRC-32"):
        shard.layer(0)
