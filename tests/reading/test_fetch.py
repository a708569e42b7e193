"""A job's files downloaded by its links, from servers that work and from servers that do not."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fileserver import FileServer

import harvest
from harvest.contract import HarvestJob
from harvest.control import status
from harvest.errors import CancelledError, DownloadError, FolderError, RequestError
from harvest.output.folder import RunFolder
from harvest.progress import Silent
from harvest.reading.export import export_safetensors
from harvest.reading.fetch import fetch, read_answer
from harvest.stop import StopFlag

FIRST = "shard_00000.safetensors"
PARTIAL = "shard_00000.tmp-part.safetensors"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of this machine is none for servers on it."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture(scope="session")
def exported(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of tiny_run as the API has them. Not to be written to."""
    folder = tmp_path_factory.mktemp("exported") / "api"
    export_safetensors(harvest.open(tiny_run), folder)
    return folder


@pytest.fixture
def server(exported: Path) -> Iterator[FileServer]:
    with FileServer(exported) as running:
        yield running


def served(server: FileServer, tiny_run: Path, **links: Any) -> HarvestJob:
    """The job of tiny_run with links to a server of its files, of whichever kind they are."""
    job = harvest.open(tiny_run).job
    assert job is not None
    assert job.result is not None
    keys = [entry["key"] for entry in json.loads((server.folder / "manifest.json").read_text())["shards"]]
    fresh = {
        "manifest_url": server.link("manifest.json"),
        "stats_url": server.link("stats.safetensors"),
        "shard_urls": [server.link(key.rpartition("harvest/")[2]) for key in keys],
    }
    return job.model_copy(update={"result": job.result.model_copy(update=fresh | links)})


def assert_same(fetched: Path, tiny_run: Path) -> None:
    """A fetched folder of either kind holds just what the run holds."""
    run, copy = harvest.open(tiny_run), harvest.open(fetched)
    assert copy.n_prompts == run.n_prompts
    for i in range(run.n_prompts):
        assert copy.prompt(i).dtype == torch.bfloat16
        assert torch.equal(copy.prompt(i), run.prompt(i))
        assert torch.equal(copy.token_ids(i), run.token_ids(i))
    assert torch.equal(copy.stats.mean, run.stats.mean)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_export_fetch_and_read_give_the_very_same_tensors(server: FileServer, tiny_run: Path, tmp_path: Path) -> None:
    job = fetch(served(server, tiny_run), tmp_path / "got")
    assert_same(tmp_path / "got", tiny_run)
    assert names(tmp_path / "got") == [
        "job.json",
        "manifest.json",
        *(f"shard_0000{index}.safetensors" for index in range(3)),
        "stats.safetensors",
    ]
    for name in ("manifest.json", FIRST, "stats.safetensors"):
        assert (tmp_path / "got" / name).read_bytes() == (server.folder / name).read_bytes()
    written = (tmp_path / "got" / "job.json").read_text()
    assert "SECRET" not in written
    assert json.loads(written)["result"]["shard_urls"][0] == (tmp_path / "got" / FIRST).as_uri()
    assert status(RunFolder(tmp_path / "got")).result == job.result == HarvestJob.model_validate_json(written).result


def test_harvest_s_own_files_are_fetched_too(tiny_run: Path, tmp_path: Path) -> None:
    with FileServer(tiny_run) as server:
        server.faults["shard_00001.zarr.zip"] = [("cut", 3000)]
        fetch(served(server, tiny_run), tmp_path / "got")
    assert_same(tmp_path / "got", tiny_run)
    shards = [f"shards/shard_0000{index}.zarr.zip" for index in range(3)]
    assert names(tmp_path / "got") == ["job.json", "manifest.json", *shards, "stats.safetensors"]
    assert (tmp_path / "got" / shards[1]).read_bytes() == (tiny_run / shards[1]).read_bytes()


