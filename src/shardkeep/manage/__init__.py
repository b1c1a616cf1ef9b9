"""Many checkpoints over time: which there are, when one is due, which are kept."""
