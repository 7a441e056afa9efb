"""The fault matrix: the same faults against several connectors of real vLLM servers."""
