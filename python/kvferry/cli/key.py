"""Writes a new key file, for `key_file` of all engines (or the environment variable KVFERRY_KEY_FILE).

The file holds 32 random bytes as hexadecimal digits and may be used by its owner only. Copy it to every host of the
prefill and decode engines by a way that keeps it secret; engines with another key, or without one, are refused.
"""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from ..bench.errors import UsageError

KEY_BYTES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("path", type=Path, metavar="PATH", help="the file to write; it must not exist")


def write_key(path: Path) -> None:
    """Writes a new key to `path`, mode 0600.

    Raises `UsageError` for a file that exists or a folder that cannot be written to; nothing is overwritten.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} exists: give another path, or remove it if no engine uses it any more") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    with os.fdopen(file, "w", encoding="ascii") as out:
        # Whatever the process's umask takes away or a default ACL adds.
        os.fchmod(out.fileno(), 0o600)
        out.write(secrets.token_hex(KEY_BYTES) + "\n")


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    write_key(options.path)
    print(f"wrote a new key to {options.path}")
    return 0
