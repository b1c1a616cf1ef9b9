"""Bytes to bytes: what is done to a stream on its way to a file, and undone on its way back."""
