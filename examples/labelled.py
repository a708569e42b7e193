"""What the examples with labelled prompts share: reading the labels of a run's prompts, and one row a prompt."""

import json
from pathlib import Path

import torch

import harvest


def read_labels(path: Path, run: harvest.Run) -> torch.Tensor:
    """The label, 0 or 1, of each prompt of a run, from the very file that it was made of: {"prompt": "...", "label": 1} a line."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    if [entry["prompt"] for entry in entries] != run.manifest.prompts:
        raise SystemExit(f"{path}: holds other prompts than {run.path}; give the file that the run was made of")
    return torch.tensor([entry["label"] for entry in entries])


def last_tokens(run: harvest.Run, layer: int) -> torch.Tensor:
    """The stream at the last token of each prompt, after one decoder block: float32 [prompt, hidden]."""
    position = run.layer_position(layer)
    rows = []
    for index in range(run.n_shards):
        with run.shard(index) as shard:
            last = torch.tensor(shard.token_offsets[1:]) - 1
            rows.append(shard.layer(position)[last].float())
    return torch.cat(rows)


def split(n_prompts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of three quarters of the prompts, to learn from, and of the others, to judge by."""
    order = torch.randperm(n_prompts, generator=torch.Generator().manual_seed(seed))
    return order[n_prompts // 4 :], order[: n_prompts // 4]
