"""What lies under the nouns: versions, loading, errors, and calls with wrong values."""

from __future__ import annotations

import errno
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import cffi
import kvferry
import pytest
from kvferry import _errors, _find, _lib
from kvferry.doctor import inside


def test_versions() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", kvferry.version())
    assert kvferry.abi_version() == _lib.ABI_VERSION
    header = kvferry.header_path().read_text()
    assert f"#define KVF_ABI_VERSION {_lib.ABI_VERSION}\n" in header


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (f"unsigned kvf_abi_version(void) {{ return {_lib.ABI_VERSION + 1}; }}", "has C ABI.*of one release"),
        (f"unsigned kvf_abi_version(void) {{ return {_lib.ABI_VERSION}; }}", "has no kvf_.*of one release"),
        ("int nothing;", "has no kvf_abi_version: it is no libkvferry"),
    ],
)
def test_a_library_of_another_release_is_refused_by_name(code: str, told: str, tmp_path: Path) -> None:
    source, library = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text(f"{code}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    found = subprocess.run(
        [sys.executable, "-c", "import kvferry; kvferry.version()"],
        env={**os.environ, "KVFERRY_LIBRARY": str(library)},
        capture_output=True,
        text=True,
    )
    assert re.search(f"unsupported: {library} {told}", found.stderr), found.stderr


def test_every_code_of_the_header_has_its_class_and_survives_pickling() -> None:
    codes = dict(re.findall(r"KVF_([A-Z_]+) = (-\d+),", kvferry.header_path().read_text()))
    assert len(codes) == len(_errors._CLASSES)
    for name, code in codes.items():
        error = _errors.make_error(int(code), name.lower(), "text")
        assert type(error) is not kvferry.KvferryError
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), again.code, again.name, str(again)) == (type(error), int(code), name.lower(), str(error))


def test_errors_that_are_of_the_system_too_carry_its_numbers() -> None:
    numbers = {"timeout": errno.ETIMEDOUT, "address_in_use": errno.EADDRINUSE, "io": None}
    numbers |= {"unreachable": errno.EHOSTUNREACH, "peer_died": errno.ECONNRESET}
    found = {}
    for name in _errors._CLASSES:
        error = _errors.make_error(-99, name, "what to do")
        assert (error.code, error.args, str(error)) == (-99, (-99, name, "what to do"), f"{name}: what to do")
        if isinstance(error, OSError):
            found[name] = error.errno
            assert (error.strerror, error.filename, error.filename2) == ("what to do", None, None)
            again = pickle.loads(pickle.dumps(error))
            assert (again.errno, again.strerror) == (error.errno, error.strerror)
    assert found == numbers


