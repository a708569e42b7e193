"""Train a sparse autoencoder of SAELens on one layer of a run: its trainer takes any endless iterator of rows, such as this one.

    pip install sae-lens
    python examples/to_saelens.py run --layer 15 --out sae

The folder that it writes is read back with `sae_lens.SAE.load_from_disk`.
"""

import argparse
import itertools
from collections.abc import Iterator

import torch
from sae_lens import SAETrainer, TopKTrainingSAE, TopKTrainingSAEConfig
from sae_lens.config import LoggingConfig, SAETrainerConfig

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
    parser.add_argument("--tokens", type=int, default=1_000_000, help="how many tokens to train on, again and again those of the run")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default="sae")
    args = parser.parse_args()

    run = harvest.open(args.run)
    # Scaled by the library itself, so that it also unscales what it saves.
    config = TopKTrainingSAEConfig(
        d_in=run.width, d_sae=args.features, k=args.k, device=args.device, normalize_activations="expected_average_only_in"
    )
    config.metadata.model_name, config.metadata.hook_name = run.manifest.hf_repo, f"blocks.{args.layer}.hook_resid_post"
    batches = endless(args.run, args.layer, args.batch_tokens, args.workers)
    trainer = SAETrainer(
        SAETrainerConfig(
            total_training_samples=args.tokens,
            train_batch_size_samples=args.batch_tokens,
            lr=args.lr,
            lr_end=args.lr / 10,
            device=args.device,
            n_batches_for_norm_estimate=10,
            logger=LoggingConfig(log_to_wandb=False),
        ),
        TopKTrainingSAE(config),
        batches,
    )
    sae = trainer.fit()
    sae.save_inference_model(args.out)
    with torch.no_grad():
        rows = next(batches).to(args.device)
        left = (rows - sae(rows)).square().sum() / (rows - rows.mean(0)).square().sum()
    print(f"explained variance {1 - left:.4f}; saved {args.out}")


if __name__ == "__main__":
    main()
