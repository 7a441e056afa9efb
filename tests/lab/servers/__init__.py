"""vLLM servers on CPU: how they are started, asked and ended."""
