"""The names of `torch.distributed.checkpoint`, over shardkeep's own code."""
