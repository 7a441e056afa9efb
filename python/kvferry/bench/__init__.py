"""`kvferry bench`: what the library costs and how fast it is.

A measurement runs in processes of its own, driven over pipes (`pair`, `child`). What moves the bytes in them is an
engine (`engines`), such as kvferry's agent or its workers. All engines of a run take turns, round by round, and only
the one whose turn it is runs: the processes of the others are stopped. Between two hosts (`hosts`) the one side is this
process and the other a server.
"""
