"""Make a direction from two classes of prompts, the difference of their means, and project all prompts onto it with harvest.

    harvest run --model smollm2 --prompts labelled.jsonl --layers 15 --out run
    python examples/difference_of_means.py run --labels labelled.jsonl --layer 15 --out direction.npy --projected projected

A line of labelled.jsonl is {"prompt": "...", "label": 1}, with labels 0 and 1. The direction is of length 1, after one decoder block, at
the last token; it comes from three quarters of the prompts, and how well it separates the classes is told of the others. `harvest run
--project-onto direction.npy` then takes any other prompts' components along it, without storing their streams.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from labelled import last_tokens, read_labels, split

import harvest


def separation(values: torch.Tensor, labels: torch.Tensor) -> float:
    """The chance that a prompt of class 1 has the larger value of two, one of each class: 0.5 is none, 1 is all."""
    ones, zeros = values[labels == 1], values[labels == 0]
    larger = (ones[:, None] > zeros).double() + (ones[:, None] == zeros).double() / 2
    return larger.mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--labels", type=Path, required=True, help="the file that the run was made of, with labels")
    parser.add_argument("--layer", type=int, required=True, help="a decoder block that the run holds")
    parser.add_argument("--out", type=Path, default=Path("direction.npy"), help="where the direction goes: float32 [1, hidden]")
    parser.add_argument("--projected", type=Path, default=Path("projected"), help="the folder of the run that projects")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    run = harvest.open(args.run)
    labels = read_labels(args.labels, run)
    learnt, held_out = split(len(labels), args.seed)
    rows = last_tokens(run, args.layer)[learnt]
    direction = rows[labels[learnt] == 1].mean(0) - rows[labels[learnt] == 0].mean(0)
    np.save(args.out, (direction / direction.norm()).numpy()[None])
    print(f"{args.out}: the means of the classes are {direction.norm():.3f} apart, from {len(learnt)} prompts")

    # The same request again, of this layer, and onto the direction.
    command = [sys.executable, "-m", "harvest", "run", "--config", args.run / "request.json", "--layers", str(args.layer), "--quiet"]
    subprocess.run([*command, "--project-onto", args.out, "--out", args.projected, "--no-limits"], check=True, stdout=sys.stderr)
    values = last_tokens(harvest.open(args.projected), args.layer)[held_out, 0]
    kinds = labels[held_out]
    print(f"held out {len(held_out)} prompts: class 0 at {values[kinds == 0].mean():.3f}, class 1 at {values[kinds == 1].mean():.3f}")
    print(f"separation: {separation(values, kinds):.3f}")


if __name__ == "__main__":
    main()
