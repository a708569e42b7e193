"""A Llama of random weights in many files, and its blocks read from them by harvest's own feed alone; called by stream.

python scripts/bench llama make --folder DIR
python scripts/bench llama read --folder DIR
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from cold import cached_share, drop, flush

from harvest.model.describe import describe
from harvest.model.device import Placement
from harvest.model.feed import Feed
from harvest.model.load import load_blockwise
from harvest.model.sources import find_model
from harvest.model.tiny import tiny_tokenizer
from harvest.settings import Engine

_SEED = 20261201
_HEAD = 64


def main(arguments: list[str]) -> int:
    """Make the files, or read them; a JSON object on standard output."""
    parser = argparse.ArgumentParser(prog="bench llama", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["make", "read"])
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoint; it is made, and must not be there yet")
    parser.add_argument("--blocks", type=int, default=16, help="[default: 16]")
    parser.add_argument("--hidden", type=int, default=1024, help=f"a multiple of {_HEAD} [default: 1024]")
    options = parser.parse_args(arguments)
    if options.hidden < _HEAD or options.hidden % _HEAD:
        parser.error(f"--hidden {options.hidden}: attention heads have {_HEAD} values each; give a multiple of {_HEAD}")
    print(json.dumps(make(options.folder, options.blocks, options.hidden) if options.step == "make" else read(options.folder)))
    return 0


def make(folder: Path, n_blocks: int, hidden: int) -> dict[str, Any]:
    """Write a float32 checkpoint, about a block a file, that reads bytes as tiny does. A folder that is there is whole."""
    n_heads = hidden // _HEAD
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=n_blocks,
        num_attention_heads=n_heads,
        num_key_value_heads=n_heads // 4 if n_heads % 4 == 0 else n_heads,
        max_position_embeddings=4096,
        bos_token_id=256,
        eos_token_id=None,
        dtype=torch.float32,
    )
    torch.manual_seed(_SEED)
    model = transformers.LlamaForCausalLM(config)
    block_bytes = sum(weights.nbytes for weights in model.model.layers[0].parameters())
    part = folder.with_name(folder.name + ".part")
    model.save_pretrained(part, max_shard_size=block_bytes)
    tiny_tokenizer().save_pretrained(part)
    flush(sorted(part.glob("*.safetensors")))
    os.rename(part, folder)
    return {"block_bytes": block_bytes}


def read(folder: Path) -> dict[str, Any]:
    """Fill each block once from files that are not in the system's cache, and compute nothing."""
    description = describe(find_model(str(folder), Engine()))
    decoder = load_blockwise(description, Placement(torch.device("cpu")), torch.float32, description.n_layers)
    paths = sorted(folder.glob("*.safetensors"))
    drop(paths)
    share = cached_share(paths)
    started = time.perf_counter()
    with Feed(decoder, 1) as feed:
        for _ in range(description.n_layers):
            feed.next(lambda: None)
        seconds = time.perf_counter() - started
    return {"weight_bytes": feed.n_bytes, "read_s": feed.read_s, "seconds": seconds, "cached_before": share}
