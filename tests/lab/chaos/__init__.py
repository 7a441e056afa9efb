"""The command `scripts/chaos`."""
