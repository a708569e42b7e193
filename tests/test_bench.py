"""The bench on tiny: each command runs, measures what it says, finds wrong values and renders the rest. Nothing depends on speed."""

import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_request

import harvest
from harvest.model import tiny
from harvest.output.folder import RunFolder

BENCH = Path(__file__).parent.parent / "scripts" / "bench"


@pytest.fixture(autouse=True)
def bench_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench's files import each other by name, as they do where the folder is run."""
    monkeypatch.syspath_prepend(BENCH)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """So small a model is fastest on one thread, above all where other tests run beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def module(name: str) -> Any:
    return importlib.import_module(name)


def check_head(measured: dict[str, Any], kind: str, *arguments: str) -> None:
    assert measured["kind"] == kind
    assert measured["command"] == " ".join(["python", "scripts/bench", kind, *arguments])
    assert measured["machine"]["cores"] >= 1
    assert measured["machine"]["memory_bytes"] > 1 << 28
    assert measured["versions"]["torch"] == torch.__version__
    assert measured["date"].endswith("+00:00")


def test_models_compares_what_read_the_same_tokens(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    arguments = ["--model", "tiny", "--prompts", "5", "--rounds", "1", "--contenders", "harvest,limit,usual", "--slow-prompts", "2"]
    arguments += ["--batch-tokens", "256", "--threads", "1", "--out", str(tmp_path / "work"), "--json", str(file)]
    done = subprocess.run([sys.executable, BENCH, "models", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = json.loads(file.read_text())
    check_head(measured, "models", *arguments)
    assert (measured["layers"], measured["prompts"], measured["is_sound"]) == ([1, 2, 3], 5, True)
    n_tokens = sum(len(text.encode()) + 1 for text in module("texts").read_96()[:5])
    assert measured["tokens"] == n_tokens

    by_name = {entry["contender"]: entry for entry in measured["measurements"]}
    assert set(by_name) == {"harvest", "limit", "usual"}
    row = by_name["limit"]["row_tokens"]
    assert row == round(n_tokens / 5)
    assert [by_name[name]["tokens"] for name in ("harvest", "limit")] == [n_tokens, n_tokens // row * row]
    assert by_name["usual"]["tokens"] == sum(len(text.encode()) + 1 for text in module("texts").read_96()[:2])
    assert {by_name[name]["threads"] for name in ("limit", "usual")} == {1}
    for entry in by_name.values():
        assert entry["tokens_per_s"] == entry["tokens"] / entry["seconds"]
        assert entry["peak_bytes"] > 50e6
        assert entry["wall_s"] > entry["seconds"] > 0
    assert by_name["limit"]["bytes"] == 0
    assert by_name["usual"]["bytes"] > by_name["usual"]["tokens"] * 3 * 64 * 4

    assert measured["check"]["same_ids"]
    assert set(measured["check"]["cosines"]) == {"limit", "usual"}
    assert all(0.999 < cosine <= 1.0001 for cosine in measured["check"]["cosines"].values())
    ratios = {entry["contender"]: entry["ratio_to"] for entry in measured["summary"]}
    assert ratios["harvest"]["limit"] == by_name["harvest"]["tokens_per_s"] / by_name["limit"]["tokens_per_s"]
    assert done.stdout.strip() == module("report").render(measured).strip()
    assert "| harvest, files and all | 5 |" in done.stdout
    assert not list((tmp_path / "work").iterdir())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plan of a comparison on tiny, and harvest's run of it in run/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        work = tmp_path_factory.mktemp("bench")
        assert module("contend").main(["prepare", "--work", str(work), "--model", "tiny", "--layers", "0,1,2", "--count", "100"]) == 0
    texts = harvest.read_prompts(work / "prompts.jsonl").texts
    harvest.run(tiny_request(texts, layers=[0, 1, 2]), work / "run")
    return work


def contend(work: Path, name: str, *arguments: str) -> dict[str, Any]:
    out = work / f"out-{name}"
    out.mkdir(exist_ok=True)
    assert module("contend").main([name, "--work", str(work), "--out", str(out), *arguments]) == 0
    return dict(json.loads((work / f"{name}.json").read_text()))


def test_more_than_96_prompts_are_cut_to_log_normal_lengths(prepared: Path) -> None:
    texts = harvest.read_prompts(prepared / "prompts.jsonl").texts
    assert len(texts) == 100
    assert max(len(text) for text in texts) <= 511
    many = module("texts").cut_texts(module("texts").corpus(), range(len(module("texts").corpus())), 2000)
    assert many[:1] != many[1:2]
    assert 55 < np.median([len(text) for text in many]) < 65


def test_the_first_algorithm_writes_all_that_the_api_does(prepared: Path) -> None:
    result = contend(prepared, "api", "--prompts", "40")
    assert result["prompts"] == 40
    names = {path.name for path in (prepared / "out-api").iterdir()}
    assert names == {"shard_00000.safetensors", "shard_00001.safetensors", "stats.safetensors", "manifest.json"}
    contend(prepared, "limit")
    check = contend(prepared, "check", "--run", str(prepared / "run"))
    assert check["same_ids"]
    assert min(check["cosines"][name] for name in ("api", "limit")) > 0.9999


@pytest.mark.parametrize(("name", "package"), [("lens", "transformer_lens"), ("nnsight", "nnsight")])
def test_what_is_installed_reads_the_same_stream(name: str, package: str, prepared: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; it comes with the extra bench")
    out = prepared / f"out-{name}"
    out.mkdir()
    command = [sys.executable, BENCH, "contend", name, "--work", prepared, "--out", out, "--prompts", "9"]
    done = subprocess.run(command, capture_output=True, text=True, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    assert contend(prepared, "check", "--run", str(prepared / "run"))["cosines"][name] > 0.9999
    assert len(list(out.iterdir())) == 2


def test_wrong_values_are_found_and_said(prepared: Path) -> None:
    contend(prepared, "usual", "--prompts", "8")
    rows = np.load(prepared / "first-usual.npy")
    try:
        # One token of one layer is another one's.
        rows[1, 2] = rows[1, 3]
        np.save(prepared / "first-usual.npy", rows)
        check = contend(prepared, "check", "--run", str(prepared / "run"))
    finally:
        (prepared / "first-usual.npy").unlink()
    assert check["cosines"]["usual"] < 0.999
    assert not module("models")._is_sound(check)
    measured = module("measuring").begin("models", []) | {
        "model": "tiny", "layers": [0], "prompts": 1, "tokens": 1, "rounds": 1, "threads": 1, "slow_prompts": None,
        "summary": [], "measurements": [], "skipped": {"lens": "it is not installed"}, "failed": {}, "check": check,
    }  # fmt: skip
    page = module("report").render(measured)
    assert "**WRONG VALUES: usual**" in page
    assert "not measured (it is not installed)" in page


def test_the_size_of_a_pass_is_tried_and_the_machine_is_measured(prepared: Path) -> None:
    sizes = contend(prepared, "tune", "--prompts", "12")["sizes"]
    assert [size["batch_tokens"] for size in sizes] == [512]
    assert sizes[0]["tokens_per_s"] > 0
    ceilings = contend(prepared, "ceilings", "--batch-tokens", "64", "--ceiling-s", "0.01", "--disk-mib", "1")
    assert list(ceilings["products"]) == ["64 x 176", "176 x 64", "64 x 64"]
    assert all(rate > 0 for rate in [*ceilings["products"].values(), ceilings["disk_bytes_per_s"]])
    assert not list((prepared / "out-ceilings").iterdir())


def test_the_limit_runs_only_the_needed_blocks(prepared: Path) -> None:
    task = module("task").load_task(prepared, prepared, 20, 256)
    bare = module("limit").load_bare(task)
    called: list[int] = []
    for number, block in enumerate(bare._blocks):
        block.register_forward_hook(lambda *_, number=number: called.append(number), prepend=True)
    rows = module("limit").packed(task)
    assert module("limit").sweep(bare, rows, rows.shape[1]) == rows.numel()
    assert called == [0, 1, 2] * len(rows)
    blocks = tiny.tiny_model().model.layers[:3]
    assert bare.n_parameters == sum(weights.numel() for weights in blocks.parameters())
    assert np.array_equal(np.concatenate(task.prompts)[: rows.numel()], rows.flatten().numpy())


def test_a_child_that_fails_or_hangs_is_an_error_with_its_last_words() -> None:
    run_child = module("measuring").run_child
    fine = run_child([sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS']); x = bytes(200_000_000)"], threads=3)
    assert (fine.stdout, fine.error) == ("3\n", None)
    assert fine.peak_bytes > 200e6
    assert run_child([sys.executable, "-c", "raise SystemExit('no such model')"]).error == "exit code 1: no such model"
    started = time.monotonic()
    late = run_child([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.5)
    assert late.error.startswith("it was still at work after 0.5 s; exit code -9")
    assert time.monotonic() - started < 30


def test_storage_writes_each_case_with_each_codec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "storage.json"
    arguments = ["--gb", "0.001", "--rounds", "2", "--hidden", "64", "--n-layers", "8", "--seconds", "0.001"]
    arguments += ["--out", str(tmp_path / "work"), "--json", str(file)]
    assert module("storage").main(arguments) == 0
    measured = json.loads(file.read_text())
    check_head(measured, "storage", *arguments)
    ways = ["plain write", "none", "lz4", "zstd"]
    assert [(entry["case"], entry["way"]) for entry in measured["summary"]] == [
        (case, way) for case in ("quartile layers", "all layers", "64 projections") for way in ways
    ]
    assert len(measured["measurements"]) == 2 * 12
    for entry in measured["measurements"]:
        assert entry["bytes"] == pytest.approx(1e6, rel=0.01)
        assert entry["seconds"] > 0
        assert entry["cpu_s"] >= 0
        if entry["way"] == "plain write":
            assert entry["stored_bytes"] == entry["bytes"]
    stored = {(entry["case"], entry["way"]): entry["stored_bytes"] for entry in measured["measurements"]}
    assert stored["all layers", "lz4"] < stored["all layers", "none"]
    assert {entry["step"] for entry in measured["one_core"]} == {"copy", "lz4", "zstd", "sums", "crc32", "sha256"}
    assert not list((tmp_path / "work").iterdir())
    assert "| all layers | lz4 |" in capsys.readouterr().out


def test_synthetic_streams_are_like_a_model_s() -> None:
    synthetic = module("synthetic")
    case = synthetic.cases(256, 8)[1]
    rows = torch.from_numpy(synthetic.streams(case, 50)).view(torch.bfloat16).float()
    sizes = rows.abs().mean(dim=(0, 1)).sort(descending=True).values
    assert sizes[3] > 20 * sizes[4]
    assert rows[-1].norm() > rows[0].norm()
    lengths = synthetic.prompt_lengths(10_000)
    assert lengths.sum() == 10_000
    assert lengths.min() >= 1


def test_scaling_measures_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scaling.json"
    arguments = ["--counts", "40", "--threads", "1", "--json", str(file)]
    assert module("scaling").main(arguments) == 0
    measured = json.loads(file.read_text())
    check_head(measured, "scaling", *arguments)
    (row,) = measured["summary"]
    assert (row["prompts"], row["shards"]) == (40, 2)
    assert row["tokens"] > 40
    assert row["bytes"] > row["tokens"] * 3 * 64
    assert row["peak_bytes"] > 50e6
    assert row["wall_s"] > row["run_s"] > 0
    assert "| 40 |" in capsys.readouterr().out


GPU_ON_A_CPU = [
    *("--device", "cpu", "--shape", "small", "--batch-tokens", "128", "--window-bytes", "65536", "--case-s", "0.02", "--gb", "0.003"),
    *("--ceiling-s", "0.001", "--copy-mib", "1", "--disk-mib", "1", "--race-runs", "2", "--race-tokens", "2000"),
]
GPU_CASES = ("quartile layers", "all layers", "64 projections")


def gpu(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the bench of one card on the CPU, and return its exit code and its JSON."""
    file = tmp_path / "gpu.json"
    arguments = (*GPU_ON_A_CPU, *arguments, "--out", str(tmp_path / "work"), "--json", str(file))
    code = module("gpu").main(list(arguments))
    measured = json.loads(file.read_text())
    check_head(measured, "gpu", *arguments)
    assert not list((tmp_path / "work").iterdir())
    return code, measured


