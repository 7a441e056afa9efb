"""What a series is run with."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The command line's settings for one series."""

    series: str
    rounds: int
    seed: int
    # Of the series `matrix`: which rows and connectors, all if there are none.
    only: tuple[str, ...] = ()
    connectors: tuple[str, ...] = ()

    def progress(self, done: int, of: int) -> None:
        """Shows how far the series is, where somebody looks."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{self.series}: {done} of {of} ")
            if done == of:
                sys.stderr.write("\n")
            sys.stderr.flush()
        elif done == of or done % max(1, of // 4) == 0:
            sys.stderr.write(f"{self.series}: {done} of {of}\n")
