"""An object in a process of its own, whose methods are called over a pipe."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

from .errors import BenchError

ANSWER_S = 300.0
"""How long an answer may take before the measurement is given up."""
_PR_SET_PDEATHSIG = 1


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The process's own function: makes the object, then does what the pipe says until its end."""
    # A stopped process would outlive a parent that was killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # An engine's file is not for the agents of a measurement.
    os.environ["KVFERRY_METRICS_FILE"] = ""
    try:
        try:
            made = make(*arguments)
        except BaseException:
            pipe.send((None, traceback.format_exc()))
            return
        pipe.send((os.getpid(), None))
        while True:
            name, given = pipe.recv()
            answer: tuple[Any, str | None]
            try:
                answer = (getattr(made, name)(*given), None)
            except Exception:
                answer = (None, traceback.format_exc())
            pipe.send(answer)
            if name == "close":
                return
    except (EOFError, BrokenPipeError):
        # The parent is gone, or has given up.
        return


class Remote(AbstractContextManager["Remote"]):
    """Makes `make(*arguments)` in a new process. The object must have a method `close`.

    The constructor does not wait for it, so that several processes start at once; the first call does. An answer may
    take `answer_s()` seconds. `package` is a folder in which the process looks for modules before it does elsewhere.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        *arguments: Any,
        answer_s: Callable[[], float] = lambda: ANSWER_S,
        package: str = "",
    ) -> None:
        self.name = name
        self._answer_s = answer_s
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        # The process takes over this one's path.
        path = sys.path
        try:
            sys.path = [package, *path] if package else path
            self._process.start()
        finally:
            sys.path = path
        theirs.close()
        self._ready = False
        self.pid = int(self._process.pid or 0)

    def tell(self, method: str, *arguments: Any) -> None:
        """Calls a method; `answer` takes what comes of it."""
        if not self._ready:
            self.answer("start")
            self._ready = True
        try:
            self._pipe.send((method, arguments))
        except OSError:
            raise self._gone(method) from None

    def answer(self, method: str) -> Any:
        """What the method that was told last has returned."""
        limit = self._answer_s()
        if not self._pipe.poll(limit):
            raise BenchError(f"{self.name}, {method}: no answer within {limit:.1f} s")
        try:
            value, error = self._pipe.recv()
        except (EOFError, OSError):
            raise self._gone(method) from None
        if error is not None:
            raise BenchError(f"{self.name}, {method}:\n{error}")
        return value

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method and returns what it does."""
        self.tell(method, *arguments)
        return self.answer(method)

    def _gone(self, method: str) -> BenchError:
        self._process.join(5)
        return BenchError(f"{self.name}, {method}: the process ended with {self._process.exitcode}")

    def pause(self) -> None:
        """Stops the process with all its threads."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.is_alive():
            os.kill(self.pid, number)

    def close(self) -> None:
        """Ends the process, by its own `close` if it can."""
        self.resume()
        try:
            limit = min(15.0, self._answer_s())
            if not self._ready and self._pipe.poll(limit):
                self._pipe.recv()
            self._pipe.send(("close", ()))
            if self._pipe.poll(limit):
                self._pipe.recv()
        except (OSError, EOFError):
            pass
        self._end()

    def _end(self) -> None:
        self._pipe.close()
        self._process.join(min(5.0, self._answer_s()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __exit__(self, *_: object) -> None:
        self.close()
