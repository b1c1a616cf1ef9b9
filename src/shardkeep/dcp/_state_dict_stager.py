"""The names of `torch.distributed.checkpoint._state_dict_stager`."""

from shardkeep.engine.stagers import StateDictStager as StateDictStager