def test_gpu_runs_the_same_way_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, measured = gpu(tmp_path, "--rounds", "2")
    assert (code, measured["card"], measured["n_layers"], measured["left_out"], measured["failed"]) == (0, None, 4, [], {})
    ways = ("written", "bare", "read")
    assert [(entry["case"], entry["way"]) for entry in measured["summary"]] == [(case, way) for case in GPU_CASES for way in ways]
    # The written runs of a round come first.
    one_round = [(case, way) for way in ways for case in GPU_CASES]
    assert [(entry["case"], entry["way"]) for entry in measured["measurements"]] == 2 * one_round
    tokens = {plan["case"]: plan["tokens"] for plan in measured["plans"]}
    for entry in measured["measurements"]:
        assert entry["seconds"] > 0
        if entry["way"] == "bare":
            assert 0 < entry["tokens"] <= tokens[entry["case"]]
            continue
        assert entry["tokens"] == tokens[entry["case"]]
        if entry["way"] == "written":
            assert entry["stored_bytes"] > 0
            assert (entry["check"]["findings"], entry["check"]["worst_error"], entry["check"]["allowed_error"]) == ([], 0, 0)
            assert entry["check"]["prompts"] > 0
    for plan in measured["plans"]:
        assert plan["padding"] >= 1
        assert plan["mean_batch_tokens"] == plan["tokens"] / plan["batches"]
        assert plan["windows"] <= plan["batches"]
    several, single = measured["race"]
    assert [race["differing_values"] for race in measured["race"]] == [[0, 0], [0, 0]]
    assert several["windows"] < several["batches"]
    assert single["windows"] == single["batches"]
    assert {entry["backend"] for entry in measured["attention"]} == {"FLASH_ATTENTION", "MATH"}
    page = capsys.readouterr().out
    assert page.strip() == module("report").render(measured).strip()
    assert "| quartile layers | stored and verified |" in page
    assert "left out; there is no card" in page


