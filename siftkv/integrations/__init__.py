"""Adapters to other tools; each imports its tool only when it is used."""
