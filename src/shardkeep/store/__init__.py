"""Where bytes go: local files, memory."""