def test_gpu_leaves_out_what_there_is_no_time_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, measured = gpu(tmp_path, "--budget-s", "0")
    assert (code, measured["measurements"], measured["failed"]) == (0, [], {})
    assert measured["left_out"] == [*(f"warm-up: {case}" for case in GPU_CASES), "ceilings", "attention", "profile", "race"]
    assert "Left out for lack of time: warm-up: quartile layers; " in capsys.readouterr().out


def test_gpu_says_wrong_values_and_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no attention here\nat all")

    monkeypatch.setattr("harvest.window.Capture", torn_capture())
    monkeypatch.setattr("gpu.measure_attention", fail)
    code, measured = gpu(tmp_path, "--rounds", "1")
    assert code == 1
    assert measured["failed"] == {"attention": "RuntimeError: no attention here"}
    # What comes after a failure is measured.
    assert not any(race["is_sound"] for race in measured["race"])
    page = capsys.readouterr().out
    assert "| quartile layers | **WRONG** |" in page
    assert "**WRONG VALUES: quartile layers: prompt 0 differs from a second reading by " in page
    assert "**FAILED: attention** (RuntimeError: no attention here)" in page


def test_gpu_shows_what_only_a_card_has(tmp_path: Path) -> None:
    _, measured = gpu(tmp_path, "--budget-s", "0")
    measured |= {"card": {"name": "a card", "memory_bytes": 8e9}, "attention": [], "profile": None}
    measured["attention"] = [
        {"length": 512, "rows": 32, "backend": "FLASH_ATTENTION", "flop_s": 2e12},
        {"length": 512, "rows": 32, "backend": "CUDNN_ATTENTION", "reason": "it is off"},
        {"length": 2048, "rows": 8, "backend": "FLASH_ATTENTION", "flop_s": 3e12},
        {"length": 2048, "rows": 8, "backend": "CUDNN_ATTENTION", "reason": "it is off"},
    ]
    measured["profile"] = {
        "batches": 2, "launches_per_batch": 600.0, "waits_per_batch": {"cudaEventSynchronize": 1.5}, "idle_share": 0.25,
        "kernel_shares": {"gemm": 0.9},
    }  # fmt: skip
    page = module("report").render(measured)
    assert "## One card: a card, 8.00 GB" in page
    assert "| 512 | 2.00 | not available |" in page
    assert page.count("Not available: CUDNN_ATTENTION: it is off") == 1
    assert "600 kernel launches a batch" in page
    assert "cudaEventSynchronize 1.50; no kernel runs in 25.0% of the time" in page


