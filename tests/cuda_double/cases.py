"""The double's tests by name. The modules `cases_*` add to them."""

from __future__ import annotations

from collections.abc import Callable

TESTS: dict[str, tuple[Callable[[], None], dict[str, str], int]] = {}


def case(settings: dict[str, str] | None = None, status: int = 0) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a test, with environment variables and the exit status (a signal's number, negative) it must have."""

    def register(test: Callable[[], None]) -> Callable[[], None]:
        TESTS[test.__name__] = (test, settings or {}, status)
        return test

    return register
