"""Tests of the CUDA driver double: `selftest.py OUTDIR` with what `build OUTDIR` made. Standard library only.

Every test runs in a process of its own, so that one which must die by a signal can, and settings can differ.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import traceback

from cases import TESTS
from driver import OUTDIR, helper_commands

MODULES = ("cases_driver", "cases_memory", "cases_pools", "cases_sharing", "cases_work", "cases_capture")


def main() -> int:
    """Runs one test by name, or all in processes of their own; the exit status."""
    for module in MODULES:
        importlib.import_module(module)
    if len(sys.argv) > 2 and sys.argv[2] == "helper_commands":
        helper_commands()
        return 0
    if len(sys.argv) > 2:
        try:
            TESTS[sys.argv[2]][0]()
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    failed = []
    for name, (_, settings, status) in TESTS.items():
        start = time.monotonic()
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVFERRY_CUDA_DOUBLE_", "CUDA_"))}
        command = [sys.executable, __file__, OUTDIR, name]
        try:
            given = {**environment, **settings}
            ended = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)
            good, text = ended.returncode == status, ended.stdout + ended.stderr
            # An abort must be the double's own.
            good = good and (status != -signal.SIGABRT or "cuda double: " in text)
        except subprocess.TimeoutExpired:
            good, text = False, "it hangs"
        print(f"{'passed' if good else 'FAILED'}  {name} ({time.monotonic() - start:.2f} s)", flush=True)
        if not good:
            failed.append(name)
            print(text)
    print(f"{len(TESTS) - len(failed)} passed, {len(failed)} failed{''.join(f', {name}' for name in failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
