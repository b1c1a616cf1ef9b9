"""The names of `torch.distributed.checkpoint._extension`."""

from shardkeep.codec.extensions import Extension, StreamTransformExtension
from shardkeep.codec.registry import ExtensionRegistry
from shardkeep.codec.zstd import ZStandard

__all__ = ["Extension", "ExtensionRegistry", "StreamTransformExtension", "ZStandard"]
