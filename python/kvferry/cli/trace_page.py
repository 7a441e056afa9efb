"""A trace as one HTML page: everything is in it, nothing is fetched.

What comes from the file is data: it is put into a script element that browsers do not run, from which the page's own
script takes it and sets it as text. A content security policy allows that one script, by its hash, and no other.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from string import Template
from typing import Any

from .. import trace
from ..trace import Summary, Trace

_FOLDER = Path(__file__).parent
MOST = 50_000
"""Receives in a page; a browser would not draw more in reasonable time. Of more, the last ones are taken."""


def page(read: Trace, summary: Summary) -> str:
    """The page's text, to be written as UTF-8."""
    script = (_FOLDER / "trace_page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = Template((_FOLDER / "trace_page.html").read_text(encoding="utf-8"))
    return template.substitute(script=script, digest=digest, data=_embedded(_data(read, summary)))


def _embedded(value: Any) -> str:
    """JSON that holds nothing that could end the script element or start another."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(read: Trace, summary: Summary) -> dict[str, Any]:
    shown = read.receives[-MOST:]
    begins = [one.began for one in shown] + [one.began for one in read.sends]
    origin = min(begins, default=0.0)
    receives = [
        {
            "process": one.process,
            "request": one.request,
            "outcome": one.outcome,
            "began": one.began - origin,
            "ended": None if one.ended is None else one.ended - origin,
            "moments": {name: at - origin for name, at in one.moments.items()},
            "bytes": one.bytes,
            "blocks": one.blocks,
            "operations": one.operations,
            "engine": one.engine,
            "remote_request": one.remote_request,
            "message": one.message,
        }
        for one in shown
    ]
    sends = [
        {
            "process": one.process,
            "request": one.request,
            "outcome": one.outcome,
            "began": one.began - origin,
            "ended": None if one.ended is None else one.ended - origin,
        }
        for one in read.sends[-MOST:]
    ]
    return {
        "summary": summary,
        "stages": {name: {"first": first, "last": last} for name, (first, last, _) in trace.STAGES.items()},
        "receives": receives,
        "sends": sends,
        "not_shown": len(read.receives) - len(shown),
    }
