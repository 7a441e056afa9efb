"""Hand-overs over a link that is limited: `scripts/bench-link`."""
