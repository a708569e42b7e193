"""A disk that fails: the error names the file and what to do, what is finished stays, and the same command finishes later."""

import errno
import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import Task, content, run

from harvest.output import durable
from harvest.output.folder import RunFolder

MIB = 1 << 20
# 24 shards of 70 kB each, more than a file system of 1 MiB holds.
PROMPTS = tuple(f"prompt {number} " + "x" * 60 for number in range(48))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run of PROMPTS writes on a disk without faults."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(Task(folder, prompts=PROMPTS))[0] == 0
    return content(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system of 4 MiB, mounted over a loop device."""
    image, mount = tmp_path / "disk.img", tmp_path / "mount"
    with image.open("wb") as file:
        file.truncate(4 * MIB)
    mount.mkdir()
    for command in (["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(mount)]):
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"{command[0]} is not installed")
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def check_kept(folder: Path, least: int) -> list[int]:
    """No manifest, no temporary file, and every published shard whole; answers their numbers."""
    run_folder = RunFolder(folder)
    assert not run_folder.manifest.exists()
    assert not run_folder.temporary()
    published = sorted(run_folder.recorded())
    assert len(published) >= least
    for index in published:
        assert run_folder.record(index).stat().st_size > 0
        assert durable.file_sha256(run_folder.shard(index)) in run_folder.record(index).read_text()
    return published


def fill(_folder: Path, ballast: Path, leave: int) -> None:
    """Take all space of the ballast's disk but so many bytes."""
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(ballast.parent).free - leave)


def test_a_full_disk(small_disk: Path, whole: dict[str, bytes]) -> None:
    folder, ballast = small_disk / "run", small_disk / "ballast"
    task = Task(folder, fill, (ballast, MIB), prompts=PROMPTS, options={"space_check": False})
    code, said = run(task)
    assert code == 1
    assert "No space left on device" in said
    assert f"error: {folder / 'shards'}" in said or f"error: {folder / 'records'}" in said
    assert "free some space" in said
    assert check_kept(folder, 1) != list(range(24))
    ballast.unlink()
    code, said = run(Task(folder, prompts=PROMPTS))
    assert code == 0, said
    assert "of 24 shards are on disk already" in said
    assert content(folder) == whole


def test_too_little_space_is_an_error_before_the_model_is_loaded(small_disk: Path, whole: dict[str, bytes]) -> None:
    folder, ballast = small_disk / "run", small_disk / "ballast"
    n_bytes = sum(map(len, whole.values()))
    code, said = run(Task(folder, fill_and_refuse_to_load, (ballast, n_bytes // 2), prompts=PROMPTS))
    assert code == 1
    assert "free; free some space, name another folder, ask for fewer layers, or go on all the same with --no-space-check" in said
    needed = int(said.split("(")[1].split(" bytes)")[0].replace(",", ""))
    # The bound holds, and is not far off: the codec saves a sixth of it here, and records and text are small.
    assert n_bytes <= needed <= 1.5 * n_bytes
    ballast.unlink()
    assert run(Task(folder, prompts=PROMPTS))[0] == 0
    assert content(folder) == whole


def fill_and_refuse_to_load(folder: Path, ballast: Path, leave: int) -> None:
    """Fill a disk, and fail where a model is loaded."""
    import harvest.decoder

    def refuse(*_: Any) -> Any:
        raise AssertionError("the model was loaded")

    fill(folder, ballast, leave)
    harvest.decoder.load_decoder = refuse


def test_a_read_only_disk(small_disk: Path) -> None:
    folder = small_disk / "run"
    assert run(Task(folder, die_after, (2,), prompts=PROMPTS))[0] == 1
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    code, said = run(Task(folder, prompts=PROMPTS))
    assert code == 2
    assert "Read-only file system" in said
    assert "choose a folder that you may write to" in said
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert run(Task(folder, prompts=PROMPTS))[0] == 0


def test_a_finished_run_on_a_read_only_disk_is_answered(small_disk: Path) -> None:
    folder = small_disk / "run"
    assert run(Task(folder))[0] == 0
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    code, said = run(Task(folder))
    assert (code, "finished already" in said) == (0, True)


def die_after(_folder: Path, n_shards: int, number: int = errno.EIO) -> None:
    """Let the operating system refuse every shard after so many."""
    opened, n_opened = durable.open_new, 0

    def refuse(temporary: Path) -> Any:
        nonlocal n_opened
        if temporary.name.endswith(".zarr.zip"):
            n_opened += 1
            if n_opened > n_shards:
                raise OSError(number, os.strerror(number))
        return opened(temporary)

    durable.open_new = refuse


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EIO, "check the path, then run the same command again"),
        (errno.ESTALE, "check that the disk is there, then run the same command again"),
        (errno.EDQUOT, "your quota is used up"),
        (errno.ENOSPC, "free some space"),
    ],
)
def test_a_disk_that_refuses_a_shard(number: int, advice: str, tmp_path: Path, whole: dict[str, bytes]) -> None:
    folder = tmp_path / "run"
    code, said = run(Task(folder, die_after, (3, number), prompts=PROMPTS))
    assert code == 1
    assert f"cannot be written ({os.strerror(number)}); {advice}" in said
    assert str(folder / "shards" / "shard_0000") in said
    check_kept(folder, 1)
    assert '"failed"' in (folder / "job.json").read_text()
    assert run(Task(folder, prompts=PROMPTS))[0] == 0
    assert content(folder) == whole


