"""Engines of workers and scheduler sides, without vLLM, in processes of their own."""
