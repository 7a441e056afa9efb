"""Every finding, each of its outcomes, what it means, and what to do about it.

`docs/doctor.md` is written from these tables.
"""

from .attempts import ATTEMPTS
from .case import STATES, Case, Kind, State
from .machine import MACHINE
from .software import SOFTWARE

__all__ = ["KINDS", "STATES", "Case", "Kind", "State"]

KINDS: dict[str, Kind] = {**SOFTWARE, **MACHINE, **ATTEMPTS}
"""All findings, in the order in which they are told."""
