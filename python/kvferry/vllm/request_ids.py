"""Request ids that the library does not take: what it calls such requests, and how vLLM gets its own ids back.

Clients and proxies may give vLLM an id of any length (`X-Request-Id`). The library takes texts of 1 to 512 bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

LONGEST = 512
"""Bytes of an id or a name that the library takes."""

_SHOWN = 48
"""Characters of a long id that are kept, for people who read logs."""

_DIGESTED = re.compile(r"\.\.\.sha256-[0-9a-f]{64}\Z")


def is_taken(text: str) -> bool:
    """Tells whether the library takes an id or a name."""
    try:
        return 0 < len(text.encode()) <= LONGEST
    except UnicodeEncodeError:
        # A part of a surrogate pair, which JSON can spell.
        return False


def digest(text: str) -> str:
    """A text's SHA-256, the same in every engine."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def library_id(request_id: str) -> str:
    """The id of a request in the library and the log: vLLM's, or a digest of one that the library does not take.

    An id that looks like such a digest gets one of its own, so that no client can choose another request's."""
    if is_taken(request_id) and not _DIGESTED.search(request_id):
        return request_id
    begins = request_id[:_SHOWN].encode("utf-8", "replace").decode()
    return f"{begins}...sha256-{digest(request_id)}"


class LongIds:
    """The scheduler side's part: which of vLLM's ids the workers have to know, from the first work for a request until
    vLLM has forgotten it."""

    def __init__(self) -> None:
        # By the library's ids: whether the request has ended, and vLLM keeps it until the workers have reported it.
        self._live: dict[str, bool] = {}
        self._news: dict[str, str | None] = {}

    def of(self, request_id: str) -> str:
        """The library's id of a request for which there may be work."""
        own = library_id(request_id)
        if own != request_id:
            if own not in self._live:
                self._change(own, request_id)
            # Also where one of the same id has ended and waits for its report: this one goes on after that.
            self._live[own] = False
        return own

    def end(self, request_id: str, kept: bool) -> None:
        """A request has ended; `kept`: vLLM keeps it until the workers have reported it."""
        own = library_id(request_id)
        if own not in self._live:
            return
        self._live[own] = kept
        if not kept:
            self._forget(own)

    def reported(self, request_id: str) -> None:
        """All workers have reported a request, which is over if it has ended."""
        own = library_id(request_id)
        if self._live.get(own):
            self._forget(own)

    def take(self) -> Mapping[str, str | None]:
        """Takes the changes for the workers: vLLM's ids by the library's, None for those that they may forget."""
        taken, self._news = self._news, {}
        return taken

    def _forget(self, own: str) -> None:
        del self._live[own]
        self._change(own, None)

    def _change(self, own: str, request_id: str | None) -> None:
        # The workers have not heard of the change before, which this one takes back.
        if own in self._news:
            del self._news[own]
        else:
            self._news[own] = request_id
