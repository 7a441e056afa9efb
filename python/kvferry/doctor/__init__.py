"""What this machine and process would use, what is in the way, and what to do about it (`kvferry doctor`).

Everything that loads libkvferry or UCX runs in processes of its own: UCX reads its environment once, a process has one
UCX, and one that crashes must not take the answer along.
"""

from .findings import Finding, exit_code, markdown
from .kinds import KINDS, STATES, Case, Kind, State

__all__ = ["KINDS", "STATES", "Case", "Finding", "Kind", "State", "exit_code", "markdown"]
