"""A wish to stop, set from wherever it comes and looked at between batches: a signal, or another process's `harvest cancel`."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from harvest.errors import CancelledError, HarvestError, RequeuedError, TerminatedError

GOES_ON = "the shards that were finished stay, and the same command goes on with the rest"

T = TypeVar("T")
_LOOK_EVERY_S = 0.1


class StopFlag:
    """Set once; never cleared. The first error that was asked for counts."""

    def __init__(self) -> None:
        self._error: HarvestError | None = None

    def ask(self, error: HarvestError) -> None:
        """Ask for a stop that `check` raises as this error. Safe from a signal handler and from other threads."""
        self._error = self._error or error

    @property
    def is_set(self) -> bool:
        """Whether a stop was asked for."""
        return self._error is not None

    def check(self) -> None:
        """Raise the error of the stop, where one was asked for."""
        if self._error is not None:
            raise self._error


def while_checking(check: Callable[[], None], call: Callable[[], T]) -> T:
    """What a call answers that may take long outside of Python, where no signal is heard: in a thread, while this one calls `check`.

    check: what it raises ends the waiting; the call is left alone then, and its answer lost. Signals are heard in the main thread alone,
    so in another it is a call like any other.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="harvest-call", daemon=True).start()
    while not wait([answer], _LOOK_EVERY_S).done:
        check()
    return answer.result()


@contextmanager
def stopping_on_signals(stop: StopFlag, requeues: bool = False) -> Iterator[None]:
    """Let SIGINT and SIGTERM ask for a stop. A second SIGINT raises KeyboardInterrupt at once: what is published is whole even then.

    requeues: a SIGTERM is a scheduler's, which will start the same command again.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set:
            raise KeyboardInterrupt
        stop.ask(CancelledError(f"stopped; {GOES_ON}"))

    def terminate(_number: int, _frame: FrameType | None) -> None:
        error = RequeuedError if requeues else TerminatedError
        stop.ask(error(f"stopped by SIGTERM; {GOES_ON}"))

    before = signal.signal(signal.SIGINT, interrupt), signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
