"""Environment variables that are options of kvferry, and which of them are wrong."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from . import settings
from ._errors import InvalidArgumentError


@contextmanager
def without(names: Iterable[str]) -> Iterator[None]:
    """Meanwhile this process, whose environment the library reads, does not have these variables."""
    held = {name: os.environ.pop(name) for name in list(names) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


def variables() -> list[str]:
    """The variables of this process that may be options; not the one that the library is loaded by."""
    return [name for name in os.environ if name.startswith("KVFERRY_") and name != "KVFERRY_LIBRARY"]


def wrong_variables() -> dict[str, str]:
    """Returns this process's variables whose values the library refuses, with its message about each."""
    wrong = {}
    for name in variables():
        with without(other for other in variables() if other != name):
            try:
                settings.describe()
            except InvalidArgumentError as error:
                wrong[name] = error.message.removeprefix("kvf_settings_describe: ")
    return wrong