def test_the_api_s_keys_begin_in_its_own_storage(exported: Path, tiny_run: Path, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    manifest = json.loads((exported / "manifest.json").read_text())
    for entry in manifest["shards"]:
        (storage / entry["key"]).symlink_to(exported / entry["key"])
        entry["key"] = f"some/prefix/harvest/{entry['key']}"
    (storage / "stats.safetensors").symlink_to(exported / "stats.safetensors")
    (storage / "manifest.json").write_text(json.dumps(manifest))
    with FileServer(storage) as server:
        fetch(served(server, tiny_run), tmp_path / "got")
    assert_same(tmp_path / "got", tiny_run)
    assert FIRST in names(tmp_path / "got")


@pytest.mark.parametrize("kind", ["cut", "reset"])
def test_a_connection_that_breaks_is_taken_up_where_it_broke(kind: str, server: FileServer, tiny_run: Path, tmp_path: Path) -> None:
    server.faults[FIRST] = [(kind, 5000), (kind, 2500)]
    server.faults["manifest.json"] = [(kind, 100)]
    fetch(served(server, tiny_run), tmp_path / "got")
    assert_same(tmp_path / "got", tiny_run)
    given = server.ranges_of(FIRST)
    assert len(given) == 3
    assert given[0] is None
    # What a reset leaves behind is up to the network; never more than was sent.
    if kind == "cut":
        assert given[1:] == ["bytes=5000-", "bytes=7500-"]


def test_a_connection_that_always_breaks_is_an_error_and_the_next_fetch_goes_on(server: FileServer, tiny_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "got"
    # It gets further four times, then no more: the tries are counted anew where a try brought something.
    server.faults[FIRST] = [("cut", 1000)] * 4 + [("cut", 0)] * 3
    with pytest.raises(DownloadError, match=r"shard_00000\.safetensors: the connection failed 4 times \(4,000 of [\d,]+ bytes came\)"):
        fetch(served(server, tiny_run), out)
    assert names(out) == ["copying.json", PARTIAL, "stats.safetensors"]
    assert (out / PARTIAL).read_bytes() == (server.folder / FIRST).read_bytes()[:4000]
    server.requests.clear()
    fetch(served(server, tiny_run), out)
    assert server.ranges_of(FIRST) == ["bytes=4000-"]
    assert server.ranges_of("stats.safetensors") == []
    assert_same(out, tiny_run)
    assert not {"copying.json", PARTIAL} & set(names(out))


def test_a_server_that_knows_no_ranges_sends_the_file_anew(exported: Path, tiny_run: Path, tmp_path: Path) -> None:
    with FileServer(exported, ranges=False) as server:
        server.faults[FIRST] = [("cut", 5000), ("cut", 200)]
        fetch(served(server, tiny_run), tmp_path / "got")
        assert server.ranges_of(FIRST) == [None, "bytes=5000-", "bytes=200-"]
    assert_same(tmp_path / "got", tiny_run)


@pytest.mark.parametrize("content_range", ["bytes 0-99/100", "bytes 5000-9999/20000", "5000-", "bytes 4999-20000/*", ""])
def test_a_range_that_was_not_asked_for_is_not_taken(content_range: str, server: FileServer, tiny_run: Path, tmp_path: Path) -> None:
    server.faults[FIRST] = [("cut", 5000), ("range", content_range)]
    fetch(served(server, tiny_run), tmp_path / "got")
    assert server.ranges_of(FIRST) == [None, "bytes=5000-", None]
    assert_same(tmp_path / "got", tiny_run)


@pytest.mark.parametrize("more", [b"", b"of another file"], ids=["whole", "longer"])
def test_a_file_that_is_there_in_full_under_its_temporary_name(more: bytes, server: FileServer, tiny_run: Path, tmp_path: Path) -> None:
    server.faults["stats.safetensors"] = [("status", 404)]
    with pytest.raises(DownloadError):
        fetch(served(server, tiny_run), tmp_path / "got")
    (tmp_path / "got" / PARTIAL).write_bytes((server.folder / FIRST).read_bytes() + more)
    fetch(served(server, tiny_run), tmp_path / "got")
    assert_same(tmp_path / "got", tiny_run)
    assert len(server.ranges_of(FIRST)) == (2 if more else 1)


@pytest.mark.parametrize("code", [403, 404, 410, 400])
def test_a_link_that_is_refused_says_what_to_do(code: int, server: FileServer, tiny_run: Path, tmp_path: Path) -> None:
    server.faults["shard_00001.safetensors"] = [("status", code)]
    with pytest.raises(DownloadError) as caught:
        fetch(served(server, tiny_run), tmp_path / "got")
    assert re.search(rf"shard_00001\.safetensors: the link was refused \({code} .*work 7 days.*ask for the job again", str(caught.value))
    assert "SECRET" not in str(caught.value)
    assert len(server.ranges_of("shard_00001.safetensors")) == 1
    assert names(tmp_path / "got") == ["copying.json", FIRST, "shard_00001.tmp-part.safetensors", "stats.safetensors"]
    # Fetched with a new answer, whose links work, it goes on.
    fetch(served(server, tiny_run), tmp_path / "got")
    assert len(server.ranges_of(FIRST)) == 1
    assert_same(tmp_path / "got", tiny_run)


@pytest.mark.parametrize("code", [500, 503, 429, 408])
def test_a_server_that_says_later_is_asked_again(code: int, server: FileServer, tiny_run: Path, tmp_path: Path) -> None:
    server.faults["manifest.json"] = [("status", code)]
    server.faults[FIRST] = [("status", code), ("cut", 10), ("status", code)]
    fetch(served(server, tiny_run), tmp_path / "got")
    assert_same(tmp_path / "got", tiny_run)


def test_a_redirect_leads_to_another_server_but_never_to_a_file(server: FileServer, tiny_run: Path, tmp_path: Path) -> None:
    server.faults["manifest.json"] = [("to", server.link("manifest.json"))]
    server.faults[FIRST] = [("to", (tiny_run / "job.json").as_uri())]
    with pytest.raises(DownloadError, match=r"shard_00000\.safetensors: the link was refused \(302"):
        fetch(served(server, tiny_run), tmp_path / "got")
    assert FIRST not in names(tmp_path / "got")


def test_a_file_of_unknown_length_is_not_taken(server: FileServer, tiny_run: Path, tmp_path: Path) -> None:
    server.faults[FIRST] = [("endless",)]
    with pytest.raises(DownloadError, match="does not say how long the file is"):
        fetch(served(server, tiny_run), tmp_path / "got")


def test_bytes_that_the_manifest_does_not_tell_of_are_thrown_away(tiny_run: Path, tmp_path: Path) -> None:
    with FileServer(tiny_run) as server:
        swapped = served(server, tiny_run, shard_urls=[server.link(f"shards/shard_0000{index}.zarr.zip") for index in (1, 0, 2)])
        with pytest.raises(DownloadError, match="its bytes are not those that the manifest tells of"):
            fetch(swapped, tmp_path / "got")
        assert names(tmp_path / "got") == ["copying.json", "stats.safetensors"]
        fetch(served(server, tiny_run), tmp_path / "got")
    assert_same(tmp_path / "got", tiny_run)


def test_links_to_files_of_this_machine(tiny_run: Path, tmp_path: Path) -> None:
    job = harvest.open(tiny_run).job
    assert job is not None
    fetch(job, tmp_path / "with space")
    assert_same(tmp_path / "with space", tiny_run)
    again = harvest.open(tmp_path / "with space").job
    assert again is not None
    assert "with%20space" in again.result.manifest_url
    fetch(again, tmp_path / "again")
    assert_same(tmp_path / "again", tiny_run)
    (tmp_path / "with space" / "stats.safetensors").unlink()
    with pytest.raises(DownloadError, match=r"with space/stats\.safetensors: cannot be read .*harvest status DIR"):
        fetch(again, tmp_path / "third")


def test_a_job_that_was_fetched_is_answered_without_its_links(server: FileServer, tiny_run: Path, tmp_path: Path) -> None:
    job = served(server, tiny_run)
    fetch(job, tmp_path / "got")
    server.requests.clear()
    assert fetch(job, tmp_path / "got").result.manifest_url == (tmp_path / "got" / "manifest.json").as_uri()
    assert server.requests == []
    (tmp_path / "got" / FIRST).unlink()
    fetch(job, tmp_path / "got")
    assert {name for name, _ in server.requests} == {"manifest.json", FIRST}
    assert_same(tmp_path / "got", tiny_run)


class StopsAt(Silent):
    """Asks for a stop, or is stopped hard, when so many bytes have come."""

    def __init__(self, n_bytes: int, stop: StopFlag | None) -> None:
        self._left, self._stop = n_bytes, stop

    def advance(self, n_tokens: int) -> None:
        self._left -= n_tokens
        if self._left <= 0:
            if self._stop is None:
                raise KeyboardInterrupt
            self._stop.ask(CancelledError("stopped"))


@pytest.mark.parametrize("flag", [True, False], ids=["stop", "interrupt"])
def test_a_fetch_that_is_stopped_goes_on_later(flag: bool, server: FileServer, tiny_run: Path, tmp_path: Path) -> None:
    stop = StopFlag() if flag else None
    server.faults[FIRST] = [("cut", 5000)]
    with pytest.raises(CancelledError, match="stopped"):
        fetch(served(server, tiny_run), tmp_path / "got", StopsAt(6000, stop), stop)
    assert names(tmp_path / "got") == ["copying.json", PARTIAL, "stats.safetensors"]
    fetch(served(server, tiny_run), tmp_path / "got")
    assert_same(tmp_path / "got", tiny_run)


def fetch_command(*arguments: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harvest", "fetch", *map(str, arguments)], capture_output=True, text=True, timeout=60, **more
    )


def test_a_fetch_that_is_killed_goes_on_where_it_was(server: FileServer, tiny_run: Path, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(served(server, tiny_run).to_json())
    server.faults[FIRST] = [("hold", 9000)]
    partial = tmp_path / "got" / PARTIAL
    with subprocess.Popen(
        [sys.executable, "-m", "harvest", "fetch", "job.json", "got"], cwd=tmp_path, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert server.held.wait(60)
            # While one works on the folder, another is kept out of it.
            kept_out = fetch_command("job.json", "got", cwd=tmp_path)
            assert (kept_out.returncode, kept_out.stdout) == (2, "")
            assert f"process {process.pid}" in kept_out.stderr
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "got" / FIRST).exists()
    n_bytes = partial.stat().st_size
    server.requests.clear()
    done = fetch_command("job.json", "got", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert server.ranges_of(FIRST) == [f"bytes={n_bytes}-" if n_bytes else None]
    assert_same(tmp_path / "got", tiny_run)
    assert "1 of 4 files are there already, and 1 in part" in done.stderr


# Files may not grow over 10,000 bytes, then the command.
FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
from harvest.cli import main
main()
"""


def test_a_full_disk_leaves_no_half_file_and_the_next_fetch_goes_on(exported: Path, tiny_run: Path, tmp_path: Path) -> None:
    with FileServer(exported) as server:
        job = served(server, tiny_run).to_json()
        failed = subprocess.run(
            [sys.executable, "-c", FULL_DISK, "fetch", "-", "got"], input=job, capture_output=True, text=True, cwd=tmp_path
        )
        assert failed.returncode == 1
        assert "shard_00000.safetensors: cannot be written (File too large)" in failed.stderr
        assert "Traceback" not in failed.stderr
        assert names(tmp_path / "got") == ["copying.json", PARTIAL, "stats.safetensors"]
        fetch(served(server, tiny_run), tmp_path / "got")
        assert server.ranges_of(FIRST)[1:] == ["bytes=10000-"]
    assert_same(tmp_path / "got", tiny_run)


def change(manifest: dict[str, Any], **first: Any) -> dict[str, Any]:
    manifest["shards"][0] |= first
    return manifest


@pytest.mark.parametrize(
    "key",
    [
        "",
        "..",
        "a/..",
        "../..",
        "manifest.json",
        "harvest/stats.safetensors",
        "job.json",
        "a\\shard_0.x",
        "shard_0\0.x",
        "shard_0.tmp-part.x",
    ],
)
@pytest.mark.parametrize("kind", ["api", "own"])
def test_a_key_that_is_no_place_for_a_shard(key: str, kind: str, exported: Path, tiny_run: Path, tmp_path: Path) -> None:
    source = exported if kind == "api" else tiny_run
    manifest = json.loads((source / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with FileServer(tmp_path) as server:
        job = served(server, tiny_run)
        (tmp_path / "manifest.json").write_text(json.dumps(change(manifest, key=key)))
        with pytest.raises(DownloadError, match=r"the shard key .* was given"):
            fetch(job, tmp_path / "got")
    assert not (tmp_path / "got").exists()


@pytest.mark.parametrize("key", ["/tmp/shards/shard_00000.zarr.zip", "shards/../../shard_00000.zarr.zip", "records/shard_00000.zarr.zip"])
def test_harvest_s_own_keys_lie_below_shards_alone(key: str, tiny_run: Path, tmp_path: Path) -> None:
    manifest = change(json.loads((tiny_run / "manifest.json").read_text()), key=key)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with FileServer(tmp_path) as server, pytest.raises(DownloadError, match="harvest's own begin with shards/ alone"):
        fetch(served(server, tiny_run), tmp_path / "got")


def test_two_shards_of_one_name_are_refused(exported: Path, tiny_run: Path, tmp_path: Path) -> None:
    manifest = change(json.loads((exported / "manifest.json").read_text()), key="elsewhere/shard_00001.safetensors")
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with FileServer(tmp_path) as server, pytest.raises(DownloadError, match="a name of its own"):
        fetch(served(server, tiny_run), tmp_path / "got")


def test_a_manifest_that_is_none_or_of_another_job(exported: Path, tiny_run: Path, tmp_path: Path) -> None:
    manifest = json.loads((exported / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with FileServer(tmp_path) as server:
        job = served(server, tiny_run)
        for body, message in [
            ("<html>", "is no manifest of layout 2 .*the document: Invalid JSON"),
            (json.dumps(manifest | {"layout_version": 1}), "is no manifest of layout 2 .layout_version: Input should be 2"),
            (json.dumps(manifest | {"shards": manifest["shards"][:2]}), "lists 2 shards, and the job has 3 links of 3 shards"),
        ]:
            (tmp_path / "manifest.json").write_text(body)
            with pytest.raises(DownloadError, match=message):
                fetch(job, tmp_path / "got")
    assert not (tmp_path / "got").exists()


def test_a_folder_of_something_else_is_refused(server: FileServer, tiny_run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FolderError, match="is not empty, and what it holds is no copy of this run"):
        fetch(served(server, tiny_run), tmp_path)
    with pytest.raises(FolderError, match="is a file"):
        fetch(served(server, tiny_run), tmp_path / "mine.txt")
    other = tmp_path / "other"
    export_safetensors(harvest.open(tiny_run), other)
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps(manifest | {"run_id": "00000000-0000-0000-0000-000000000000"}))
    with pytest.raises(FolderError, match="holds another run"):
        fetch(served(server, tiny_run), other)
    (other / "manifest.json").write_text("{}")
    with pytest.raises(FolderError, match="holds another run"):
        fetch(served(server, tiny_run), other)


LINK = "https://example.org/manifest.json"

# What stands in JOB.json, as changes to a job that is done, or as its text; and what is said of it.
BAD_JOBS: list[tuple[dict[str, Any] | str, str]] = [
    ({"status": "running", "result": None}, "is running and has no files yet to fetch; ask for it again until it is done"),
    ({"status": "failed", "result": None, "error": "no space left"}, "is failed and has no files yet to fetch; it failed: no space left"),
    ({"status": "cancelled", "result": None}, "it was cancelled"),
    (
        {"result": {"manifest_url": "ftp://example.org/m"}},
        "result: the link 'ftp://example.org/m' was given; allowed are http, https and file",
    ),
    ({"result": {"manifest_url": "manifest.json"}}, "the link 'manifest.json' was given"),
    ({"result": {"manifest_url": "file://elsewhere/manifest.json"}}, "the link 'file://elsewhere/manifest.json' was given"),
    ({"result": {"manifest_url": "http://"}}, "the link 'http://' was given"),
    ({"result": {"manifest_url": "http://example.org:port/"}}, "the link 'http://example.org:port/' was given"),
    ({"result": {"manifest_url": "http://[::1/"}}, "was given; allowed are"),
    ({"result": {"stats_url": "https://example.org/a b"}}, "the link 'https://example.org/a b' was given"),
    ({"result": {"shard_urls": [LINK, "https://example.org/é"]}}, "with what is not ASCII escaped"),
    ({"job_id": "7"}, "job_id: '7' was given"),
    ({"result": {"shard_urls": None}}, "result: None was given"),
    ("[1]", "[1] was given, where an object with job_id, run_id"),
    ('{"error": "not found"}', "job_id: is required and was not given"),
    ("{", "is not JSON that can be read"),
    ("\udcff", "is not JSON that can be read"),
    ("[" * 100_000, "is not JSON that can be read"),
]


@pytest.mark.parametrize(("given", "message"), BAD_JOBS, ids=[message[:50] for _, message in BAD_JOBS])
def test_a_job_that_cannot_be_fetched(given: dict[str, Any] | str, message: str, tiny_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    if isinstance(given, str):
        path.write_text(given, errors="surrogateescape")
    else:
        job = json.loads((tiny_run / "job.json").read_text())
        result = (
            given.get("result", {}) and job["result"] | {"manifest_url": LINK, "stats_url": LINK, "shard_urls": [LINK]} | given["result"]
        )
        path.write_text(json.dumps(job | given | {"result": result}))
    with pytest.raises(RequestError) as caught:
        fetch(read_answer(path), tmp_path / "got")
    assert message in str(caught.value)
    assert not (tmp_path / "got").exists()


def test_keys_that_are_not_known_yet_are_no_hindrance(tiny_run: Path, tmp_path: Path) -> None:
    body = json.loads((tiny_run / "job.json").read_text())
    body["later"] = body["result"]["later"] = body["result"]["timings"]["later"] = 1
    (tmp_path / "job.json").write_text(json.dumps(body), encoding="utf-8-sig")
    fetch(read_answer(tmp_path / "job.json"), tmp_path / "got")
    assert set(json.loads((tmp_path / "got" / "job.json").read_text())) == set(body) - {"later"}


def test_the_command_prints_the_job_and_says_how_far_it_is(server: FileServer, tiny_run: Path, tmp_path: Path) -> None:
    job = served(server, tiny_run).to_json()
    done = fetch_command("-", tmp_path / "got", input=job)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["result"]["manifest_url"] == (tmp_path / "got" / "manifest.json").as_uri()
    assert re.fullmatch(r"harvest: [\d.]+ kB of 147 kB, [\d.]+ [kM]?B/s(, .* left)?\n", done.stderr)
    again = fetch_command("-", tmp_path / "got", "--quiet", input=job)
    assert (again.returncode, again.stderr, json.loads(again.stdout)["status"]) == (0, "", "done")
    server.faults["manifest.json"] = [("status", 403)]
    failed = fetch_command("-", tmp_path / "got2", input=job)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "links of a job work 7 days" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert (fetch_command("nowhere.json", "got", cwd=tmp_path).returncode, names(tmp_path / "got")[0]) == (2, "job.json")


def test_fetching_needs_neither_torch_nor_zarr(tiny_run: Path, tmp_path: Path) -> None:
    program = "import sys; sys.modules['torch'] = sys.modules['zarr'] = None; from harvest.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "fetch", str(tiny_run / "job.json"), str(tmp_path / "got")], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "got", tiny_run)


# What a user of the API writes, from its reference alone: nothing here knows of harvest.
CLIENT = """
import io, json, sys
from urllib.request import urlopen
from safetensors.torch import load

job = json.load(open("job.json"))
assert job["status"] == "done", job.get("error")
result = job["result"]
assert result["contents"] == "activations"
manifest = json.load(urlopen(result["manifest_url"]))
stats = load(urlopen(result["stats_url"]).read())
found = {}
for number, link in enumerate(result["shard_urls"]):
    shard = load(urlopen(link).read())
    for i in manifest["shards"][number]["prompt_indices"]:
        rows, ids = shard[f"prompt_{i}"], shard[f"tokens_{i}"]
        assert rows.shape[0] == len(job["layers"]) == len(stats["mean"]) and rows.shape[1] == len(ids)
        found[i] = {"text": manifest["prompts"][i], "ids": ids.tolist(), "sums": rows.double().sum(dim=(1, 2)).tolist()}
assert len(found) == job["n_prompts"] == manifest["n_prompts"] and sum(len(f["ids"]) for f in found.values()) == result["tokens"]
json.dump(found, sys.stdout)
"""


def test_a_client_of_the_api_reads_an_exported_job(server: FileServer, tiny_run: Path, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(served(server, tiny_run).to_json())
    done = subprocess.run([sys.executable, "-c", CLIENT], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run, found = harvest.open(tiny_run), json.loads(done.stdout)
    for i in range(run.n_prompts):
        sums = run.prompt(i).double().sum(dim=(1, 2)).tolist()
        assert found[str(i)] == {"text": run.text(i), "ids": run.token_ids(i).tolist(), "sums": sums}
