"""Examines what kvferry would use on this machine, and finds obstacles and remedies (`kvferry doctor`).

Everything that loads libkvferry or UCX runs in processes of its own: UCX reads its environment once, a process has one
UCX, and one that crashes must not take the answer along.
"""

from .findings import Finding, exit_code, markdown
from .kinds import KINDS, STATES, Case, Kind, State

__all__ = ["KINDS", "STATES", "Case", "Finding", "Kind", "State", "exit_code", "markdown"]
