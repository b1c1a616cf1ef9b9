"""Shaping and moving whole state dicts: iterate, gather, offload, copy, broadcast, distribute, flatten."""
