"""Series of faults and load against real engines: what `scripts/chaos` runs."""
