"""The ZIP file: what other programs make of it, also beyond 4 GiB and 65,535 entries."""

import hashlib
import io
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from harvest.errors import StorageError
from harvest.output.archive import Archive


def write(path: Path, entries: dict[str, bytes]) -> Archive:
    with open(path, "wb") as file:
        archive = Archive(file)
        for name, data in entries.items():
            archive.add(name, data)
        archive.close()
    return archive


ENTRIES = {"zarr.json": b"{}", "a/c/0/0": bytes(range(256)) * 40, "empty": b"", "ünïcode": b"x"}


def test_zipfile_reads_every_entry_stored(tmp_path: Path) -> None:
    archive = write(tmp_path / "a.zip", ENTRIES)
    with zipfile.ZipFile(tmp_path / "a.zip") as file:
        assert file.testzip() is None
        assert {name: file.read(name) for name in file.namelist()} == ENTRIES
        assert {info.compress_type for info in file.infolist()} == {zipfile.ZIP_STORED}
    assert archive.n_bytes == (tmp_path / "a.zip").stat().st_size
    assert archive.sha256 == hashlib.sha256((tmp_path / "a.zip").read_bytes()).hexdigest()


@pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
def test_unzip_finds_nothing_wrong(tmp_path: Path) -> None:
    write(tmp_path / "a.zip", ENTRIES)
    answer = subprocess.run(["unzip", "-t", tmp_path / "a.zip"], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout


def test_equal_entries_make_equal_files(tmp_path: Path) -> None:
    assert write(tmp_path / "a.zip", ENTRIES).sha256 == write(tmp_path / "b.zip", ENTRIES).sha256


def test_a_name_is_not_written_twice() -> None:
    archive = Archive(io.BytesIO())
    archive.add("zarr.json", b"{}")
    with pytest.raises(StorageError, match=r"zarr\.json"):
        archive.add("zarr.json", b"{}")


def test_more_entries_than_sixteen_bits_count(tmp_path: Path) -> None:
    entries = {str(number): b"" for number in range(70_000)}
    write(tmp_path / "a.zip", entries)
    with zipfile.ZipFile(tmp_path / "a.zip") as file:
        assert file.namelist() == list(entries)


class SparseFile(io.FileIO):
    """A file that skips over long runs of zeros, so that 4 GiB of them cost no disk."""

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        if view.nbytes >= 1 << 20:
            self.seek(view.nbytes, io.SEEK_CUR)
            return view.nbytes
        return super().write(view)


def test_beyond_four_gib(tmp_path: Path) -> None:
    zeros = bytes(1 << 30)
    with SparseFile(tmp_path / "a.zip", "w") as file:
        archive = Archive(file)  # type: ignore[arg-type]
        for number in range(5):
            archive.add(f"zeros/{number}", zeros, crc=0)
        archive.add("last", b"found beyond 4 GiB")
        archive.close()
    assert archive.n_bytes > 5 << 30
    with zipfile.ZipFile(tmp_path / "a.zip") as opened:
        assert opened.read("last") == b"found beyond 4 GiB"
        with opened.open("zeros/4") as entry:
            assert entry.read(10) == bytes(10)
