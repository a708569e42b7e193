"""A way to an HTTP server on which faults are made: errors, delays, silence, connections that are cut, answers that are changed."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self


@dataclass
class Fault:
    """What becomes of one request.

    status: answered instead of the server. delay_s: waited first. cuts: the connection ends in the midst of the request. hangs: it is
    never answered. changes: the server's answer, head and body, as it is passed on.
    """

    status: int | None = None
    delay_s: float = 0.0
    cuts: bool = False
    hangs: bool = False
    changes: Callable[[bytes], bytes] = field(default=lambda answer: answer)


FINE = Fault()


class Proxy:
    """Passes requests on to a port of the loopback. `fault` says what becomes of each; requests: METHOD /path of all that came."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self.fault: Callable[[str], Fault] = lambda _request: FINE
        self.requests: list[str] = []
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the same port as before where it did."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Be gone: nobody listens any more, and every connection is cut."""
        self._run(self._stop())

    def writes(self, part: str = "") -> list[str]:
        """The requests that came and change something, whose line holds `part`."""
        return [request for request in self.requests if not request.startswith(("GET", "HEAD")) and part in request]

    def _run(self, coroutine):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._pass_on(reader, writer)
        except (asyncio.CancelledError, asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection: the server is told to close it after its answer."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *headers = head.rstrip("\r\n").split("\r\n")
        request = " ".join(line.split(" ")[:2])
        self.requests.append(request)
        fault = self.fault(request)
        length = next((int(header.split(":")[1]) for header in headers if header.lower().startswith("content-length:")), 0)
        if fault.cuts:
            await reader.readexactly(length // 2)
            writer.transport.abort()
            return
        body = await reader.readexactly(length)
        await asyncio.sleep(fault.delay_s)
        if fault.hangs:
            await asyncio.sleep(3600)
        if fault.status is not None:
            writer.write(f"HTTP/1.1 {fault.status} Made\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        else:
            there, back = await asyncio.open_connection("127.0.0.1", self._to_port)
            kept = [header for header in headers if not header.lower().startswith("connection:")]
            back.write("\r\n".join([line, *kept, "Connection: close", "", ""]).encode("latin-1") + body)
            answer = await there.read(-1)
            back.close()
            writer.write(fault.changes(answer))
        await writer.drain()
