"""The names of `torch.distributed.checkpoint._state_dict_stager`."""

from shardkeep.stage.stagers import StateDictStager

__all__ = ["StateDictStager"]
