"""Measurements, and the files in which their results are kept."""
