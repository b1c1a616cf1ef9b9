"""Model and optimizer state: canonical names, and the way from live objects to state dicts and back."""
