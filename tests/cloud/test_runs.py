"""Runs whose files go to an S3 server on this machine: what lies there, what stays here, and what is answered."""

import http.client
import json
import re
import urllib.parse
from datetime import timedelta
from pathlib import Path

import jsonschema
import pytest
from conftest import DATA, tiny_request

import harvest
from cloud.conftest import Server
from cloud.proxy import Fault, Proxy
from harvest.asked import find_answer
from harvest.contract import HarvestJob, utc_now
from harvest.control import cancel, status
from harvest.errors import FolderError, NotARunError, RequestError, StorageError
from harvest.output.folder import RunFolder
from harvest.output.staged import open_folder
from harvest.output.store import Store
from harvest.output.upload import MOST_WAITING
from harvest.parts import Part
from harvest.progress import Silent
from harvest.reading.fetch import fetch
from harvest.reading.verify import verify

pytest.importorskip("obstore")


class Notes(Silent):
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def all(self) -> str:
        return "\n".join(self.notes)


def get(link: str) -> tuple[int, bytes]:
    """Status and body of what a link answers without any key."""
    parts = urllib.parse.urlsplit(link)
    connection = http.client.HTTPConnection(parts.netloc)
    connection.request("GET", f"{parts.path}?{parts.query}")
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def move_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str = "elsewhere") -> None:
    """Go on as on another machine, with nothing there yet."""
    monkeypatch.setenv("HARVEST_CACHE", str(tmp_path / name))


def test_the_files_in_the_store_are_those_of_a_local_run(
    rclone: Server, tiny_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone.endpoint)
    job = harvest.run(tiny_request(shard_size=4), "s3://bucket/same/run")
    files = rclone.files("same/run")
    local = {path.relative_to(tiny_run).as_posix(): path.read_bytes() for path in tiny_run.rglob("*") if path.is_file()}
    assert files.keys() == local.keys()
    same = [
        name for name in files if name.startswith("shards/") or name in ("stats.safetensors", "request.json", "records/fingerprint.json")
    ]
    assert len(same) == 6
    assert all(files[name] == local[name] for name in same)
    manifest, other = json.loads(files["manifest.json"]), json.loads(local["manifest.json"])
    assert manifest.pop("run_id") == str(job.run_id) != other.pop("run_id")
    assert manifest == other
    assert job.result is not None
    assert job.result.bytes_written == sum(len(files[name]) for name in same if name.startswith(("shards", "stats")))
    assert job.result.timings.upload_s > 0
    assert not list((tmp_path / "cache").rglob("*.zip")), "a shard that is in the store is removed here"


def test_links_are_signed_for_an_answer_and_never_stored(rclone: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone.endpoint)
    job = harvest.run(tiny_request(shard_size=4), "s3://bucket/links")
    jsonschema.validate(json.loads(job.to_json()), json.loads((DATA / "harvest_job.schema.json").read_text()))
    files = rclone.files("links")
    assert job.result is not None
    assert job.result.n_shards == 3
    for index, link in enumerate(job.result.shard_urls):
        assert get(link) == (200, files[f"shards/shard_{index:05d}.zarr.zip"])
    assert get(job.result.manifest_url) == (200, files["manifest.json"])
    assert get(job.result.stats_url) == (200, files["stats.safetensors"])
    assert "X-Amz-Expires=604800&" in job.result.stats_url
    for other in ("shard_00001", "X-Amz-Expires=604801"):
        tampered = re.sub("shard_00000|X-Amz-Expires=604800", other, job.result.shard_urls[0])
        assert get(tampered)[0] == 403
    stored = HarvestJob.model_validate_json(files["job.json"])
    assert b"Signature" not in files["job.json"]
    assert stored.result is not None
    assert stored.result.manifest_url == "s3://bucket/links/manifest.json"
    assert stored.result.shard_urls[2] == "s3://bucket/links/shards/shard_00002.zarr.zip"
    assert job.urls_expire_at is not None
    assert timedelta(days=6, hours=23) < job.urls_expire_at - utc_now() <= timedelta(days=7)


