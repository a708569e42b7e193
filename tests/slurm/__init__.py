"""Tests with a real SLURM: what it does that harvest's scripts rely on, and runs of harvest under it."""
