"""`scripts/bench`: the whole table of what is asked of kvferry's speed, measured and judged."""
