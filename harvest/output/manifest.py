"""manifest.json: what a whole run holds. Where it stands, the run is whole."""

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from harvest.contract import Contents, Manifest, Projection, ShardEntry, TensorEntry
from harvest.input.plan import Shard
from harvest.output.folder import RunFolder
from harvest.output.layout import ShardLayout

_TENSOR_LAYOUTS: dict[Contents, str] = {
    "activations": "prompt_{i} is the residual stream of prompt i, [layer, token, hidden]",
    "projections": "prompt_{i} is the residual stream of prompt i along each direction, [layer, token, direction]",
}
_ROWS_IN_A_SHARD = (
    "in the order of layer_indices. In a shard file it is tokens prompt_offsets[j] to prompt_offsets[j + 1] of the array {array}, "
    "where prompt_indices[j] = i."
)
_PROJECTION = "Each direction was scaled to length 1, its length taken in float64; stream and directions were multiplied in float32."
_TOKENS_LAYOUT = (
    "tokens_{i} are the ids that the model read for prompt i, int32 [token], in the order of the token axis. In a shard file they are the "
    "same range of the array token_ids."
)
_STATISTICS = (
    "stats.safetensors: mean and std (population), float32 [layer, hidden or direction], of the stored values over all tokens of the run "
    "but the first of each prompt, accumulated in float64; layer_indices, int32. mean_token_norm: the mean L2 norm of the same tokens, by "
    "layer."
)
_LIBRARIES = ("harvest", "torch", "transformers", "accelerate", "zarr", "numcodecs", "numpy")


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that make a run."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in _LIBRARIES}


def shard_entries(folder: RunFolder, shards: Sequence[Shard], lengths: Sequence[int], layout: ShardLayout) -> list[ShardEntry]:
    """The manifest's list of shards, each with the tensors of its prompts by the API's names."""
    entries = []
    for shard in shards:
        prompts = list(range(shard.first, shard.end))
        tensors = [TensorEntry(name=f"prompt_{i}", shape=[len(layout.layers), lengths[i], layout.width]) for i in prompts]
        tensors += [TensorEntry(name=f"tokens_{i}", shape=[lengths[i]]) for i in prompts]
        entries.append(ShardEntry(key=folder.shard_key(shard.index), prompt_indices=prompts, tensors=tensors))
    return entries


def make_manifest(
    *,
    run_id: UUID,
    model_id: str,
    hf_repo: str,
    layout: ShardLayout,
    prompts: Sequence[str],
    add_special_tokens: bool,
    batch_size: int | None,
    shards: list[ShardEntry],
    mean_norm_L: Sequence[float],
    local: Mapping[str, Any],
) -> Manifest:
    """The manifest of a run. `local` holds all that the API has no key for."""
    return Manifest(
        run_id=run_id,
        model_id=model_id,
        hf_repo=hf_repo,
        dtype=layout.store_dtype,
        capture=f"harvest {importlib.metadata.version('harvest')}: forward hooks on the decoder blocks of transformers",
        add_special_tokens=add_special_tokens,
        layer_indices=list(layout.layers),
        n_prompts=len(prompts),
        batch_size=batch_size,
        prompts=list(prompts),
        shards=shards,
        contents=layout.contents,
        projection=Projection(n_directions=layout.width, note=_PROJECTION) if layout.contents == "projections" else None,
        tensor_layout=f"{_TENSOR_LAYOUTS[layout.contents]}, {_ROWS_IN_A_SHARD.format(array=layout.contents)}",
        tokens_layout=_TOKENS_LAYOUT,
        statistics=_STATISTICS,
        mean_token_norm={str(layer): round(float(norm), 4) for layer, norm in zip(layout.layers, mean_norm_L, strict=True)},
        local=dict(local),
    )
