"""The store's own calls: parts, checks of what was uploaded, files of Amazon's tools, and the other clouds' links."""

import base64
import hashlib
import json
import os
import re
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cloud.conftest import KEY, SECRET, Server
from cloud.proxy import Fault, Proxy
from harvest.errors import StorageError
from harvest.output import objects
from harvest.output import store as store_module
from harvest.output.credentials import client_options, credentials, end_of_link
from harvest.output.staged import StagedFolder
from harvest.output.store import Found, Store

pytest.importorskip("obstore")

PART = 5 << 20
SIZE = 2 * PART + 12345


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of three parts."""
    monkeypatch.setattr(store_module, "_PART_BYTES", PART)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def nothing() -> None:
    """Nobody asks for a stop."""


def test_a_large_file_goes_up_in_parts_and_comes_back(server: Server, file: Path) -> None:
    store = Store("s3://bucket/parts-of-a-file", 5)
    found = store.upload("a", file, sha256(file), nothing)
    assert found == store.head("a")
    assert found.size == SIZE
    assert store.read("a") == file.read_bytes()
    assert store.read_range("a", 7, PART + 7) == file.read_bytes()[7 : PART + 7]
    assert store.list_below("a") == {}
    assert store.list_top() == {"a"}
    store.delete("a")
    store.delete("a")
    assert store.head("a") is None
    assert store.read("a") is None


def test_an_object_reads_as_a_file(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_READ_BYTES", 1000)
    monkeypatch.setattr(objects, "_SHORTEST_TAIL", 100)
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        for number in range(50):
            archive.writestr(f"entry {number}", os.urandom(200))
    store = Store("s3://bucket/files", 5)
    path = tmp_path / "zip"
    store.upload("zip", path, sha256(path), nothing)
    with zipfile.ZipFile(store.open("zip", path.stat().st_size)) as there, zipfile.ZipFile(path) as here:
        assert there.namelist() == here.namelist()
        for number in (49, 0, 25):
            assert there.read(f"entry {number}") == here.read(f"entry {number}")


def test_of_two_writers_of_a_new_object_one_is_told_so(server: Server) -> None:
    store = Store("s3://bucket/new", 5)
    assert store.write_new("a", b"1")
    assert not store.write_new("a", b"2")
    assert store.read("a") == b"1"


def test_a_file_that_changed_since_it_was_written_does_not_go_up(server: Server, file: Path) -> None:
    store = Store("s3://bucket/changed", 5)
    with pytest.raises(StorageError, match="its bytes have changed since they were written"):
        store.upload("a", file, "0" * 64, nothing)
    assert store.head("a") is None


def test_an_upload_that_is_given_up_leaves_nothing(server: Server, file: Path) -> None:
    store, looks = Store("s3://bucket/given-up", 5), []

    def give_up() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        store.upload("a", file, sha256(file), give_up)
    assert store.head("a") is None
    assert store.list_top() == set()


def test_where_the_etag_is_no_md5_all_is_read_back(proxy: Proxy, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)

    def change(answer: bytes) -> bytes:
        return re.sub(rb'(?i)etag: "[^"]*"', b'ETag: "of-another-kind"', answer)

    proxy.fault = lambda asked: Fault(changes=change) if asked.startswith("HEAD") else Fault()
    store = Store("s3://bucket/read-back", 5)
    assert store.upload("a", file, sha256(file), nothing) == Found(SIZE, "of-another-kind")
    assert any(request == "GET /bucket/read-back/a" for request in proxy.requests)

    def damage(answer: bytes) -> bytes:
        return answer[:-1] + bytes([answer[-1] ^ 1])

    heads = proxy.fault
    proxy.fault = lambda asked: Fault(changes=damage) if asked.startswith("GET") else heads(asked)
    with pytest.raises(StorageError, match="the store answers other bytes than were uploaded"):
        store.upload("b", file, sha256(file), nothing)


def test_where_the_etag_is_the_md5_nothing_is_read_back(proxy: Proxy, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    Store("s3://bucket/md5", 5).upload("a", file, sha256(file), nothing)
    assert not [request for request in proxy.requests if request.startswith("GET")]


def test_an_object_of_another_size_is_an_error(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    (tmp_path / "small").write_bytes(b"12345")
    proxy.fault = lambda asked: (
        Fault(changes=lambda a: a.replace(b"Content-Length: 5", b"Content-Length: 4")) if "HEAD" in asked else Fault()
    )
    with pytest.raises(StorageError, match="does not hold what was uploaded"):
        Store("s3://bucket/size", 5).upload("a", tmp_path / "small", sha256(tmp_path / "small"), nothing)


def test_links_that_cannot_be_signed_are_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2022-11-02&sig=abc")
    links = StagedFolder(Store("az://container/run", 1), None, False).fresh_links(1)
    assert links.sooner is not None
    assert re.match("the links are not signed, and need credentials: .*SAS tokens auth is not supported", links.sooner)
    assert links.fields["shard_urls"] == ["az://container/run/shards/shard_00000.zarr.zip"]


def test_the_profile_of_amazons_files_is_used_where_no_variable_says_it(
    tmp_path: Path, rclone: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".aws").mkdir()
    lines = f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    (tmp_path / ".aws/credentials").write_text(f"[default]\naws_access_key_id = no\n[work]\n{lines}")
    (tmp_path / ".aws/config").write_text(f"[profile work]\nregion = eu-north-1\nendpoint_url = {rclone.endpoint}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_PROFILE", "work")
    store = Store("s3://bucket/profile", 5)
    assert store.write("a", b"1").size == 1
    assert "eu-north-1" in store.sign(["a"], timedelta(days=7))[0]
    variables = {"HOME": str(tmp_path), "AWS_ACCESS_KEY_ID": "mine", "AWS_REGION": "here", "AWS_ENDPOINT_URL": "https://mine"}
    assert credentials("s3", variables | {"AWS_PROFILE": "work"}) == {}
    assert client_options(variables) == {}
    assert credentials("gs", {"HOME": str(tmp_path)}) == {}


def test_the_end_of_a_link() -> None:
    week, now = timedelta(days=7), datetime.now(UTC)
    end, sooner = end_of_link("http://x/?X-Amz-Signature=1", week, {})
    assert sooner is None
    assert abs(end - now - week) < timedelta(seconds=5)
    temporary = "http://x/?X-Amz-Security-Token=t&X-Amz-Signature=1"
    end, sooner = end_of_link(temporary, week, {})
    assert sooner is not None
    assert abs(end - now - timedelta(hours=36)) < timedelta(seconds=5)
    end, sooner = end_of_link(temporary, week, {"AWS_CREDENTIAL_EXPIRATION": "2026-01-02T03:04:05Z"})
    assert (end, sooner is None) == (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), False)
    assert end_of_link(temporary, week, {"AWS_CREDENTIAL_EXPIRATION": (now + timedelta(days=9)).isoformat()})[1] is None


def test_the_other_clouds_sign_links_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signing needs no server; these two are not tried against one."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"key").decode())
    (link,) = Store("az://container/runs/one", 1).sign(["manifest.json"], timedelta(days=7))
    assert re.match(r"https://account\.blob\.core\.windows\.net/container/runs/one/manifest\.json\?.*sig=", link)
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    account = {
        "type": "service_account",
        "client_email": "me@project.example",
        "private_key_id": "1",
        "private_key": key.private_bytes(*form).decode(),
    }
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    (link,) = Store("gs://bucket/runs/one", 1).sign(["manifest.json"], timedelta(days=7))
    assert re.match(r"https://.*storage\.googleapis\.com/.*runs/one/manifest\.json\?.*X-Goog-Expires=604800.*X-Goog-Signature=", link)
