"""Idempotency keys: one key and one request, one run."""

import json
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from conftest import tiny_request

import harvest
from harvest.contract import utc_now
from harvest.errors import RequestError
from harvest.output.idempotency import folder_for_key


def test_the_same_key_and_request_answer_the_first_run(tmp_path: Path) -> None:
    first = harvest.run(tiny_request(), folder_for_key(tmp_path, "key", tiny_request()))
    again = harvest.run(tiny_request(), folder_for_key(tmp_path, "key", tiny_request()))
    other = harvest.run(tiny_request(), folder_for_key(tmp_path, "other key", tiny_request()))
    assert (again.job_id, again.completed_at) == (first.job_id, first.completed_at)
    assert other.job_id != first.job_id


def test_the_same_key_with_another_request_is_an_error(tmp_path: Path) -> None:
    folder_for_key(tmp_path, "key", tiny_request())
    with pytest.raises(RequestError, match="idempotency_key: 'key' was used with another request on 20"):
        folder_for_key(tmp_path, "key", tiny_request(shard_size=3))


def test_a_key_is_kept_for_24_hours(tmp_path: Path) -> None:
    first = folder_for_key(tmp_path, "key", tiny_request())
    (path,) = (tmp_path / ".idempotency").iterdir()
    for hours, is_kept in ((23.9, True), (24.1, False)):
        entry = json.loads(path.read_text())
        path.write_text(json.dumps(entry | {"created_at": (utc_now() - timedelta(hours=hours)).isoformat()}))
        assert (folder_for_key(tmp_path, "key", tiny_request()) == first) == is_kept
    assert folder_for_key(tmp_path, "key", tiny_request()) != first, "the new run is written down in the first one's place"


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_key_has_1_to_255_characters(key: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="a key has 1 to 255"):
        folder_for_key(tmp_path, key, tiny_request())


@pytest.mark.parametrize("key", ["x" * 255, "../../etc/passwd", "a/b\0c", "ключ"])
def test_any_text_is_a_key(key: str, tmp_path: Path) -> None:
    assert folder_for_key(tmp_path, key, tiny_request()).parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == [".idempotency"]


def test_of_many_at_once_all_get_the_same_run(tmp_path: Path) -> None:
    folders: list[Path] = []
    ready = threading.Barrier(8)

    def claim() -> None:
        ready.wait()
        folders.append(folder_for_key(tmp_path, "key", tiny_request()))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 8
    assert len(set(folders)) == 1