def test_idle_share_counts_overlapping_kernels_once() -> None:
    idle_share = module("profiling").idle_share
    assert idle_share([(0, 10)]) == 0
    assert idle_share([(0, 10), (10, 20)]) == 0
    assert idle_share([(15, 20), (0, 10)]) == 0.25
    # One within another, and one that begins before the other ends.
    assert idle_share([(0, 10), (2, 4), (8, 12), (18, 20)]) == pytest.approx(0.3)
    assert idle_share([(5, 5)]) == 0


def test_a_profile_counts_launches_waits_and_kernels_of_the_reading() -> None:
    profiling = module("profiling")

    def event(kind: str, name: str, start: float, end: float) -> Any:
        return SimpleNamespace(name=name, device_type=SimpleNamespace(name=kind), time_range=SimpleNamespace(start=start, end=end))

    events = [
        event("CPU", profiling._RANGE, 100, 200),
        event("CPU", "cudaLaunchKernel", 50, 51),
        *(event("CPU", "cudaLaunchKernel", start, start + 1) for start in (110, 120, 130)),
        event("CPU", "cudaLaunchKernelExC", 140, 141),
        event("CPU", "cudaMemcpyAsync", 150, 151),
        event("CPU", "cudaMemcpy", 152, 153),
        event("CPU", "cudaEventSynchronize", 160, 180),
        event("CPU", "cudaEventSynchronize", 181, 182),
        event("CPU", "cudaDeviceSynchronize", 300, 310),
        event("CPU", "aten::mm", 110, 112),
        event("CUDA", profiling._RANGE, 100, 200),
        event("CUDA", "Memcpy DtoH (Device -> Pinned)", 140, 190),
        event("CUDA", "gemm", 120, 150),
        event("CUDA", "norm", 160, 170),
    ]
    found = profiling.count_events(events, 2)
    assert (found["launches_per_batch"], found["waits_per_batch"]) == (2, {"cudaEventSynchronize": 1, "cudaMemcpy": 0.5})
    assert found["idle_share"] == pytest.approx(0.2)
    assert found["kernel_shares"] == {"gemm": 0.75, "norm": 0.25}
    assert "reason" in profiling.count_events(events[:-2], 2)


