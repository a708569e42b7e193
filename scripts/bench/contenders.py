"""Other ways to read the residual stream, each written as its users write it. All read the same token ids, padded on the right.

A contender loads its model and answers its work, to be called under the clock. Its files hold what it read; `read_back` takes the first
prompt out of them, so that its values can be held against harvest's.

Shapes: B prompts of a batch, S padded length, L layers, T tokens, H hidden size.
"""

import importlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
import transformers
from task import Ids, Task

_BATCH = 8
_SHARD = 32

Work = Callable[[], None]


@dataclass(frozen=True)
class Contender:
    """One way to read the stream.

    needs: the package without which it is skipped.
    final_norm: its last layer is the stream after the final norm, so that layer cannot be compared.
    """

    prepare: Callable[[Task], Work]
    read_back: Callable[[Task], npt.NDArray[np.float32]]
    needs: str | None = None
    final_norm: bool = False

    @property
    def is_here(self) -> bool:
        """Whether its package is installed."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


def pad(prompts: list[Ids]) -> dict[str, torch.Tensor]:
    """Ids and attention mask int64 [B, S], as a tokenizer makes them with padding."""
    longest = max(map(len, prompts))
    ids_BS = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask_BS = torch.zeros_like(ids_BS)
    for row, ids in enumerate(prompts):
        ids_BS[row, : len(ids)] = torch.from_numpy(ids)
        mask_BS[row, : len(ids)] = 1
    return {"input_ids": ids_BS, "attention_mask": mask_BS}


def _load(task: Task) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(task.location, dtype=torch.float32).eval()


def _save_batches(task: Task, read: Callable[[list[Ids]], dict[str, torch.Tensor]]) -> Work:
    """Batches of 8 in file order, each to a file of torch.save: padding, float32 and all."""
    read(task.warm_up)

    def work() -> None:
        for number, batch in enumerate(task.batches(_BATCH)):
            torch.save(read(batch), task.out / f"batch_{number:05d}.pt")

    return work


def _read_batch(task: Task) -> npt.NDArray[np.float32]:
    batch = torch.load(task.out / "batch_00000.pt")
    rows = [batch[f"layer_{layer}"][0, : len(task.prompts[0])] for layer in task.layers]
    return np.asarray(torch.stack(rows).float().numpy())


def usual(task: Task) -> Work:
    """The usual script: the whole model with its head, all hidden states, and of them the asked layers kept."""
    model = _load(task)

    @torch.no_grad()
    def read(batch: list[Ids]) -> dict[str, torch.Tensor]:
        output = model(**pad(batch), output_hidden_states=True)
        return {f"layer_{layer}": output.hidden_states[layer + 1] for layer in task.layers}

    return _save_batches(task, read)


def first_algorithm(task: Task) -> Work:
    """The hosted API's first algorithm: shards of 32 prompts, longest first, batches of 8, the asked layers stacked, bfloat16 safetensors.

    With its stats and a manifest, and uncompressed, as the API has it by default.
    """
    model = _load(task)

    @torch.no_grad()
    def read(batch: list[Ids]) -> torch.Tensor:
        output = model(**pad(batch), output_hidden_states=True)
        return torch.stack([output.hidden_states[layer + 1] for layer in task.layers]).to(torch.bfloat16)

    read(task.warm_up)

    def work() -> None:
        sums: Any = 0
        squares: Any = 0
        n_counted = 0
        shards = []
        for first in range(0, len(task.prompts), _SHARD):
            prompts = dict(enumerate(task.prompts[first : first + _SHARD], first))
            order = sorted(prompts, key=lambda number: -len(prompts[number]))
            tensors: dict[str, torch.Tensor] = {}
            for start in range(0, len(order), _BATCH):
                numbers = order[start : start + _BATCH]
                rows_LBSH = read([prompts[number] for number in numbers])
                for row, number in enumerate(numbers):
                    ids = prompts[number]
                    tensors[f"prompt_{number}"] = rows_LTH = rows_LBSH[:, row, : len(ids)].contiguous()
                    tensors[f"tokens_{number}"] = torch.from_numpy(ids.astype(np.int32))
                    counted = rows_LTH[:, 1:].double()
                    sums, squares, n_counted = sums + counted.sum(1), squares + counted.square().sum(1), n_counted + len(ids) - 1
            name = f"shard_{first // _SHARD:05d}.safetensors"
            safetensors.torch.save_file(tensors, task.out / name)
            shards.append({"key": name, "prompt_indices": list(prompts)})
        mean = sums / max(1, n_counted)
        std = (squares / max(1, n_counted) - mean.square()).clamp(min=0).sqrt()
        safetensors.torch.save_file({"mean": mean.float(), "std": std.float()}, task.out / "stats.safetensors")
        (task.out / "manifest.json").write_text(json.dumps({"layer_indices": task.layers, "shards": shards}))

    return work


def _read_shard(task: Task) -> npt.NDArray[np.float32]:
    return np.asarray(safetensors.torch.load_file(task.out / "shard_00000.safetensors")["prompt_0"].float().numpy())


def transformer_lens(task: Task) -> Work:
    """TransformerLens: run_with_cache of the asked layers, stopped after the deepest one."""
    bridge = importlib.import_module("transformer_lens.model_bridge")
    model = bridge.TransformerBridge.boot_transformers(task.location, device="cpu", dtype=torch.float32)
    model.eval()
    names = {f"layer_{layer}": f"blocks.{layer}.hook_resid_post" for layer in task.layers}
    wanted = list(names.values())

    @torch.no_grad()
    def read(batch: list[Ids]) -> dict[str, torch.Tensor]:
        padded = pad(batch)
        _, cache = model.run_with_cache(
            padded["input_ids"], attention_mask=padded["attention_mask"], names_filter=wanted, stop_at_layer=task.layers[-1] + 1
        )
        return {name: cache[hook] for name, hook in names.items()}

    return _save_batches(task, read)


def nnsight(task: Task) -> Work:
    """nnsight: a trace of the whole model in which the asked layers are saved."""
    model = importlib.import_module("nnsight").TransformersModel(
        task.location, task="text-generation", dispatch=True, device_map="cpu", dtype=torch.float32
    )

    @torch.no_grad()
    def read(batch: list[Ids]) -> dict[str, torch.Tensor]:
        saved: dict[str, Any] = {}
        with model.trace(pad(batch)):
            for layer in task.layers:
                saved[f"layer_{layer}"] = model.model.layers[layer].output.save()
        return {name: value if isinstance(value, torch.Tensor) else value[0] for name, value in saved.items()}

    return _save_batches(task, read)


CONTENDERS = {
    "usual": Contender(usual, _read_batch, final_norm=True),
    "api": Contender(first_algorithm, _read_shard, final_norm=True),
    "lens": Contender(transformer_lens, _read_batch, needs="transformer_lens"),
    "nnsight": Contender(nnsight, _read_batch, needs="nnsight"),
}


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
