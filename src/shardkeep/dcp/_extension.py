"""The names of `torch.distributed.checkpoint._extension`."""

from shardkeep.codecs.stream_extensions import Extension, ExtensionRegistry, StreamTransformExtension, ZStandard

__all__ = ["Extension", "ExtensionRegistry", "StreamTransformExtension", "ZStandard"]
