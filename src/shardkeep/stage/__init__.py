"""Host memory between tensors and files, under a budget."""
