"""The names of `torch.distributed.checkpoint.format_utils`, and its command."""

from shardkeep.dcp._impl.convert import *
from shardkeep.dcp._impl.convert import main as main
from shardkeep.dcp._impl.driver import _load_state_dict, _save_state_dict
from shardkeep.dcp._impl.file_reader import FileSystemReader as FileSystemReader
from shardkeep.dcp._impl.file_writer import FileSystemWriter as FileSystemWriter
from shardkeep.dcp._impl.planners import DefaultLoadPlanner as DefaultLoadPlanner
from shardkeep.dcp._impl.planners import _EmptyStateDictLoadPlanner
from shardkeep.dcp._impl.plans import _create_chunk_list
from shardkeep.layouts.torch_values import *
from shardkeep.state.flatten import flatten_state_dict as flatten_state_dict

if __name__ == "__main__":
    main()
