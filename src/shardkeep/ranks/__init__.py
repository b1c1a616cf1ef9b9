"""Talking to other ranks, on the CPU only, with a deadline on every wait."""
