"""Child processes: programs, functions, and objects whose methods are called over a pipe.

Each has a process group of its own, is signalled by its process id, and ends with this program, however that ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

GENEROUS = 60.0
"""Seconds that anything may take on a busy machine; more is a failure."""

_PR_SET_PDEATHSIG = 1
_FORKING = multiprocessing.get_context("forkserver")
_SPAWNING = multiprocessing.get_context("spawn")


class Stuck(Exception):
    """A process ended, or did not do in time what it must."""


class RemoteError(RuntimeError):
    """What a method raised in the other process: its traceback."""


def preload(*modules: str) -> None:
    """Has what is forked from now on begin with these modules imported. Only before the first `Child.forked`."""
    _FORKING.set_forkserver_preload(list(modules))


def begin(deadly: int = signal.SIGKILL) -> None:
    """In a new process: a group of its own, and the signal that it gets when its parent ends.

    Not a session of its own: Linux shares processors between sessions before it does between threads (autogroup), and
    a thread then waits up to 0.2 s beside another session's on two processors.
    """
    os.setpgrp()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, deadly)


def _run(environment: dict[str, str], deadly: int, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    begin(deadly)
    os.environ.clear()
    os.environ.update(environment)
    # The process that it is forked from ends with the program that started that one, unless somebody else holds this.
    held = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    if held is not None:
        os.close(held)
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    # It may have children of its own: they end with it, as it does with its parent.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    target(*arguments)


class Child:
    """A process and all that it starts in its group."""

    def __init__(self, process: subprocess.Popen[bytes] | BaseProcess) -> None:
        self._process = process
        self.pid = int(process.pid or 0)

    @classmethod
    def program(
        cls,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        deadly: int = signal.SIGKILL,
    ) -> Child:
        """A program. What it says is appended to the file `log`."""
        with log.open("ab") as output:
            return cls(
                subprocess.Popen(
                    command,
                    cwd=cwd,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    preexec_fn=lambda: begin(deadly),
                )
            )

    @classmethod
    def forked(
        cls,
        target: Callable[..., None],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        deadly: int = signal.SIGKILL,
    ) -> Child:
        """`target(*arguments)` in a process that is forked from one with the modules of `preload`."""
        given = (dict(os.environ if environment is None else environment), deadly, target, arguments)
        process = _FORKING.Process(target=_run, args=given, daemon=True)
        process.start()
        return cls(process)

    def wait(self, limit_s: float) -> int | None:
        """Its exit status; None while it runs, after `limit_s` seconds."""
        if isinstance(self._process, BaseProcess):
            self._process.join(limit_s)
            return self._process.exitcode
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(limit_s)
        return None

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.wait(0)

    def signal_first(self, number: int) -> None:
        """Sends a signal to its first process, as an operator does."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Sends a signal to all of its processes."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            # It has ended, or has not made its group yet.
            self.signal_first(number)

    def group(self) -> list[int]:
        """Those of its processes that have not ended with all of their threads: until then they hold their ports."""
        return [pid for pid in processes() if _group_of(pid) == self.pid and not is_dead(pid)]

    def kill(self, limit_s: float = GENEROUS) -> None:
        """SIGKILL to all of its processes, and waits until they are gone."""
        self.signal_group(signal.SIGKILL)
        deadline = time.monotonic() + limit_s
        while self.poll() is None or self.group():
            if time.monotonic() > deadline:
                raise Stuck(f"process {self.pid} is not gone {limit_s:.0f} s after SIGKILL: {self.group()}")
            time.sleep(0.002)

    def stop(self, limit_s: float) -> int:
        """SIGTERM, and SIGKILL for what is left after `limit_s` seconds; its exit status."""
        self.signal_group(signal.SIGTERM)
        self.wait(limit_s)
        self.kill()
        return self.wait(0) or 0


def processes() -> list[int]:
    """All of this machine."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _group_of(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def stat(path: Path) -> list[str]:
    """The fields of a process's or thread's `stat` from its state on, which follows the name in parentheses; none of
    one that is gone."""
    with suppress(OSError):
        return (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def _in_states(pid: int, states: str) -> bool:
    """Whether all threads of a process are in one of these states, or gone."""
    with suppress(OSError):
        return all(fields[:1] in ([], *([state] for state in states)) for fields in map(stat, _tasks(pid)))
    return True


def _tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def is_dead(pid: int) -> bool:
    """Whether all of its threads have ended, also where nobody has asked how."""
    return _in_states(pid, "ZX")


def freeze(pid: int) -> None:
    """The process does nothing from now on, and is not gone. Returns when all of its threads have stopped: on a busy
    machine the first of them may take a while to see the signal, and until then the others go on."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + GENEROUS
    while not _in_states(pid, "TZX"):
        if time.monotonic() > deadline:
            raise Stuck(f"process {pid} did not stop")
        time.sleep(0.001)


def receive(pipe: Connection, limit_s: float = GENEROUS) -> Any:
    """What the other process sent; an error when it sends nothing."""
    if not pipe.poll(limit_s):
        raise Stuck("the other process sent nothing")
    return pipe.recv()


