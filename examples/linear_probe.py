"""Fit a linear probe: can a property of a prompt be read off the stream at its last token, after one decoder block?

    harvest run --model smollm2 --prompts labelled.jsonl --layers 15 --out run
    python examples/linear_probe.py run --labels labelled.jsonl --layer 15

A line of labelled.jsonl is {"prompt": "...", "label": 1}, with labels 0 and 1.
"""

import argparse
from pathlib import Path

import torch
from labelled import last_tokens, read_labels, split

import harvest


def fit(rows: torch.Tensor, labels: torch.Tensor, penalty: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A logistic regression with a penalty on its weights: the weights [hidden], and the bias []."""
    weights, bias = torch.zeros(rows.shape[1], requires_grad=True), torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (
            torch.nn.functional.binary_cross_entropy_with_logits(rows @ weights + bias, labels.float()) + penalty * weights.square().sum()
        )
        loss.backward()
        return loss

    optimizer.step(loss)
    return weights.detach(), bias.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--labels", type=Path, required=True, help="the file that the run was made of, with labels")
    parser.add_argument("--layer", type=int, required=True, help="a decoder block that the run holds")
    parser.add_argument("--penalty", type=float, default=1e-3, help="on the square of the weights")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    run = harvest.open(args.run)
    labels = read_labels(args.labels, run)
    # The run's own mean and std put all values on one scale, which the penalty wants.
    stats, position = run.stats, run.layer_position(args.layer)
    rows = (last_tokens(run, args.layer) - stats.mean[position]) / stats.std[position].clamp_min(1e-6)
    learnt, held_out = split(len(labels), args.seed)
    weights, bias = fit(rows[learnt], labels[learnt], args.penalty)

    right = ((rows @ weights + bias > 0) == labels.bool()).float()
    chance = max(labels.float().mean().item(), 1 - labels.float().mean().item())
    print(f"learnt from {len(learnt)} prompts: {right[learnt].mean():.3f} right")
    print(f"held out {len(held_out)} prompts: {right[held_out].mean():.3f} right; always saying the same: {chance:.3f}")


if __name__ == "__main__":
    main()
