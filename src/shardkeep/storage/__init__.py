"""Where bytes go: one protocol for local files, memory, object stores and fsspec."""