def test_an_attention_backend_that_is_not_there_has_a_reason_of_one_line() -> None:
    attention = module("attention")
    heads = torch.randn(1, 2, 8, 16)
    found = attention._measure_one("CUDNN_ATTENTION", heads, heads, heads, 1.0, 0.0)
    assert found["reason"]
    assert "\n" not in found["reason"]
    said = ["Memory efficient kernel not used because: (Triggered internally at x)", "It needs equal heads. (Triggered internally at y)"]
    assert attention._reason(RuntimeError("No available kernel."), said) == "It needs equal heads."
    assert attention._reason(RuntimeError("No available kernel.\nAborting."), []) == "No available kernel."


def torn_capture() -> Any:
    """A class of captures that write each batch's first rows over those of the batch before, as a buffer used too early would."""

    class Torn(module("harvest.model.capture").Capture):
        before: Any = None

        def read(self, prompts: Any, order: Any = None, rows_LTW: Any = None, places: Any = None) -> Any:
            captured = super().read(prompts, order, rows_LTW, places)
            _, place, _ = places.runs[0]
            if self.before is not None:
                self.before.copy_(captured.rows_LTW[:, place])
            self.before = captured.rows_LTW[:, place]
            return captured

    return Torn


@pytest.fixture
def small_run() -> tuple[Any, Any]:
    """A run of all layers of the small shape on the CPU, in windows of several batches, and its decoder."""
    engine = module("engine")
    config = engine.make_config("small")
    decoder = engine.make_decoder(config, torch.device("cpu"), torch.float32)
    return engine.prepare(config, module("synthetic").cases(64, 4)[1], 4000, torch.device("cpu"), "float32", 256, 1 << 20), decoder


