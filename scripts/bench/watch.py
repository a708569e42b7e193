"""What is looked at again and again beside other work; and a process's memory: what is its own, and what it has mapped of files."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

# A peak that lasts less is missed; looking costs some ten microseconds.
_EVERY_S = 0.02


class Looking:
    """Calls `look` again and again in a thread of its own until the end of the context, or until it answers that there is no more."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._ended.wait(self._every_s) and self.look():
            pass

    def look(self) -> bool:
        """Look once; answers whether there is something to look at any more."""
        raise NotImplementedError


class Watch(Looking):
    """Looks at a process until the end of the context.

    anon_bytes: the most memory of its own. mapped_bytes: the most of files that it had mapped. Both are 0 where the system does not say.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(_EVERY_S)
        self.anon_bytes = self.mapped_bytes = 0
        self._status = Path(f"/proc/{pid}/status")

    def look(self) -> bool:
        """Take its memory as it is now."""
        try:
            lines = self._status.read_text().splitlines()
        except OSError:
            return False
        # "RssAnon:     12345 kB", and no such line once the process has ended.
        sizes = {name: int(size.split()[0]) << 10 for name, size in (line.split(":", 1) for line in lines if line.startswith("Rss"))}
        self.anon_bytes = max(self.anon_bytes, sizes.get("RssAnon", 0))
        self.mapped_bytes = max(self.mapped_bytes, sizes.get("RssFile", 0))
        return True
