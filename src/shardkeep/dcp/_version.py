"""
The name of `torch.distributed.checkpoint._version`.

Torch sets it while it looks at checkpoints of torch 2.3; here which flattening is meant is an argument.
"""

_derived_version: str | None = None