def test_the_check_of_copies_finds_a_buffer_that_is_used_too_early(small_run: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    race = module("race")
    assert race.check_copies(*small_run, 2)["is_sound"]
    monkeypatch.setattr("harvest.window.Capture", torn_capture())
    torn = race.check_copies(*small_run, 2)
    assert not torn["is_sound"]
    assert torn["sync_repeats"]
    assert all(torn["differing_values"])


def test_the_check_of_what_was_written_finds_damage(small_run: tuple[Any, Any], tmp_path: Path) -> None:
    engine, written = module("engine"), module("written")
    prepared, decoder = small_run
    run = RunFolder(tmp_path / "run")
    found = engine.read_and_write(prepared, decoder, run)
    assert found["seconds"] > 0
    assert found["lowered_to"] is None
    assert len(prepared.plan.shards) > 1
    check = written.check_written(run, prepared, decoder)
    assert (check["findings"], check["worst_error"], check["shards"]) == ([], 0, len(prepared.plan.shards))
    # Each shard in turn has a byte of its values flipped, and is mended again.
    for shard in prepared.plan.shards:
        path = run.shard(shard.index)
        good = path.read_bytes()
        path.write_bytes(good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :])
        (finding,) = written.check_written(run, prepared, decoder)["findings"]
        assert path.name in finding
        assert "checksum" in finding
        path.write_bytes(good)
    other_ids = replace(prepared, tokens=replace(prepared.tokens, ids=prepared.tokens.ids + 1))
    assert "other token ids" in written.check_written(run, other_ids, decoder)["findings"][0]
    other = engine.make_decoder(engine.make_config("small"), torch.device("cpu"), torch.bfloat16)
    check = written.check_written(run, prepared, other)
    assert check["worst_error"] > 0
    assert len(check["findings"]) == check["prompts"]


def test_gpu_plans_a_run_as_harvest_does_for_the_device() -> None:
    engine, budget = module("engine"), module("harvest.model.budget")
    config, cpu = engine.make_config("llama-8b"), torch.device("cpu")
    case = module("synthetic").cases(4096, 32)[0]
    prepared = engine.prepare(config, case, 1000, cpu, "bfloat16")
    assert (prepared.settings.batch_tokens, prepared.settings.window_bytes) == (2048, budget.auto_window_bytes(cpu))
    assert prepared.plan.card is None
    figures = engine.plan_figures(prepared)
    assert figures["tokens"] == 1000
    batches = prepared.plan.batches(prepared.plan.windows[0])
    assert figures["padding"] * 1000 == sum(len(batch) * prepared.tokens.lengths[batch].max() for batch in batches)


def test_the_engine_of_the_gpu_bench_reads_what_a_run_reads(tmp_path: Path) -> None:
    """The rows that it writes are those of the model's blocks, prompt by prompt."""
    engine = module("engine")
    config = engine.make_config("small")
    decoder = engine.make_decoder(config, torch.device("cpu"), torch.float32)
    case = module("synthetic").cases(64, 4)[0]
    prepared = engine.prepare(config, case, 300, torch.device("cpu"), "float32", 64, 1 << 20)
    engine.read_and_write(prepared, decoder, RunFolder(tmp_path / "run"))
    rows = dict(engine.read_synchronously(prepared, decoder))
    assert sorted(rows) == list(range(len(prepared.tokens.lengths)))
    ((prompt, own),) = engine.read_synchronously(prepared, decoder, [1])
    assert prompt == 1
    assert np.array_equal(own, rows[1])
    with harvest.open_shard(tmp_path / "run" / "shards" / "shard_00000.zarr.zip") as shard:
        assert torch.equal(shard["prompt_0"], torch.from_numpy(rows[0]).view(torch.bfloat16))
    ids = torch.from_numpy(prepared.tokens.of(0).astype(np.int64))[None]
    hidden = decoder.module(input_ids=ids, output_hidden_states=True).hidden_states
    # transformers hands out the last block's stream after the final norm.
    plain = torch.stack([hidden[layer + 1][0] for layer in case.layers[:-1]])
    read = torch.from_numpy(rows[0][:-1]).view(torch.bfloat16).float()
    torch.testing.assert_close(read, plain, rtol=0.02, atol=0.02)


