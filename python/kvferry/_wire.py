"""msgpack at the boundary: configuration, params and reports."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from typing import Any

import msgpack

from . import _lib
from ._errors import invalid, make_error


def pack(what: str, value: Mapping[str, object]) -> bytes:
    """`value` as msgpack; what msgpack cannot hold raises `InvalidArgumentError` that says so."""
    if not isinstance(value, Mapping):
        raise invalid(f"{what} must be a mapping, not {type(value).__name__}")
    try:
        packed: bytes = msgpack.packb(dict(value), use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise invalid(f"{what} holds a value that cannot be passed on: {error}") from error
    return packed


def unpack_map(what: str, data: bytes) -> dict[str, Any]:
    """msgpack from libkvferry as a dict."""
    value = msgpack.unpackb(data, raw=False, strict_map_key=False)
    if not isinstance(value, dict):
        raise make_error(-7, "corrupt", f"expected {what} as a map, got {type(value).__name__}")
    return value


def ids_from_bytes(data: bytes) -> list[int]:
    """Block ids from their wire form, little-endian 32-bit words."""
    ids = array("I", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def ids_to_bytes(ids: list[int]) -> bytes:
    """The inverse of `ids_from_bytes`."""
    try:
        words = array("I", ids)
    except (TypeError, OverflowError) as error:
        raise invalid(f"block ids must be integers of 32 bits: {error}") from error
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _with_ids(body: dict[str, Any]) -> dict[str, Any]:
    for failure in body.get("failed_recving", ()):
        failure["invalid_blocks"] = ids_from_bytes(failure["invalid_blocks"])
    return body


def decode_outcome(data: bytes) -> dict[str, Any]:
    """An aggregator's outcome with its block ids as lists."""
    return _with_ids(unpack_map("an outcome", data))


def decode_report(data: bytes) -> dict[str, Any]:
    """An encoded worker report as a dict, checked by libkvferry."""
    return _with_ids(unpack_map("a worker report", _lib.ask("kvf_report_decode", _lib.data("a report", data))))


def encode_report(report: dict[str, Any]) -> bytes:
    """A worker report in its versioned envelope."""
    if not isinstance(report, Mapping):
        raise invalid(f"a report must be bytes, or a dict as decode_report makes it, not {type(report).__name__}")
    body = dict(report)
    body["failed_recving"] = [
        {**failure, "invalid_blocks": ids_to_bytes(failure["invalid_blocks"])}
        for failure in report.get("failed_recving", ())
    ]
    return _lib.ask("kvf_report_encode", pack("report", body))
