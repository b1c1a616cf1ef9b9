"""Ranks of a job: which there are, and how they agree through a key-value store."""
