"""What is damaged on disk is found: made anew, and said, by the next start of the same command; reported by verify."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Notes, tiny_request

import harvest
from harvest.output.folder import RunFolder
from harvest.reading.verify import verify


def local_header(path: Path) -> int:
    """A byte of an entry's checksum in its local header."""
    return chunk_entry(path).header_offset + 14


def chunk(path: Path) -> int:
    """A byte in the middle of a chunk of rows."""
    entry = chunk_entry(path)
    return entry.header_offset + 30 + len(entry.filename) + entry.file_size // 2


def document(path: Path) -> int:
    """A byte of the group's zarr.json."""
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo("zarr.json")
        return entry.header_offset + 30 + len(entry.filename) + entry.file_size // 2


def directory(path: Path) -> int:
    """A byte of the central directory."""
    with zipfile.ZipFile(path) as archive:
        return archive.start_dir + 10


def directory_end(path: Path) -> int:
    """The last byte but one."""
    return path.stat().st_size - 2


def chunk_entry(path: Path) -> zipfile.ZipInfo:
    with zipfile.ZipFile(path) as archive:
        return archive.getinfo("activations/c/2/0/0")


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


def truncate(folder: RunFolder) -> None:
    raw = folder.shard(1).read_bytes()
    folder.shard(1).write_bytes(raw[: len(raw) // 2])


def remove_shard(folder: RunFolder) -> None:
    folder.shard(1).unlink()


def remove_record(folder: RunFolder) -> None:
    folder.record(1).unlink()


def tear_record(folder: RunFolder) -> None:
    folder.record(1).write_bytes(folder.record(1).read_bytes()[:40])


def exchange(folder: RunFolder) -> None:
    """Another shard of the same run under this one's name."""
    shutil.copy(folder.shard(0), folder.shard(1))


def take_from_another_run(folder: RunFolder) -> None:
    """Shard and record, whole in themselves, of a run with another codec."""
    other = RunFolder(folder.path.with_name("other"))
    harvest.run(tiny_request(shard_size=4), other.path, harvest.Engine(codec="zstd"))
    shutil.copy2(other.shard(1), folder.shard(1))
    shutil.copy2(other.record(1), folder.record(1))


FLIPS: list[Callable[[Path], int]] = [local_header, chunk, document, directory, directory_end]
DAMAGES: dict[str, tuple[Callable[[RunFolder], None], str]] = {
    **{
        f"a bit of the {place.__name__}": (
            lambda folder, place=place: flip(folder.shard(1), place(folder.shard(1))),  # type: ignore[misc]
            "shard_00001.zarr.zip is not what was published",
        )
        for place in FLIPS
    },
    "truncated": (truncate, "shard_00001.zarr.zip is not what was published"),
    "shard missing": (remove_shard, "shard_00001.zarr.zip is missing"),
    "record missing": (remove_record, "shard_00001.zarr.zip has no record"),
    "record torn": (tear_record, "shard_00001.json cannot be read"),
    "another shard": (exchange, "shard_00001.zarr.zip is not what was published"),
    "another run's shard": (take_from_another_run, "shard_00001.zarr.zip is of another run"),
}


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_mended(damage: str, is_finished: bool, tiny_run: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(tiny_run, folder.path)
    if not is_finished:
        folder.manifest.unlink()
        folder.stats.unlink()
    harm, words = DAMAGES[damage]
    harm(folder)
    if is_finished:
        assert not verify(folder.path).is_sound
    reporter = Notes()
    job = harvest.run(tiny_request(shard_size=4), folder.path, reporter=reporter)
    assert job.status == "done"
    assert any(note.startswith("made anew: ") and words in note for note in reporter.said), reporter.said
    assert verify(folder.path).is_sound
    for index in range(3):
        assert folder.shard(index).read_bytes() == RunFolder(tiny_run).shard(index).read_bytes()
    assert folder.stats.read_bytes() == (tiny_run / "stats.safetensors").read_bytes()


def test_a_copied_run_is_finished_as_it_stands(tiny_run: Path, tmp_path: Path) -> None:
    """Its files have other times than the records say, so their checksums are looked at, and they fit."""
    shutil.copytree(tiny_run, tmp_path / "run", copy_function=shutil.copy)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "shards").iterdir()}
    reporter = Notes()
    harvest.run(tiny_request(shard_size=4), tmp_path / "run", reporter=reporter)
    assert "this run is finished already; nothing was done" in reporter.said
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "shards").iterdir()} == before


def test_overwrite_says_what_it_removes_and_starts_anew(tiny_run: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(tiny_run, folder.path)
    (folder.path / "notes.txt").write_text("mine")
    old = json.loads(folder.job.read_text())["run_id"]
    reporter = Notes()
    job = harvest.run(tiny_request(shard_size=9), folder.path, reporter=reporter, overwrite=True)
    (said,) = [note for note in reporter.said if note.startswith("--overwrite")]
    assert "removing 3 finished shards and 12 files in all" in said
    assert str(folder.path) in said
    assert str(job.run_id) != old
    assert sorted(path.name for path in (folder.path / "shards").iterdir()) == ["shard_00000.zarr.zip"]
    assert (folder.path / "notes.txt").read_text() == "mine"
    assert verify(folder.path).is_sound


def test_overwrite_touches_nothing_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(harvest.HarvestError, match="holds no run of harvest"):
        harvest.run(tiny_request(), tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "x"
