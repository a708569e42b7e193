"""The figures of a report against the same taken plainly from the run's prompts; sampling; what is not finite."""

import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import harvest
from harvest.reading.export import export_safetensors
from harvest.report.measures import LayerMeasures, Measures, measure, position_edges

ALL = 10**12


def plain(run: harvest.Run, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a layer, float64 [token, value], and the position of each in its prompt."""
    position = run.layer_position(layer)
    rows = [run.prompt(i)[position].double() for i in range(run.n_prompts)]
    return torch.cat(rows), torch.cat([torch.arange(len(row)) for row in rows])


def check(found: LayerMeasures, measures: Measures, rows: torch.Tensor, positions: torch.Tensor) -> None:
    later, norms = rows[positions > 0], rows.norm(dim=1)
    assert found.n_counted == len(later)
    assert found.mean_norm == pytest.approx(norms[positions > 0].mean().item(), rel=1e-12)
    assert found.std_norm == pytest.approx(norms[positions > 0].std(correction=0).item(), rel=1e-9)
    assert found.start_norm == pytest.approx(norms[positions == 0].mean().item(), rel=1e-12)
    low, high = np.quantile(norms[positions > 0].numpy(), [0.05, 0.95], method="inverted_cdf")
    assert found.low_norm == pytest.approx(low, rel=0.03)
    assert found.high_norm == pytest.approx(high, rel=0.03)
    for figures, expected in (
        (found.mean_W, later.mean(dim=0)),
        (found.variance_W, later.var(dim=0, correction=0)),
        (found.mean_abs_W, later.abs().mean(dim=0)),
    ):
        assert np.allclose(figures, expected.numpy(), rtol=1e-9, atol=1e-12)
    edges = measures.position_edges.tolist()
    for norm, first, stop in zip(found.position_norm_P, edges, edges[1:], strict=False):
        here = norms[(positions >= first) & (positions < stop)]
        assert norm == pytest.approx(here.mean().item(), rel=1e-12) if len(here) else math.isnan(norm)


def test_figures_are_those_of_the_prompts(hostile_run: Path) -> None:
    run = harvest.open(hostile_run)
    measures = measure(run, [0, 3], ALL, 8)
    assert (measures.n_read, measures.n_tokens, measures.is_sample) == (run.n_tokens, run.n_tokens, False)
    assert [one.layer for one in measures.layers] == [0, 3]
    for found in measures.layers:
        check(found, measures, *plain(run, found.layer))
        assert found.mean_norm == pytest.approx(run.stats.mean_token_norm[found.layer], abs=1e-4)
        assert np.allclose(found.variance_W**0.5, run.stats.std[run.layer_position(found.layer)].numpy(), rtol=1e-4, atol=1e-6)


def test_projections_have_their_range_and_exact_counts(projected_run: Path) -> None:
    run = harvest.open(projected_run)
    measures = measure(run, run.layers, ALL, 8)
    for found in measures.layers:
        rows, positions = plain(run, found.layer)
        check(found, measures, rows, positions)
        later = rows[positions > 0].numpy()
        assert found.low_W.tolist() == later.min(axis=0).tolist()
        assert found.high_W.tolist() == later.max(axis=0).tolist()
        assert found.histogram is not None
        for direction in range(run.width):
            counts, _ = np.histogram(later[:, direction], found.histogram.edges(direction))
            assert found.histogram.counts_WN[direction].tolist() == counts.tolist()


def test_a_folder_of_the_api_has_the_same_figures(hostile_run: Path, tmp_path: Path) -> None:
    run = harvest.open(hostile_run)
    export_safetensors(run, tmp_path / "api")
    own, api = (measure(one, [2], ALL, 8).layers[0] for one in (run, harvest.open(tmp_path / "api")))
    assert api.mean_norm == pytest.approx(own.mean_norm, rel=1e-12)
    assert np.allclose(api.variance_W, own.variance_W, rtol=1e-12)


def test_what_is_not_finite_counts_nowhere_else(hostile_run: Path, tmp_path: Path) -> None:
    run = harvest.open(hostile_run)
    export_safetensors(run, tmp_path / "api")
    path = tmp_path / "api" / "shard_00000.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["prompt_1"][2, 5, 7] = math.nan
    tensors["prompt_2"][2, 0, 0] = math.inf
    safetensors.torch.save_file(tensors, path)
    damaged = harvest.open(tmp_path / "api")
    measures = measure(damaged, run.layers, ALL, 8)
    assert [one.n_nonfinite for one in measures.layers] == [0, 0, 2, 0]
    rows, positions = plain(damaged, 2)
    is_finite = rows.isfinite().all(dim=1)
    check(measures.layers[2], measures, rows[is_finite], positions[is_finite])


@pytest.mark.parametrize("share", [0.7, 0.4, 0.001])
def test_a_sample_is_of_whole_blocks_about_as_large_as_asked_and_the_same_each_time(share: float, hostile_run: Path) -> None:
    run = harvest.open(hostile_run)
    n_values = run.n_tokens * run.width
    first, second = (measure(run, [1], int(n_values * share), 8) for _ in range(2))
    assert first.is_sample
    assert first.n_read == second.n_read
    assert first.layers[0].mean_norm == second.layers[0].mean_norm
    # Each shard of this run is one block.
    sizes = np.diff(run.shard_token_offsets)
    sums = {int(sizes[[place in chosen for place in range(3)]].sum()) for chosen in ([0], [0, 1], [0, 2])}
    assert first.n_read in sums
    assert abs(first.n_read - run.n_tokens * share) <= sizes.max()


def test_bins_of_positions_are_single_and_then_grow() -> None:
    assert position_edges(1).tolist() == [0, 1]
    assert position_edges(32).tolist() == list(range(33))
    edges = position_edges(100_000)
    assert (edges[:33].tolist(), edges[-1]) == (list(range(33)), 100_000)
    assert len(edges) < 130
    assert (np.diff(edges) > 0).all()
    assert (np.diff(edges)[33:-1] / edges[33:-2] < 0.12).all()
