"""What the files look like."""
