"""Objects that stand in a state as they are."""
