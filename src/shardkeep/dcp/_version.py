"""The name of `torch.distributed.checkpoint._version`; here an argument says which flattening is meant."""

_derived_version: str | None = None
