"""The names of `torch.distributed.checkpoint._extension`."""

from shardkeep.codecs.stream_extensions import *
