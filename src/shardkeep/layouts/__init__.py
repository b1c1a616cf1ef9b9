"""What the files of a checkpoint look like, and when a checkpoint exists."""
