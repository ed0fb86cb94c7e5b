"""An OpenAI-compatible server over one engine, and what it shows of its cache."""
