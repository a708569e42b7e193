"""A process's memory while it works, sampled: what is its own, and what it has mapped of files."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

# A peak that lasts less is missed; looking costs some ten microseconds.
_EVERY_S = 0.02


class Watch:
    """Looks at a process until the end of the context.

    anon_bytes: the most memory of its own. mapped_bytes: the most of files that it had mapped. Both are 0 where the system does not say.
    """

    def __init__(self, pid: int) -> None:
        self.anon_bytes = self.mapped_bytes = 0
        self._status = Path(f"/proc/{pid}/status")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_EVERY_S):
            try:
                lines = self._status.read_text().splitlines()
            except OSError:
                return
            # "RssAnon:     12345 kB", and no such line once the process has ended.
            sizes = {name: int(size.split()[0]) << 10 for name, size in (line.split(":", 1) for line in lines if line.startswith("Rss"))}
            self.anon_bytes = max(self.anon_bytes, sizes.get("RssAnon", 0))
            self.mapped_bytes = max(self.mapped_bytes, sizes.get("RssFile", 0))
