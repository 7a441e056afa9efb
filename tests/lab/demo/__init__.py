"""What `scripts/demo` runs: two vLLM engines on CPU that hand KV caches over, checked against a single one."""
