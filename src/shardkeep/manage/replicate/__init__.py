"""Replication of committed checkpoints to a second root."""
