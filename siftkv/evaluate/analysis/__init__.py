"""Why sifting works, on a user's model: the evidence of "DiffKV" (SOSP 2025, arXiv 2412.03131), measured anew."""
