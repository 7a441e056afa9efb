"""The options of `kv_connector_extra_config`: their names, types and defaults, checked before anything starts."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Side = Literal["worker", "scheduler", "both"]

DEFAULT_PORT = 5680
"""First port of the handshake listener; the data-parallel index is added. Next to none of the ports that vLLM's own
connectors default to (5600 and up by data-parallel index, 14579)."""


class OptionError(ValueError):
    """An option of the connector is unknown, of the wrong type, or out of its range."""


class Option(NamedTuple):
    """One key of `kv_connector_extra_config`."""

    side: Side
    check: Callable[[str, object], object]
    env: str | None
    help: str


def _whole(low: int, high: int) -> Callable[[str, object], object]:
    def check(name: str, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise OptionError(f"{name} must be a whole number from {low} to {high}, not {value!r}")
        return value

    return check


def _text(name: str, value: object) -> object:
    if not isinstance(value, str) or not value:
        raise OptionError(f"{name} must be a text that is not empty, not {value!r}")
    return value


def _one_of(*choices: str) -> Callable[[str, object], object]:
    def check(name: str, value: object) -> object:
        if value not in choices:
            raise OptionError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        return value

    return check


def _flag(name: str, value: object) -> object:
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be true or false, not {value!r}")
    return value


def _settings(name: str, value: object) -> object:
    if not isinstance(value, Mapping):
        raise OptionError(f'{name} must be a map of UCX settings such as {{"TLS": "tcp"}}, not {value!r}')
    settings = {}
    for key, setting in value.items():
        if not isinstance(key, str) or not isinstance(setting, str | int | float):
            raise OptionError(f"{name}: {key!r}: {setting!r} must be the name of a UCX setting and its value")
        if key.startswith("UCX_"):
            raise OptionError(f"{name}: write {key!r} without its prefix, as {key.removeprefix('UCX_')!r}")
        settings[key] = ("y" if setting else "n") if isinstance(setting, bool) else str(setting)
    return settings


_MS = _whole(1, 24 * 3600 * 1000)

OPTIONS: dict[str, Option] = {
    "host": Option(
        "scheduler",
        _text,
        "KVFERRY_HOST",
        "Address of the handshake listener that is told to decode engines. Default: VLLM_HOST_IP when set, else the "
        "address of this host that routes to others.",
    ),
    "port": Option(
        "scheduler",
        _whole(0, 65535),
        "KVFERRY_PORT",
        f"Port of the handshake listener, plus the data-parallel index; 0 takes a free one. Default {DEFAULT_PORT}.",
    ),
    "advertise_local": Option(
        "scheduler", _flag, None, "Allow a loopback address to be told to others without it being given as host."
    ),
    "lease_ms": Option(
        "scheduler",
        _whole(1000, 24 * 3600 * 1000),
        None,
        "How long a finished prefill's blocks are kept without a sign of life from the decode engine. Default 30000.",
    ),
    "key_file": Option(
        "both",
        _text,
        "KVFERRY_KEY_FILE",
        "File of the key that all engines share; handshakes and messages are then sealed. Make one by `kvferry key`.",
    ),
    "transport": Option("worker", _one_of("auto", "tcp", "shm"), None, "Transports that UCX may use. Default auto."),
    "ucx": Option("worker", _settings, None, 'UCX settings without the UCX_ prefix, such as {"NET_DEVICES": "eth0"}.'),
    "ucx_lib": Option("worker", _text, None, "Path of the libucp to use."),
    "window": Option("worker", _whole(1, 65536), None, "UCX operations in flight at once."),
    "handshake_timeout_ms": Option("worker", _MS, None, "Longest time for a handshake, retries included."),
    "transfer_timeout_ms": Option("worker", _MS, None, "Longest time for one request's reads."),
    "verdict_timeout_ms": Option("worker", _MS, None, "Longest wait for the producer's word that the lease held."),
    "verify": Option(
        "worker",
        _flag,
        None,
        "Check each receive against a digest that the producer makes of its own bytes. Default false.",
    ),
    "request_log": Option(
        "worker",
        _text,
        "KVFERRY_REQUEST_LOG",
        "File that gets one JSON line per finished receive and rank.",
    ),
    "telemetry": Option("worker", _flag, None, "Count, for vLLM's log line and its metrics. Default true."),
    "trace": Option(
        "worker",
        _text,
        "KVFERRY_TRACE",
        "File to be made for a trace of the lives of requests; %p stands for the process id.",
    ),
}
"""Every key that `kv_connector_extra_config` may have. An environment variable counts where the key is absent."""


@dataclass(frozen=True)
class Options:
    """Checked options, only those that were given, by the side that uses them."""

    worker: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key, OPTIONS, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; the keys are {', '.join(sorted(OPTIONS))}"


def _from_environment(key: str, option: Option, env: Mapping[str, str]) -> object | None:
    text = env.get(option.env) if option.env else None
    if not text:
        return None
    return int(text) if key == "port" and text.isdecimal() else text


def parse_options(extra: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> Options:
    """Checks `kv_connector_extra_config` and fills in environment variables.

    Raises `OptionError` that names the key, its value and what was expected; for an unknown key, the nearest known one.
    """
    for key in extra:
        if key not in OPTIONS:
            raise OptionError(f"kv_connector_extra_config has an unknown key {key!r}{_nearest(str(key))}")
    sides: dict[str, dict[str, Any]] = {"worker": {}, "scheduler": {}}
    for key, option in OPTIONS.items():
        if extra.get(key) is not None:
            name, value = f"kv_connector_extra_config[{key!r}]", extra[key]
        else:
            name, value = f"the environment variable {option.env}", _from_environment(key, option, env)
        if value is not None:
            for side in sides if option.side == "both" else (option.side,):
                sides[side][key] = option.check(name, value)
    host_ip = env.get("VLLM_HOST_IP")
    if host_ip and "host" not in sides["scheduler"]:
        # vLLM's own word for "this node's address as the others know it".
        sides["scheduler"]["host"] = host_ip
    sides["scheduler"].setdefault("port", DEFAULT_PORT)
    return Options(**sides)
