"""Directions to project onto, from a file, as the API's tensor object: a request holds them as the API would take them."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harvest.errors import RequestError
from harvest.request import unit_directions

FORMATS = (".json", ".npy", ".safetensors", ".pt")


def read_directions(source: str) -> dict[str, Any]:
    """The tensor object in a file.

    .json holds the object itself; .npy one array, [n_directions, hidden] or [hidden]; .safetensors and .pt one such tensor, or several,
    where `file#key` names which. A .pt file is loaded with weights only: no code in it is run. float32 and float16 travel as they are,
    bfloat16 as the float32 of the same value; wider floats are scaled to length 1 before they are rounded to float32.
    Raises RequestError.
    """
    name, _, key = source.partition("#")
    path = Path(name)
    if path.suffix.lower() not in FORMATS:
        raise RequestError(f"project_onto: {name} was given; a file of directions ends in {', '.join(FORMATS)}")
    if not path.is_file():
        raise RequestError(f"project_onto: there is no file {name}")
    try:
        if path.suffix.lower() == ".json":
            return dict(json.loads(path.read_bytes()))
        return tensor_object(_read_array(path, key))
    except RequestError:
        raise
    except Exception as error:
        # Three libraries read these files, and what each raises on a broken one is its own.
        raise RequestError(f"project_onto: {name} cannot be read as {path.suffix} ({str(error).splitlines()[0]})") from error


def tensor_object(directions: npt.NDArray[Any]) -> dict[str, Any]:
    """The tensor object of an array [n_directions, hidden], or of one direction [hidden]. Raises RequestError."""
    if directions.ndim == 1:
        directions = directions[None]
    if directions.ndim != 2 or not directions.size or directions.dtype.kind not in "fiu":
        raise RequestError(
            f"project_onto: an array of {directions.dtype} and shape {list(directions.shape)} was given; "
            "directions are numbers of shape [n_directions, hidden], or [hidden]"
        )
    if directions.dtype not in (np.float16, np.float32):
        try:
            directions = unit_directions(directions)
        except ValueError as error:
            raise RequestError(f"project_onto: {error}") from None
    little_endian = np.ascontiguousarray(directions, dtype=directions.dtype.newbyteorder("<"))
    data = base64.b64encode(little_endian.tobytes()).decode()
    return {"data": data, "dtype": directions.dtype.name, "shape": list(directions.shape), "compression": "none"}


def _read_array(path: Path, key: str) -> npt.NDArray[Any]:
    if path.suffix.lower() == ".npy":
        return np.asarray(np.load(path, allow_pickle=False))
    import torch

    if path.suffix.lower() == ".pt":
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    else:
        import safetensors.torch

        loaded = safetensors.torch.load_file(path)
    tensors = {"": loaded} if isinstance(loaded, torch.Tensor) else {str(name): tensor for name, tensor in dict(loaded).items()}
    if key not in tensors and (key or len(tensors) > 1):
        raise RequestError(f"project_onto: {path} holds {', '.join(tensors)}; write {path}#KEY to name one")
    tensor = tensors.get(key, next(iter(tensors.values())))
    return np.asarray((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy())