def test_a_finished_run_answers_here_and_elsewhere(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url, request = "s3://bucket/again", tiny_request(shard_size=4)
    job = harvest.run(request, url)
    for place in ("cache", "elsewhere"):
        move_elsewhere(monkeypatch, tmp_path, place)
        found = find_answer(request, harvest.Engine(), open_folder(url), Path("runs"))
        assert found is not None
        assert found.job_id == job.job_id
        notes = Notes()
        assert harvest.run(request, url, reporter=notes).job_id == job.job_id
        assert "this run is finished already" in notes.all
        assert status(open_folder(url)).status == "done"
    assert not (tmp_path / "elsewhere").exists(), "an answer leaves nothing"


def test_status_and_fetch_need_the_url_alone(server: Server, tiny_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    harvest.run(tiny_request(shard_size=4), "s3://bucket/fetched/")
    move_elsewhere(monkeypatch, tmp_path)
    fetch(status(open_folder("s3://bucket/fetched")), tmp_path / "got")
    assert verify(tmp_path / "got").is_sound
    assert (harvest.open(tmp_path / "got").layer(2)[:] == harvest.open(tiny_run).layer(2)[:]).all()
    with pytest.raises(NotARunError, match=r"s3://bucket/nowhere: holds no job\.json"):
        status(open_folder("s3://bucket/nowhere"))


def test_a_run_goes_on_elsewhere_with_what_the_store_has(
    rclone: Server, proxy: Proxy, tiny_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, request = "s3://bucket/moves", tiny_request(shard_size=2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    proxy.fault = lambda asked: Fault(status=403, delay_s=0.5) if re.search("PUT.*shard_0000[13]", asked) else Fault()
    with pytest.raises(StorageError, match="not allowed to do this"):
        harvest.run(request, url)
    there = {name for name in rclone.files("moves") if name.startswith("records/shard_")}
    assert there == {f"records/shard_{index:05d}.json" for index in (0, 2, 4)}
    # One object is not what was uploaded any more.
    assert rclone.data is not None
    shard = rclone.data / "bucket/moves/shards/shard_00000.zarr.zip"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    move_elsewhere(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone.endpoint)
    notes = Notes()
    job = harvest.run(request, url, reporter=notes)
    assert job.status == "done"
    assert f"made anew: {url}/shards/shard_00000.zarr.zip is not what was uploaded" in notes.all
    assert "2 of 5 shards are in the store" in notes.all
    fetch(job, tmp_path / "got")
    assert verify(tmp_path / "got").is_sound
    assert (harvest.open(tmp_path / "got").layer(0)[:] == harvest.open(tiny_run).layer(0)[:]).all()


def test_shards_that_wait_here_go_up_without_the_model(
    rclone: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, request = "s3://bucket/waits", tiny_request(shard_size=4)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    proxy.fault = lambda asked: Fault(status=403) if re.search("PUT.*/shards/", asked) else Fault()
    with pytest.raises(StorageError):
        harvest.run(request, url)
    assert not [name for name in rclone.files("waits") if name.startswith("shards/")]
    assert HarvestJob.model_validate_json(rclone.files("waits")["job.json"]).status == "failed"
    waiting = sorted(path.name for path in (tmp_path / "cache").rglob("*.zip"))
    assert waiting == [f"shard_{index:05d}.zarr.zip" for index in range(3)]
    proxy.fault = lambda _asked: Fault()
    job = harvest.run(request, url)
    assert job.result is not None
    assert job.result.timings.load_s == job.result.timings.forward_s == 0
    assert job.result.timings.upload_s > 0
    assert not list((tmp_path / "cache").rglob("*.zip"))


def test_shards_stay_with_keep_local_in_the_folder_that_was_named(rclone: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone.endpoint)
    folder = open_folder("s3://bucket/kept", tmp_path / "stage", keep_local=True)
    harvest.run(tiny_request(shard_size=4), folder)
    kept = {path.name: path.read_bytes() for path in (tmp_path / "stage/shards").iterdir()}
    assert kept == {name[7:]: data for name, data in rclone.files("kept").items() if name.startswith("shards/")}
    with pytest.raises(FolderError, match="shards on their way to another place"):
        harvest.run(tiny_request(), open_folder("s3://bucket/other", tmp_path / "stage"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    with pytest.raises(FolderError, match="holds something else"):
        harvest.run(tiny_request(), open_folder("s3://bucket/other", tmp_path / "mine"))


def test_few_shards_wait_here_where_the_store_is_slow(
    rclone: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    most = 0

    def look(asked: str) -> Fault:
        nonlocal most
        most = max(most, len(list((tmp_path / "cache").rglob("shard_*.zip"))))
        return Fault(delay_s=0.1 if "PUT" in asked and "/shards/" in asked else 0)

    proxy.fault = look
    prompts = [f"prompt number {number}" for number in range(40)]
    # A window for each shard, so that the model waits for the store and not for its own end.
    job = harvest.run(tiny_request(prompts, shard_size=1), "s3://bucket/slow", harvest.Engine(window_bytes=20000))
    assert job.status == "done"
    # Two that the publishers write, and those that wait.
    assert most <= MOST_WAITING + 2
    assert job.result is not None
    assert 40 * 0.1 / 4 < job.result.timings.upload_s < 40 * 0.1, "four at a time"


def test_another_request_needs_overwrite_which_empties_the_place(server: Server) -> None:
    url = "s3://bucket/other-request"
    first = harvest.run(tiny_request(shard_size=4), url)
    with pytest.raises(FolderError, match=rf"{url} holds shards of another request \(layers"):
        harvest.run(tiny_request(shard_size=4, layers=[1]), url)
    notes = Notes()
    job = harvest.run(tiny_request(shard_size=9, layers=[1]), url, overwrite=True, reporter=notes)
    assert "--overwrite: removing 3 finished shards and 12 files in all" in notes.all
    assert job.run_id != first.run_id
    folder = open_folder(url)
    assert folder.recorded() == {0}
    assert [path.name for path in folder.contents() if path.name.endswith(".zip")] == ["shard_00000.zarr.zip"]


def test_a_place_with_other_things_is_refused(rclone: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone.endpoint)
    Store("s3://bucket/mine", 1).write("thesis.tex", b"\\begin")
    with pytest.raises(FolderError, match="s3://bucket/mine is not empty and holds no run of harvest"):
        harvest.run(tiny_request(), "s3://bucket/mine")


def test_parts_on_two_machines_make_one_run(server: Server, tiny_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url, request, notes = "s3://bucket/parts", tiny_request(shard_size=2), Notes()
    engine = harvest.Engine(window_bytes=60000)
    jobs = []
    for index in range(2):
        move_elsewhere(monkeypatch, tmp_path, f"machine{index}")
        jobs.append(harvest.run(request, url, engine, notes, part=Part(index, 2)))
    assert [job.status for job in jobs] == ["pending", "done"]
    assert jobs[0].run_id == jobs[1].run_id
    assert "part 0/2 is done" in notes.all
    fetch(jobs[1], tmp_path / "got")
    assert verify(tmp_path / "got").is_sound
    assert (harvest.open(tmp_path / "got").layer(3)[:] == harvest.open(tiny_run).layer(3)[:]).all()


def test_links_end_with_temporary_credentials(moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a token")
    notes = Notes()
    job = harvest.run(tiny_request(), "s3://bucket/temporary", reporter=notes)
    assert "the links end with the temporary credentials that signed them: unknown when" in notes.all
    assert job.urls_expire_at is not None
    assert job.urls_expire_at - utc_now() <= timedelta(hours=36)
    end = utc_now() + timedelta(hours=2)
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", end.isoformat())
    told: list[str] = []
    answer = status(open_folder("s3://bucket/temporary"), note=told.append)
    assert answer.urls_expire_at == end
    assert told == [f"the links end at {end:%Y-%m-%d %H:%M} UTC, with the temporary credentials that signed them"]


def test_a_run_of_another_machine_is_not_cancelled_from_here(rclone: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone.endpoint)
    harvest.run(tiny_request(shard_size=4), "s3://bucket/running", part=Part(0, 2), engine=harvest.Engine(window_bytes=60000))
    move_elsewhere(monkeypatch, tmp_path)
    folder = open_folder("s3://bucket/running")
    assert status(folder).status == "pending"
    with pytest.raises(NotARunError, match="its processes are not known on this machine"):
        cancel(folder)


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "s3://bucket/a//b", "s3://bucket/../b", "s3://bucket/x?y", "ftp://host/x", "s3://a b"])
def test_a_name_that_is_no_place_in_a_store_is_an_error(url: str) -> None:
    with pytest.raises(RequestError, match=re.escape(repr(url))):
        open_folder(url)


def test_a_path_is_a_local_folder(tmp_path: Path) -> None:
    assert type(open_folder(tmp_path)) is type(open_folder(str(tmp_path))) is RunFolder
    with pytest.raises(RequestError, match="as a str, since a Path drops a slash"):
        open_folder(Path("s3://bucket/run"))


def test_a_run_in_a_store_is_fetched_before_it_is_read() -> None:
    with pytest.raises(harvest.HarvestError, match="is read here after harvest fetch s3://bucket/run DIR"):
        harvest.open("s3://bucket/run")
