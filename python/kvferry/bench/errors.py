"""The errors of the commands."""

from __future__ import annotations


class UsageError(ValueError):
    """What was typed cannot be."""


class BenchError(RuntimeError):
    """A measurement that could not be taken: what failed, and the process's own words."""
