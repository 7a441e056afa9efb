"""Counters of workers: plain dicts that merge by addition."""

from __future__ import annotations

from collections.abc import Mapping

from . import _lib, _wire


def merge(left: Mapping[str, object], right: Mapping[str, object]) -> dict[str, object]:
    """The sum of two stats dicts, as in `Report["stats"]` or from `Worker.stats`.

    Associative and commutative; the empty dict is the identity.
    """
    return _wire.unpack_map("stats", _lib.stats_merge(_wire.pack("stats", left), _wire.pack("stats", right)))
