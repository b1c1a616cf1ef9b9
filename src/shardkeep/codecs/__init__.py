"""Bytes to bytes: compression, encryption, and the stream extensions of torch."""
