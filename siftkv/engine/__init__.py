"""The engine: requests, scheduling, model passes, sampling, and the `LLM` front."""
