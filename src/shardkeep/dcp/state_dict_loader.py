"""The names of `torch.distributed.checkpoint.state_dict_loader`."""

from shardkeep.compat.load_driver import _load_state_dict, _load_state_dict_from_keys, load, load_state_dict

__all__ = ["_load_state_dict", "_load_state_dict_from_keys", "load", "load_state_dict"]