def limit(_folder: Path, kind: int, value: int) -> None:
    """Lower a limit of this process."""
    resource.setrlimit(kind, (value, value))


def test_a_limit_on_the_size_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    engine = {"codec": "none"}
    code, said = run(Task(folder, limit, (resource.RLIMIT_FSIZE, 60_000), engine=engine, shard_size=9))
    assert code == 1
    assert "raise the limit (ulimit -f), or lower --shard-size" in said
    check_kept(folder, 0)
    assert run(Task(folder, engine=engine, shard_size=9))[0] == 0


def test_too_many_open_files(tmp_path: Path, whole: dict[str, bytes]) -> None:
    folder = tmp_path / "run"
    task = Task(folder, limit_open_files_at_the_first_shard, prompts=PROMPTS)
    code, said = run(task)
    assert code == 1, said
    assert "Too many open files" in said
    assert "ulimit -n" in said
    check_kept(folder, 0)
    assert run(Task(folder, prompts=PROMPTS))[0] == 0
    assert content(folder) == whole


def limit_open_files_at_the_first_shard(_folder: Path) -> None:
    """Leave no file descriptor free once the first shard is published."""
    from harvest.output.writers import Writers

    write, lock = Writers._write, threading.Lock()
    limits: list[int] = []

    def then_limit(self: Writers, *arguments: Any) -> Any:
        answer = write(self, *arguments)
        # The other publisher may come here too, and could not even count them any more.
        with lock:
            if not limits:
                limits.append(len(os.listdir("/proc/self/fd")) - 1)
                resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0], resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        return answer

    Writers._write = then_limit  # type: ignore[method-assign]


def become_nobody(_folder: Path) -> None:
    """Give up the rights of root, which no permission holds back."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_no_permission(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(Task(folder, die_after, (3,), prompts=PROMPTS))[0] == 1
    for path in (tmp_path, *tmp_path.parents):
        if path != Path("/"):
            os.chmod(path, os.stat(path).st_mode | 0o055)
    code, said = run(Task(folder, become_nobody, prompts=PROMPTS))
    assert code == 2
    assert "Permission denied" in said
    assert "choose a folder that you may write to" in said
    check_kept(folder, 1)
    assert run(Task(folder, prompts=PROMPTS))[0] == 0


def test_a_folder_that_vanishes_under_way(tmp_path: Path, whole: dict[str, bytes]) -> None:
    """As a network folder does: its files are elsewhere for a while, and then there again."""
    folder, away = tmp_path / "run", tmp_path / "away"
    code, said = run(Task(folder, vanish_after, (3, away), prompts=PROMPTS))
    assert code == 1
    assert "No such file or directory" in said
    assert "check that the disk is there" in said
    if folder.exists():
        shutil.rmtree(folder)
    away.rename(folder)
    assert not (folder / "manifest.json").exists()
    code, said = run(Task(folder, prompts=PROMPTS))
    assert code == 0, said
    assert content(folder) == whole


def vanish_after(folder: Path, n_shards: int, away: Path) -> None:
    """Move the run's folder away once so many shards were opened."""
    opened, n_opened = durable.open_new, 0

    def move(temporary: Path) -> Any:
        nonlocal n_opened
        if temporary.name.endswith(".zarr.zip"):
            n_opened += 1
            if n_opened == n_shards + 1:
                folder.rename(away)
        return opened(temporary)

    durable.open_new = move