def test_stream_runs_all_ways_on_the_same_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, checkpoint = tmp_path / "stream.json", tmp_path / "checkpoint"
    arguments = ["--blocks", "4", "--hidden", "64", "--batches", "10", "--batch-tokens", "70", "--prompt-tokens", "35", "--share", "0.8"]
    arguments += ["--caches", "short", "--rounds", "1", "--threads", "1", "--checkpoint", str(checkpoint)]
    arguments += ["--out", str(tmp_path / "work"), "--json", str(file)]
    assert module("stream").main(arguments) == 0
    measured = json.loads(file.read_text())
    check_head(measured, "stream", *arguments)
    assert (measured["n_batches"], measured["n_prompts"], measured["tokens"], measured["n_windows"]) == (10, 20, 700, 1)
    assert (measured["failed"], measured["is_same"], measured["is_sound"]) == ({}, True, True)
    files = sorted(checkpoint.glob("*.safetensors"))
    assert measured["files"] == len(files) > 3
    blocks = [tensor for name, tensor in module("harvest.model.checkpoint").find_tensors(files).items() if ".layers." in name]

    by_way = {entry["way"]: entry for entry in measured["measurements"]}
    assert list(by_way) == ["stream", "offload", "resident", "feed"]
    assert "streamed" in by_way["stream"]["weights"]
    assert all(place in by_way["offload"]["weights"] for place in ("on cpu", "on disk"))
    assert by_way["feed"]["weight_bytes"] == sum(tensor.n_bytes for tensor in blocks)
    for entry in by_way.values():
        assert entry["wall_s"] > entry["seconds"] > 0
        assert entry["anon_bytes"] > 50e6
        assert entry["mapped_bytes"] > 1e6
        assert entry["read_bytes"] >= 0
    assert measured["is_cold"] == all(entry["cached_before"] < 0.01 for entry in by_way.values())

    summary = {entry["way"]: entry for entry in measured["summary"]}
    assert summary["offload"]["of_stream"] == by_way["offload"]["seconds"] / by_way["stream"]["seconds"]
    bound_s = max(by_way["feed"]["read_s"], by_way["resident"]["seconds"])
    assert (summary["stream"]["bound_s"], summary["stream"]["of_bound"]) == (bound_s, by_way["stream"]["seconds"] / bound_s)
    page = capsys.readouterr().out
    assert "| `--weights stream` | short |" in page
    assert ("THE CACHE WAS NOT EMPTY" in page) == (not measured["is_cold"])
    assert "**WRONG VALUES" in module("report").render(measured | {"is_same": False})
    assert not list((tmp_path / "work").iterdir())
    with pytest.raises(SystemExit, match="a model of other sizes"):
        module("stream").main(["--blocks", "3", "--hidden", "64", "--checkpoint", str(checkpoint)])


def test_a_short_cache_keeps_what_was_read_last(tmp_path: Path) -> None:
    cold = module("cold")
    paths = [tmp_path / f"{number}.bin" for number in range(4)]
    for path in paths:
        path.write_bytes(bytes(1 << 20))
    cold.flush(paths)
    assert cold.cached_share(paths) == 1
    cold.drop(paths)
    if cold.cached_share(paths) > 0:
        pytest.skip("the cache of this file system cannot be dropped")
    short = cold.Short(paths, 2 << 20)
    for path in [*paths, paths[0]]:
        path.read_bytes()
        short.look()
    # Read twice, the first file is in it again: the third is not.
    assert [cold.cached_share([path]) for path in paths] == [1, 0, 0, 1]
    with cold.Short(paths, 0):
        deadline = time.monotonic() + 60
        while cold.cached_share(paths) > 0 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert cold.cached_share(paths) == 0


def test_report_makes_one_page_of_all(tmp_path: Path) -> None:
    summary = {
        "prompts": 40,
        "tokens": 99,
        "shards": 2,
        "wall_s": 1.0,
        "run_s": 0.5,
        "tokens_per_s": 198.0,
        "peak_bytes": 4e8,
        "bytes": 1000,
    }
    for name, prompts in (("a", 40), ("b", 4000)):
        measured = module("measuring").begin("scaling", ["--counts", str(prompts)])
        measured |= {"threads": 2, "rounds": 1, "failed": {}, "summary": [summary | {"prompts": prompts}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(measured))
    page = tmp_path / "BENCHMARKS.md"
    assert module("report").main([str(tmp_path / "b.json"), str(tmp_path / "a.json"), "--out", str(page)]) == 0
    text = page.read_text()
    assert text.index("| 4,000 |") < text.index("| 40 |")
    assert "    python scripts/bench scaling --counts 4000" in text
    assert "numpy " in text


def test_the_list_at_the_top_names_every_file_and_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("bench_main", BENCH / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    listed = {line.split()[0] for line in (main.__doc__ or "").splitlines() if line.strip().split(" ")[0].endswith(".py")}
    files = {path.name for path in BENCH.glob("*.py")} - {"__main__.py"}
    assert listed == files
    for arguments in (["--gpu", "--help"], *([name, "--help"] for name in main._COMMANDS)):
        with pytest.raises(SystemExit) as ended:
            main.main(arguments)
        assert ended.value.code == 0
    assert "was not run on a card yet" in capsys.readouterr().out
    for name in files:
        assert len((BENCH / name).read_text().splitlines()) < 300
