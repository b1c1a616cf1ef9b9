"""Conversion between layouts, and export of weights."""
