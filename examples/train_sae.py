"""Train a small sparse autoencoder, one that keeps the k largest features of a token, on one layer of a run.

harvest run --model smollm2 --prompts prompts.jsonl --layers 15 --out run
python examples/train_sae.py run --layer 15 --features 4096 --k 32 --out sae.safetensors
"""

import argparse

import safetensors.torch
import torch

import harvest


class SparseAutoencoder(torch.nn.Module):
    """x [token, hidden] to its k largest features, and from them back. mean and scale put the stream about 0, at a mean square of 1."""

    def __init__(self, mean: torch.Tensor, scale: torch.Tensor, n_features: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        directions = torch.nn.functional.normalize(torch.randn(n_features, len(mean)), dim=1)
        self.encoder = torch.nn.Parameter(directions.clone())
        self.bias = torch.nn.Parameter(torch.zeros(n_features))
        self.decoder = torch.nn.Parameter(directions)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        values = (x - self.mean) / self.scale @ self.encoder.T + self.bias
        top = values.topk(self.k, dim=1)
        return torch.zeros_like(values).scatter(1, top.indices, top.values.relu())

    def decode(self, features: torch.Tensor) -> torch.Tensor:
        return features @ self.decoder * self.scale + self.mean

    @torch.no_grad()
    def normalize(self) -> None:
        """Keep every feature's direction at length 1, so that its value tells how much of it there is."""
        self.decoder.copy_(torch.nn.functional.normalize(self.decoder, dim=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--layer", type=int, required=True, help="a decoder block that the run holds")
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--k", type=int, default=32, help="features that a token keeps")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--passes", type=int, default=10, help="how often every token is seen")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=0, help="processes that read beside the training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default="sae.safetensors")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    dataset = harvest.torch_dataset(args.run, layer=args.layer, batch_tokens=args.batch_tokens, seed=args.seed)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=args.workers, persistent_workers=args.workers > 0)
    print(dataset)
    sae = SparseAutoencoder(dataset.mean, dataset.std.square().mean().sqrt(), args.features, args.k).to(args.device)
    optimizer = torch.optim.Adam(sae.parameters(), lr=args.lr)
    for epoch in range(args.passes):
        dataset.set_epoch(epoch)
        error, variance = 0.0, 0.0
        fired = torch.zeros(args.features, dtype=torch.bool, device=args.device)
        for batch in loader:
            x = batch.to(args.device)
            features = sae.encode(x)
            loss = ((sae.decode(features) - x) / sae.scale).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sae.normalize()
            error += loss.item() * len(x)
            variance += ((x - sae.mean) / sae.scale).square().mean().item() * len(x)
            fired |= (features > 0).any(0)
        print(
            f"pass {epoch}: loss {error / dataset.n_tokens:.4f}, explained variance {1 - error / variance:.4f}, "
            f"{fired.sum().item()} of {args.features} features used"
        )
    safetensors.torch.save_file({name: value.cpu() for name, value in sae.state_dict().items()}, args.out, {"k": str(args.k)})
    print(f"saved {args.out}")


if __name__ == "__main__":
    main()
