"""Every key that can be configured, with its value in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict, cast

from . import _lib, _wire


class Setting(TypedDict):
    """A key.

    `parts` says whose configuration has it: "agent", "worker", "scheduler", "listener", "aggregator", "connector".
    `giver` says who sets it: the "operator" of an engine, the "program" that holds the engine, or the "environment"
    alone. `type` says in words which values it takes, `unit` of what a number is. Where `default` is None, `otherwise`
    says in words what holds, or "required". `value` is in effect, and comes from `source`. `variable` is the
    environment variable. `former` is the key's earlier name, if the value was given under it. A key that `is_retired`
    has no effect.
    """

    key: str
    parts: list[str]
    giver: Literal["operator", "program", "environment"]
    type: str
    unit: str
    default: object
    otherwise: str
    value: object
    source: Literal["given", "environment", "default"]
    variable: str | None
    former: str | None
    help: str
    is_retired: bool


class UnknownVariable(TypedDict):
    """An environment variable called KVFERRY_* that nothing reads, and the one that may be meant."""

    name: str
    nearest: str | None


class Description(TypedDict):
    """All keys, and the environment variables that are set in vain."""

    settings: list[Setting]
    unknown_variables: list[UnknownVariable]


def describe(given: Mapping[str, object] | None = None) -> Description:
    """Describes every key, with the value that it has when an operator gives `given`, as in vLLM's
    `kv_connector_extra_config`, in this process's environment.

    Raises `InvalidArgumentError` that names the key or variable, its value and what was expected; for an unknown key,
    the nearest known one.
    """
    packed = _wire.pack("kv_connector_extra_config", given or {})
    return cast(Description, _wire.unpack_map("a description", _lib.ask("kvf_settings_describe", packed)))
