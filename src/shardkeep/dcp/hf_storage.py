"""The names of `torch.distributed.checkpoint.hf_storage`."""

from shardkeep.storages.hugging_face import HuggingFaceStorageWriter
from shardkeep.storages.hugging_face_reader import HuggingFaceStorageReader

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter"]
