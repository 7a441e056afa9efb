"""Request ids that the library does not take, and what it calls such requests.

Clients and proxies may give vLLM an id of any length (`X-Request-Id`). The library takes texts of 1 to 512 bytes.
"""

from __future__ import annotations

import hashlib
import re

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
