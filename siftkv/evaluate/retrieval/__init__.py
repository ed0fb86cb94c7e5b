"""Long-context tasks of RULER's kinds, generated with seeds from public-domain text.

Source of the kinds: "RULER: What's the Real Context Size of Your Long-Context Language Models?" (arXiv 2404.06654).
Texts, names and wordings are this project's own.
"""
