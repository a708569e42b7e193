"""Train a dictionary of dictionary_learning on one layer of a run: its `trainSAE` takes any iterator of rows, such as this one.

    pip install dictionary-learning
    python examples/to_dictionary_learning.py run --layer 15 --out dictionary

The folder that it writes is read back with `dictionary_learning.utils.load_dictionary`.
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from dictionary_learning.trainers.top_k import AutoEncoderTopK, TopKTrainer
from dictionary_learning.training import trainSAE

import harvest


def endless(run: str, layer: int, batch_tokens: int, workers: int = 0) -> Iterator[torch.Tensor]:
    """Batches of a run's layer, float32 [batch_tokens, hidden], pass after pass, each pass in an order of its own."""
    dataset = harvest.torch_dataset(run, layer=layer, batch_tokens=batch_tokens, drop_last=True)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    for epoch in itertools.count():
        dataset.set_epoch(epoch)
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--layer", type=int, required=True, help="a decoder block that the run holds")
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=1000, help="batches to train on, again and again those of the run")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("dictionary"))
    args = parser.parse_args()

    run = harvest.open(args.run)
    trainer = {
        "trainer": TopKTrainer,
        "dict_class": AutoEncoderTopK,
        "activation_dim": run.width,
        "dict_size": args.features,
        "k": args.k,
        "steps": args.steps,
        "layer": args.layer,
        "lm_name": run.manifest.hf_repo,
        "warmup_steps": args.steps // 20,
        "threshold_start_step": args.steps // 2,
        "seed": 0,
        "device": args.device,
    }
    # Scaled by the library itself, so that it also unscales what it saves.
    trainSAE(
        data=endless(args.run, args.layer, args.batch_tokens, args.workers),
        trainer_configs=[trainer],
        steps=args.steps,
        save_dir=str(args.out),
        normalize_activations=True,
        verbose=True,
        log_steps=max(1, args.steps // 10),
        device=args.device,
    )
    print(f"saved {args.out / 'trainer_0'}")


if __name__ == "__main__":
    main()