def test_the_release_is_known_without_the_library() -> None:
    code = "import kvferry; print(kvferry.__version__); print(hasattr(kvferry, 'no_such_name'))"
    environment = {**os.environ, "KVFERRY_LIBRARY": "/no/such/libkvferry.so"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.split() == [kvferry.version(), "False"], done.stderr
    assert kvferry.__version__ == kvferry.version()


def test_stale_and_foreign_handles_are_errors_in_the_library_itself() -> None:
    agent = kvferry.Agent({"transport": "tcp"})
    pointer = agent._handle.get()
    agent.shutdown()
    for name in ("kvf_agent_free", "kvf_agent_free"):
        with pytest.raises(kvferry.NotFoundError, match="no live agent handle"):
            _lib.call(name, pointer)
    with pytest.raises(kvferry.InvalidArgumentError, match="NULL"):
        _lib.call("kvf_agent_free", _lib.load().ffi.NULL)
    aggregator = kvferry.Aggregator([(0, 0)])
    foreign = _lib.load().ffi.cast("kvf_agent *", aggregator._handle.get())
    with pytest.raises(kvferry.InvalidArgumentError, match="of the kind aggregator, expected agent"):
        _lib.call("kvf_agent_free", foreign)
    aggregator.close()


def test_memory_that_can_be_no_outbox_is_refused() -> None:
    ffi = _lib.load().ffi
    memory = ffi.new("uint64_t[]", 8)
    address = int(ffi.cast("uintptr_t", memory))
    with kvferry.Worker({"engine_id": "outbox", "transport": "shm"}) as worker:
        pointer = worker._handle.get()
        for at, capacity in [(0, 64), (address + 1, 56), (address, 15), (address, 0)]:
            with pytest.raises(kvferry.InvalidArgumentError, match="expected at least 16 bytes at a multiple of 8"):
                _lib.call("kvf_worker_set_outbox", pointer, ffi.cast("kvf_outbox *", at), capacity)
        assert worker.poll() is None
        _lib.call("kvf_worker_set_outbox", pointer, ffi.NULL, 0)
    with pytest.raises(kvferry.NotFoundError):
        _lib.call("kvf_worker_set_outbox", pointer, ffi.NULL, 0)
    assert not any(memory), "what was refused was not written to"


@pytest.mark.parametrize(
    ("make", "use"),
    [
        ("Aggregator([(0, 0)])", "take()"),
        ("Worker({'engine_id': 'forked', 'transport': 'shm'})", "poll()"),
        ("Worker({'engine_id': 'forked', 'transport': 'shm'})", "wait(1.0)"),
    ],
)
def test_a_handle_of_another_process_is_refused_after_a_fork(make: str, use: str) -> None:
    code = (
        "import os, sys, kvferry\n"
        f"thing = kvferry.{make}\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        f"        thing.{use}\n"
        "    except kvferry.ShutDownError as error:\n"
        "        os._exit(7 if 'fork' in error.message else 1)\n"
        "    os._exit(2)\n"
        "sys.exit(0 if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7 else 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=os.environ)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(("is_open", "expected"), [(True, "by spawn and not by fork"), (False, "started")])
def test_an_agent_is_refused_after_a_fork_while_the_other_process_has_one(is_open: bool, expected: str) -> None:
    code = (
        "import os, kvferry\n"
        "first = kvferry.Agent({'name': 'first', 'transport': 'tcp'})\n"
        f"if not {is_open}: first.__exit__(None, None, None)\n"
        "pid = os.fork()\n"
        "try:\n"
        "    with kvferry.Agent({'name': 'second', 'transport': 'tcp'}):\n"
        "        os.write(1, b'started %d\\n' % (os.getpid() if pid else 0))\n"
        "except kvferry.UnsupportedError as error:\n"
        "    os.write(1, b'%s 0\\n' % error.message.encode())\n"
        "if pid == 0:\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (child,) = (line for line in lines if line.endswith(" 0"))
    assert expected in child, done.stdout
    assert sum(line.startswith("started ") and not line.endswith(" 0") for line in lines) == 1, "the other one goes on"


def test_a_missing_library_says_what_to_do() -> None:
    environment = {**os.environ, "KVFERRY_LIBRARY": "/no/such/libkvferry.so"}
    code = "import kvferry; kvferry.version()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=environment)
    assert done.returncode == 1
    assert b"cannot load /no/such/libkvferry.so" in done.stderr
    assert b"set KVFERRY_LIBRARY to the path of libkvferry.so" in done.stderr


def test_declarations_leave_out_what_is_for_other_compilers() -> None:
    header = (
        "#ifndef G\n#define G\nint a;\n#ifdef __cplusplus\nint b;\n#else\nint c; // int d;\n#endif\n"
        "#if __STDC_VERSION__ >= 202311L\nint e;\n#endif\n/* int f; */\n#endif\n"
    )
    assert _find.declarations(header).split() == ["int", "a;", "int", "c;"]


def emitted(header: str, path: Path) -> str:
    """What the build of a wheel makes of a header, at `path`."""
    ffi = cffi.FFI()
    ffi.cdef(_find.declarations(header))
    ffi.set_source("ffi", None)
    ffi.emit_python_code(str(path))
    return path.read_text()


def test_a_wheel_has_its_declarations_parsed_and_a_source_tree_parses_them(tmp_path: Path) -> None:
    parsed, header = tmp_path / "ffi.py", tmp_path / "kvferry.h"
    header.write_text("typedef struct { int in_the_header; } kvf_thing;\n")
    assert dict(_lib._declared(parsed, header).typeof("kvf_thing").fields).keys() == {"in_the_header"}
    emitted("typedef struct { int parsed; } kvf_thing;\n", parsed)
    assert dict(_lib._declared(parsed, header).typeof("kvf_thing").fields).keys() == {"parsed"}


@pytest.mark.skipif(not _find.parsed_header().is_file(), reason="this is a source tree, not a wheel")
def test_what_a_wheel_has_parsed_is_its_header(tmp_path: Path) -> None:
    assert _find.parsed_header().read_text() == emitted(kvferry.header_path().read_text(), tmp_path / "ffi.py")


def test_every_candidate_for_ucx_is_told_and_one_is_chosen() -> None:
    found = inside.candidates(None)["candidates"]
    (chosen,) = (candidate for candidate in found if candidate["fate"] == "chosen")
    assert {key: chosen[key] for key in ("path", "version", "source")} == kvferry.ucx_info()
    # Once UCX is open, the answer is that of the search which found it.
    assert inside.candidates("/no/such/libucp.so.0")["candidates"] == found


def test_an_outlook_and_a_survey_refuse_keys_that_do_not_exist() -> None:
    assert {"transport": "tcp", "device": "lo"} in inside.outlook({"transport": "tcp"})["resources"]
    for refused, part in [
        (inside.outlook({"transprt": "tcp"}), "transprt"),
        (inside.survey("127.0.0.1", 1, {"timeout": 1}, None), "timeout"),
        (inside.survey("a b", 1, {"timeout_ms": 1000}, None), "is not a host"),
    ]:
        assert refused["error"] == "invalid_argument"
        assert part in refused["message"]
