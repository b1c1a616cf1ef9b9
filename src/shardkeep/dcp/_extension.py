"""The names of `torch.distributed.checkpoint._extension`."""

from shardkeep.codecs.stream_extensions import Extension as Extension
from shardkeep.codecs.stream_extensions import ExtensionRegistry as ExtensionRegistry
from shardkeep.codecs.stream_extensions import StreamTransformExtension as StreamTransformExtension
from shardkeep.codecs.stream_extensions import ZStandard as ZStandard