@contextmanager
def process(target: Callable[..., None], *arguments: object, ends: int = 0) -> Iterator[Connection]:
    """Runs `target(pipe, *arguments)` in a fresh process; ends it in any case, and checks how it ended: with the status
    `ends`, of a process that its test kills the signal's negative number."""
    ours, theirs = _SPAWNING.Pipe()
    made = _SPAWNING.Process(target=_run, args=(dict(os.environ), signal.SIGKILL, target, (theirs, *arguments)))
    made.start()
    theirs.close()
    child = Child(made)
    try:
        yield ours
        ours.close()
        found = child.wait(GENEROUS)
        assert found == ends, f"ended with {found}"
    finally:
        child.signal_first(signal.SIGKILL)
        child.wait(GENEROUS)


def _serve(pipe: Connection, path: Sequence[str], packed: bytes) -> None:
    sys.path[:0] = path
    try:
        try:
            make, arguments = pickle.loads(packed)
            made = make(*arguments)
        except BaseException:
            pipe.send(("start", None, traceback.format_exc()))
            return
        pipe.send(("start", os.getpid(), None))
        turn, events = getattr(made, "turn", None), getattr(made, "events", [])
        name = ""
        while name != "close":
            while turn is not None:
                idle_s = turn(pipe.poll())
                if events:
                    pipe.send((None, events, None))
                    events.clear()
                if pipe.poll(idle_s):
                    break
            name, given, more = pipe.recv()
            try:
                pipe.send((name, getattr(made, name)(*given, **more), None))
            except Exception:
                pipe.send((name, None, traceback.format_exc()))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        # The parent is gone, or has given up.
        return


class Remote(AbstractContextManager["Remote"]):
    """`make(*arguments)` in a process of its own. The object has a method `close`, which is called last.

    The constructor does not wait for it, so that several start at once; the first call does. An object with a method
    `turn` works by itself between calls: `turn(called)` returns for how many seconds it has nothing to do. What it
    appends to its list `events` comes into the one here.

    `path`: folders in which the process looks for modules first. `limit_s`: how long an answer may take.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        *arguments: Any,
        name: str = "the other process",
        environment: Mapping[str, str] | None = None,
        path: Sequence[str] = (),
        limit_s: float = GENEROUS,
    ) -> None:
        self.name, self.limit_s = name, limit_s
        self.events: list[Any] = []
        self.pipe, theirs = _FORKING.Pipe()
        packed = pickle.dumps((make, arguments))
        self.child = Child.forked(_serve, theirs, path, packed, environment={**os.environ, **(environment or {})})
        theirs.close()
        self._started = False

    @property
    def pid(self) -> int:
        """The process id."""
        return self.child.pid

    def take(self, timeout_s: float) -> tuple[str | None, Any, str | None] | None:
        """The next message: a method, what it returned, and its traceback if it raised. None if none comes in time."""
        try:
            if not self.pipe.poll(timeout_s):
                return None
            name, value, error = self.pipe.recv()
        except (EOFError, ConnectionError):
            status = self.child.wait(5)
            raise Stuck(f"{self.name} ended with status {status}") from None
        if name is None:
            self.events += value
        return name, value, error

    def wait_up(self) -> None:
        """Until the object is made."""
        if not self._started:
            self.answer("start")
            self._started = True

    def tell(self, method: str, *arguments: Any, **more: Any) -> None:
        """Calls a method. `answer` takes what comes of it; without that, it is dropped."""
        self.wait_up()
        self.pipe.send((method, arguments, more))

    def answer(self, method: str) -> Any:
        """What a method that was called returned."""
        deadline = time.monotonic() + self.limit_s
        while (left := deadline - time.monotonic()) > 0:
            found = self.take(left)
            if found is not None and found[0] == method:
                if found[2] is not None:
                    raise RemoteError(f"{method} failed in {self.name}:\n{found[2]}")
                return found[1]
        raise Stuck(f"{self.name} does not answer {method} within {self.limit_s:.0f} s")

    def ask(self, method: str, *arguments: Any, **more: Any) -> Any:
        """Calls a method and returns what it does."""
        self.tell(method, *arguments, **more)
        return self.answer(method)

    def freeze(self) -> None:
        """It does nothing from now on, and is not gone."""
        freeze(self.pid)

    def thaw(self) -> None:
        """It goes on."""
        self.child.signal_first(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        self.child.kill()
        self.pipe.close()

    def close(self) -> int | None:
        """Ends it in order, by force if that does not work; its exit status, None of one that was killed before."""
        if self.pipe.closed:
            return None
        self.thaw()
        with suppress(Stuck, OSError, RemoteError):
            self.tell("close")
            self.answer("close")
        status = self.child.wait(GENEROUS)
        self.kill()
        return -signal.SIGKILL if status is None else status

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        status = self.close()
        if kind is None and status not in (0, None):
            raise Stuck(f"{self.name} ended with status {status}")
