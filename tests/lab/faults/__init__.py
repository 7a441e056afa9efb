"""Series of faults and load: what `scripts/chaos` runs."""
