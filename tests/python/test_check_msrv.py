"""`scripts/check-msrv`: when it skips, and when it fails. A stand-in for rustup answers; nothing is downloaded."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from commands import ROOT

UNREACHED = (
    "error: could not download file from 'https://x/y.sha256': error sending request for url (https://x/y.sha256)"
)
UNKNOWN = "error: could not download nonexistent rust version `9.99`: http request returned an unsuccessful status code"


def check(folder: Path, answer: str | None, require: str = "") -> subprocess.CompletedProcess[str]:
    """Runs it where rustup fails with `answer`, or where there is none."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in ("bash", "cat", "dirname", "grep", "mkdir", "mktemp", "rm", "sed"):
        if not (programs / name).exists():
            (programs / name).symlink_to(f"/usr/bin/{name}")
    rustup = programs / "rustup"
    rustup.unlink(missing_ok=True)
    if answer is not None:
        rustup.write_text(f'#!/usr/bin/env bash\necho "$@"\ncat <<"END" >&2\n{answer}\nEND\nexit 1\n')
        rustup.chmod(0o755)
    return subprocess.run(
        ["/usr/bin/bash", str(ROOT / "scripts/check-msrv")],
        env={"PATH": str(programs), "KVFERRY_REQUIRE": require, "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_without_rustup_or_its_server_it_says_that_it_skips(tmp_path: Path) -> None:
    for answer, reason in ((None, "there is no rustup"), (UNREACHED, "error sending request")):
        done = check(tmp_path, answer)
        assert done.returncode == 0
        assert done.stderr.startswith("SKIPPED: ")
        assert reason in done.stderr
        required = check(tmp_path, answer, "netns,msrv")
        assert required.returncode == 1
        assert required.stderr.startswith("error: ")
        assert reason in required.stderr


def test_a_version_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    done = check(tmp_path, UNKNOWN)
    assert done.returncode == 1
    assert "nonexistent rust version" in done.stderr
    assert "SKIPPED" not in done.stderr


def test_the_version_is_that_of_cargo_toml(tmp_path: Path) -> None:
    version = next(
        line.split('"')[1] for line in (ROOT / "Cargo.toml").read_text().splitlines() if line.startswith("rust-version")
    )
    done = check(tmp_path, UNKNOWN)
    assert f"toolchain install {version} --profile minimal" in done.stderr
    for page in ("CONTRIBUTING.md", "docs/rust.md"):
        assert f"Rust {version} or newer" in (ROOT / page).read_text(encoding="utf-8"), page
