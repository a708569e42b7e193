"""The pool of threads that takes published shards to an object store, beside the model and the writers.

    publisher threads   wait_for_room before a shard is begun; submit once it is published
    upload threads      take a shard at a time to the store, have it checked, and hand it to `on_stored`

Shards that wait lie on the disk, a bounded number of them: where the store is slower than the writers, these wait for room, and with
them the model. Once a stop is asked for, what is on its way is given up at its next part; the shards stay and go up the next time.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from harvest.stop import StopFlag

_UPLOADERS = 4
# Published shards on the disk, those on their way counted.
MOST_WAITING = 2 * _UPLOADERS
_LOOK_EVERY_S = 0.1
# For what cannot be given up between two parts: a request that has no answer yet.
_LEAVE_AFTER_S = 3.0


class BusyClock:
    """Seconds in which at least one of several threads was busy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_busy = 0
        self._since = 0.0
        self._total_s = 0.0

    @property
    def total_s(self) -> float:
        """The seconds so far."""
        with self._lock:
            return self._total_s + (time.monotonic() - self._since if self._n_busy else 0.0)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the time of the context."""
        with self._lock:
            if self._n_busy == 0:
                self._since = time.monotonic()
            self._n_busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_busy -= 1
                if self._n_busy == 0:
                    self._total_s += time.monotonic() - self._since


class _GivenUpError(Exception):
    """The run ends, so an upload ends at its next part."""


class Uploads:
    """Uploads shards in threads of its own, by their numbers."""

    def __init__(self, upload: Callable[[int, Callable[[], None]], None], stop: StopFlag) -> None:
        """upload: takes one shard to the store, as a whole and checked; what it is given to call raises where it has to end early."""
        self._upload = upload
        self._stop = stop
        self._changed = threading.Condition()
        self._waiting: deque[int] = deque()
        self._n_busy = 0
        self._error: BaseException | None = None
        self._ends = False
        self._threads = [threading.Thread(target=self._run, name=f"harvest-upload-{number}", daemon=True) for number in range(_UPLOADERS)]
        for thread in self._threads:
            thread.start()

    def submit(self, index: int) -> None:
        """Hand over a shard that is published. Never waits."""
        with self._changed:
            self._waiting.append(index)
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Return when fewer shards wait than may, or the run is to stop. Raises the error that ended the uploads."""
        with self._changed:
            while self._error is None and len(self._waiting) + self._n_busy >= MOST_WAITING and not self._stop.is_set and not self._ends:
                self._changed.wait(_LOOK_EVERY_S)
        self.check()

    def check(self) -> None:
        """Raise the error that ended the uploads, where one did."""
        if self._error is not None:
            raise self._error

    @property
    def n_left(self) -> int:
        """Shards that are not in the store yet."""
        with self._changed:
            return len(self._waiting) + self._n_busy

    def finish(self) -> None:
        """Return when all that was submitted is in the store. Raises the error that ended them, or that of a stop."""
        while self.n_left:
            self._stop.check()
            self.check()
            with self._changed:
                self._changed.wait(_LOOK_EVERY_S)
        self.check()

    def end(self) -> None:
        """End the threads; what is not in the store yet is left where it is. Returns within a few seconds."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        deadline = time.monotonic() + _LEAVE_AFTER_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _check_going_on(self) -> None:
        if self._ends or self._stop.is_set or self._error is not None:
            raise _GivenUpError

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ends:
                    self._changed.wait()
                if self._ends or self._error is not None:
                    return
                index = self._waiting.popleft()
                self._n_busy += 1
            try:
                self._upload(index, self._check_going_on)
            except _GivenUpError:
                with self._changed:
                    self._waiting.appendleft(index)
                return
            except BaseException as error:
                # A thread has nobody to raise to: who waits for room, or for the end, finds it.
                self._error = self._error or error
            finally:
                with self._changed:
                    self._n_busy -= 1
                    self._changed.notify_all()
