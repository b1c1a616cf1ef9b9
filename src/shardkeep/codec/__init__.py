"""Bytes to digests."""
