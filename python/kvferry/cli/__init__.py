"""The command line: `kvferry COMMAND` and `python -m kvferry COMMAND`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from .._errors import KvferryError, UcxMissingError
from .._lib import protocol_versions, ucx_info, version
from ..bench import cli as bench
from ..bench.errors import BenchError, UsageError
from . import config, doctor, key, nixl, plan, trace

BAD_INPUT, FAILED, INTERRUPTED, CLOSED_PIPE = 2, 1, 130, 141
"""Exit codes: what was asked for cannot be; it was tried in vain; and a shell's codes for a program that Ctrl-C has
ended, or SIGPIPE since nobody reads its output."""


_SIMPLE: dict[str, ModuleType] = {"config": config, "doctor": doctor, "key": key, "nixl": nixl, "trace": trace}
"""Commands that are all run in one way."""


class _Version(argparse.Action):
    """Prints the versions of the library, of the protocol and of UCX; the library is loaded only then."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="print the versions and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        try:
            oldest, newest = protocol_versions()
        except KvferryError as error:
            _fail(parser, error)
        print(f"kvferry {version()}")
        print(f"protocol {newest}; speaks {oldest} to {newest}")
        try:
            ucx = ucx_info()
            print(f"UCX {ucx['version']}, {ucx['source']}: {ucx['path']}")
        except UcxMissingError:
            print("UCX none; kvferry doctor says where it was searched for")
        except KvferryError as error:
            print(f"UCX cannot be used: {error.message}")
        parser.exit()


def _fail(parser: argparse.ArgumentParser, error: KvferryError) -> NoReturn:
    parser.exit(FAILED, f"{parser.prog}: failed: {error.message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. Bad input ends in `SystemExit` with 2, as is usual with argparse.

    If nobody reads its output any more, as after `| head`, it ends without a word, as other programs do.
    """
    try:
        try:
            return _run(arguments)
        finally:
            # Also where the parser ends the program, as after --help. There is no sys.stdout where it was closed.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would be written at the interpreter's end, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="kvferry", description="Moves KV-cache blocks between LLM inference engines.")
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan_command = commands.add_parser(
        "plan",
        help="show what a prefill and a decode engine will do",
        description=plan.__doc__,
        epilog=plan.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_arguments(plan_command)
    config.add_arguments(
        commands.add_parser("config", help="show and check the configuration", description=config.__doc__)
    )
    key.add_arguments(commands.add_parser("key", help="write a new key file", description=key.__doc__))
    nixl.add_arguments(
        commands.add_parser("nixl", help="find kvferry's plug-in for stock NIXL, and try it", description=nixl.__doc__)
    )
    doctor_command = commands.add_parser(
        "doctor",
        help="find what is in the way on this machine, and ask a running engine who it is",
        description=doctor.__doc__,
        epilog=doctor.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_arguments(doctor_command)
    bench_command = commands.add_parser(
        "bench", help="measure transfers, also between two hosts, and the rest", description=bench.__doc__
    )
    bench.add_arguments(bench_command)
    trace_command = commands.add_parser(
        "trace",
        help="sum up traces of runs, as text and as a page",
        description=trace.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    trace.add_arguments(trace_command)
    options = parser.parse_args(arguments)
    if options.command == "bench":
        return _bench(bench_command, options)
    if options.command in _SIMPLE:
        command = commands.choices[options.command]
        module = _SIMPLE[options.command]
        try:
            return int(module.run(options))
        except UsageError as error:
            command.exit(BAD_INPUT, f"{command.prog}: error: {error}\n")
        except KvferryError as error:
            # Such as a library that cannot be loaded.
            _fail(command, error)
    try:
        return plan.run(options)
    except UsageError as error:
        plan_command.error(str(error))
    except KvferryError as error:
        # The C function's name says nothing to whoever types a command.
        text = error.message.removeprefix("kvf_plan_describe: ")
        bad = error.name in ("invalid_argument", "exhausted", "out_of_range")
        what = "error" if bad else "cannot be"
        plan_command.exit(BAD_INPUT if bad else FAILED, f"{plan_command.prog}: {what}: {text}\n")


def _bench(command: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        return bench.run(options)
    except UsageError as error:
        command.exit(BAD_INPUT, f"{command.prog} {options.bench}: error: {error}\n")
    except (KvferryError, BenchError) as error:
        # The C function's name says nothing to whoever types a command.
        text = re.sub(r"^(\w+: )?kvf_\w+: ", "", str(error))
        command.exit(FAILED, f"{command.prog} {options.bench}: failed: {text}\n")
    except KeyboardInterrupt:
        command.exit(INTERRUPTED, f"{command.prog} {options.bench}: interrupted\n")
