"""`kvferry bench`: what the library costs and how fast it is, beside NIXL, Mooncake and the medium.

A measurement runs in processes of its own, driven over pipes (`pair`, `child`). What moves the bytes in them is an
engine (`engines`): kvferry's agent, its workers, NIXL, Mooncake, or the bare medium. All engines of a run take turns,
round by round, and only the one whose turn it is runs: the processes of the others are stopped.
"""
