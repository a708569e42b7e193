"""A store that fails, is slow, goes away, or is not for this user; and a run that is stopped while it uploads."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import read_96, tiny_request, wait_for

import harvest
from cloud.conftest import Server, free_port
from cloud.proxy import Fault, Proxy
from harvest.contract import HarvestJob
from harvest.errors import FolderError, RequestError, StorageError
from harvest.output.staged import open_folder
from harvest.progress import Silent
from harvest.reading.fetch import fetch
from harvest.reading.verify import verify

pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def endpoint(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)


def shards_here(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("shard_*.zip"))


def test_errors_of_the_server_and_cut_connections_are_tried_again(proxy: Proxy, tmp_path: Path) -> None:
    seen: dict[str, int] = {}

    def fail_twice(asked: str) -> Fault:
        seen[asked] = seen.get(asked, 0) + 1
        return [Fault(status=500), Fault(cuts=True), Fault()][min(seen[asked], 3) - 1]

    proxy.fault = fail_twice
    job = harvest.run(tiny_request(shard_size=4), "s3://bucket/fails-twice")
    assert sum(count > 2 for asked, count in seen.items() if asked.startswith("PUT")) >= 8, "each file that was written"
    proxy.fault = lambda _asked: Fault()
    fetch(job, tmp_path / "got")
    assert verify(tmp_path / "got").is_sound


@pytest.mark.parametrize("how", ["gone", "silent", "failing"])
def test_a_store_that_goes_away_ends_the_run_in_time_and_the_same_command_goes_on(
    how: str, proxy: Proxy, rclone: Server, tmp_path: Path
) -> None:
    url, request = f"s3://bucket/{how}", tiny_request(shard_size=2)

    def go(asked: str) -> Fault:
        if re.search("PUT.*/shards/shard_0000[1-4]", asked):
            proxy.fault = lambda _asked: Fault(cuts=True) if how == "gone" else Fault(hangs=True) if how == "silent" else Fault(status=503)
            return proxy.fault(asked)
        return Fault()

    proxy.fault = go
    started = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot be reached|failed again and again") as raised:
        harvest.run(request, open_folder(url, retry_s=1))
    assert time.monotonic() - started < 20
    assert url in str(raised.value)
    assert len(str(raised.value)) < 600
    there = {name for name in rclone.files(how) if name.startswith("shards/")}
    here = shards_here(tmp_path)
    assert len(here) + len([name for name in rclone.files(how) if name.startswith("records/shard_")]) == 5, "nothing is lost"
    assert there < {f"shards/{path.name}" for path in here} | {"shards/shard_00000.zarr.zip"}
    proxy.fault = lambda _asked: Fault()
    job = harvest.run(request, url)
    assert job.result is not None
    assert job.result.timings.forward_s == 0, "nothing is computed twice"
    assert not shards_here(tmp_path)
    fetch(job, tmp_path / "got")
    assert verify(tmp_path / "got").is_sound


class NoModel(Silent):
    """Fails where a model would be loaded."""

    def begin(self, n_tokens: int, n_done: int) -> None:
        raise AssertionError("the model was loaded")


@pytest.mark.parametrize(
    ("url", "variables", "said"),
    [
        ("s3://nobucket/x", {}, "there is no bucket nobucket; create it"),
        ("s3://bucket/x", {"AWS_SECRET_ACCESS_KEY": "wrong"}, "the credentials are not those of the store"),
        ("s3://bucket/x", {"AWS_ACCESS_KEY_ID": "nobody"}, "the credentials are not those of the store"),
        ("s3://bucket/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:{port}"}, "the store cannot be reached"),
    ],
)
def test_a_store_that_is_not_there_or_not_for_this_user_is_found_before_the_model_loads(
    url: str, variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(port=free_port()))
    with pytest.raises(FolderError, match=f"out: {url}: {said}"):
        harvest.run(tiny_request(), open_folder(url, retry_s=1), reporter=NoModel())


def test_a_place_that_may_be_read_and_not_written_is_found_before_the_model_loads(proxy: Proxy) -> None:
    proxy.fault = lambda asked: Fault(status=403) if asked.startswith("PUT") else Fault()
    with pytest.raises(StorageError, match="not allowed to do this"):
        harvest.run(tiny_request(), "s3://bucket/readonly", reporter=NoModel())


def test_without_obstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(RequestError, match=r"pip install 'harvest\[cloud\]'"):
        harvest.run(tiny_request(), "s3://bucket/x")


def command(url: str, *options: str) -> list[str]:
    prompts = str(Path(__file__).parent.parent / "data" / "prompts-96.jsonl")
    run = ["run", "--model", "tiny", "--prompts", prompts, "--layers", "all", "--shard-size", "10", "--out", url]
    return [sys.executable, "-m", "harvest", *run, *options]


@pytest.mark.parametrize(
    ("number", "code", "silent"),
    [(signal.SIGTERM, 143, "/shards/shard_0000[^0]"), (signal.SIGINT, 130, "/shards/shard_0000[^0]"), (signal.SIGTERM, 143, "/stats")],
)
def test_a_signal_while_the_store_is_silent_ends_the_run_within_seconds(
    number: signal.Signals, code: int, silent: str, proxy: Proxy, rclone: Server, tmp_path: Path
) -> None:
    name = f"{number.name}-{silent[1:6]}"
    url = f"s3://bucket/{name}"
    proxy.fault = lambda asked: Fault(hangs=True) if re.search(f"PUT.*{silent}", asked) else Fault()
    process = subprocess.Popen(command(url), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: [asked for asked in proxy.writes() if re.search(silent, asked)])
        wait_for(lambda: "records/shard_00000.json" in rclone.files(name))
        process.send_signal(number)
        sent = time.monotonic()
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert time.monotonic() - sent < 10
    assert process.returncode == code, said
    assert "of 10 shards are finished" in said
    assert "Traceback" not in said
    assert HarvestJob.model_validate_json(rclone.files(name)["job.json"]).status == "cancelled"
    proxy.fault = lambda _asked: Fault()
    assert harvest.run(tiny_request(read_96(), shard_size=10), url).status == "done"
    assert not shards_here(tmp_path)


def test_a_killed_run_goes_on(proxy: Proxy, rclone: Server, tmp_path: Path) -> None:
    url = "s3://bucket/killed"
    proxy.fault = lambda asked: Fault(delay_s=0.2) if "PUT" in asked else Fault()
    process = subprocess.Popen(command(url), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len([name for name in rclone.files("killed") if name.startswith("records/shard")]) >= 2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    proxy.fault = lambda _asked: Fault()
    shown = subprocess.run([sys.executable, "-m", "harvest", "status", url], capture_output=True, text=True, timeout=60)
    assert json.loads(shown.stdout)["status"] == "failed"
    assert "ended without a word" in json.loads(shown.stdout)["error"]
    assert harvest.run(tiny_request(read_96(), shard_size=10), url).status == "done"
    fetched = subprocess.run([sys.executable, "-m", "harvest", "fetch", url, str(tmp_path / "got")], capture_output=True, text=True)
    assert fetched.returncode == 0, fetched.stderr
    assert verify(tmp_path / "got").is_sound
    assert not shards_here(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--out-root", "s3://bucket/runs"], "a run in an object store is named itself"),
        (["--out", "run1", "--keep-local"], "with an object store alone"),
        (["--out", "s3://nobucket/x", "--retry-s", "1"], "there is no bucket nobucket"),
    ],
)
def test_a_command_that_cannot_be_run_ends_with_2(options: list[str], said: str) -> None:
    run = [sys.executable, "-m", "harvest", "run", "--model", "tiny", "--config", os.devnull, *options]
    prompts = str(Path(__file__).parent.parent / "data" / "prompts-96.jsonl")
    run = [*run[:6], "--prompts", prompts, *options]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert said in ended.stderr
