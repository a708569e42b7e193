"""Directions from files of each kind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from harvest.errors import RequestError
from harvest.input.directions import read_directions, tensor_object
from harvest.request import HarvestRequest, TensorObject

VALUES = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
UNIT = VALUES / np.linalg.norm(VALUES.astype(np.float64), axis=1, keepdims=True)

FILES: dict[str, Callable[[Path], Any]] = {
    "d.npy": lambda path: np.save(path, VALUES),
    "d64.npy": lambda path: np.save(path, VALUES.astype(np.float64) * 1e200),
    "big-endian.npy": lambda path: np.save(path, VALUES.astype(">f4")),
    "columns.npy": lambda path: np.save(path, np.asfortranarray(VALUES)),
    "d.pt": lambda path: torch.save(torch.from_numpy(VALUES), path),
    "one.pt": lambda path: torch.save({"only": torch.from_numpy(VALUES).requires_grad_()}, path),
    "d.safetensors": lambda path: safetensors.torch.save_file({"only": torch.from_numpy(VALUES)}, path),
    "d.json": lambda path: path.write_text(json.dumps(tensor_object(VALUES))),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_same_directions(name: str, tmp_path: Path) -> None:
    FILES[name](tmp_path / name)
    given = read_directions(str(tmp_path / name))
    request = HarvestRequest.check({"model": "tiny", "prompts": ["a"], "project_onto": given})
    assert request.project_onto is not None
    np.testing.assert_allclose(request.project_onto.directions(), UNIT, rtol=1e-6, atol=1e-7)


def test_one_of_several_tensors_is_named_by_its_key(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(8), "b": torch.from_numpy(VALUES)}
    safetensors.torch.save_file(tensors, tmp_path / "d.safetensors")
    torch.save(tensors, tmp_path / "d.pt")
    for name in ("d.safetensors", "d.pt"):
        assert TensorObject.model_validate(read_directions(f"{tmp_path / name}#b")).shape == [3, 8]
        assert TensorObject.model_validate(read_directions(f"{tmp_path / name}#a")).shape == [1, 8], "one direction may stand alone"
        for missing in ("", "#c"):
            with pytest.raises(RequestError, match=r"holds a, b; write .*#KEY to name one"):
                read_directions(f"{tmp_path / name}{missing}")


def test_bfloat16_keeps_its_values(tmp_path: Path) -> None:
    stored = torch.from_numpy(VALUES).bfloat16()
    safetensors.torch.save_file({"d": stored}, tmp_path / "d.safetensors")
    given = TensorObject.model_validate(read_directions(str(tmp_path / "d.safetensors")))
    expected = torch.nn.functional.normalize(stored.double(), dim=1).numpy()
    np.testing.assert_allclose(given.directions(), expected, rtol=1e-6, atol=1e-7)


class Code:
    """Does what a pickle must not: it would run on loading."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('code of a pickle was run')",))


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("d.csv", lambda path: path.write_text("1,2"), r"ends in \.json, \.npy, \.safetensors, \.pt"),
        ("gone.npy", lambda path: None, "there is no file"),
        ("d.npy", lambda path: path.write_bytes(b"no array"), r"cannot be read as \.npy"),
        ("d.safetensors", lambda path: path.write_bytes(b"no tensors"), r"cannot be read as \.safetensors"),
        ("d.json", lambda path: path.write_text("[1]"), r"cannot be read as \.json"),
        ("d.pt", lambda path: torch.save(Code(), path), r"cannot be read as \.pt"),
        ("o.npy", lambda path: np.save(path, np.array([Code()]), allow_pickle=True), r"cannot be read as \.npy"),
        ("cube.npy", lambda path: np.save(path, np.ones((2, 2, 2))), r"of float64 and shape \[2, 2, 2\] was given"),
        ("text.npy", lambda path: np.save(path, np.array(["a"])), "directions are numbers"),
        ("empty.npy", lambda path: np.save(path, np.ones((0, 8))), r"shape \[0, 8\] was given"),
        ("zero.npy", lambda path: np.save(path, np.zeros((1, 8))), "direction 0 has length 0"),
        ("nan.npy", lambda path: np.save(path, np.array([[1.0, np.nan]])), "direction 0 holds nan at 1"),
    ],
)
def test_what_holds_no_directions(name: str, write: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path / name)
    with pytest.raises(RequestError, match=message):
        read_directions(str(tmp_path / name))
