"""The names of `torch.distributed.checkpoint._hf_utils`."""

from shardkeep.dcp._impl.hf_files import DATA_KEY as DATA_KEY
from shardkeep.dcp._impl.hf_files import DATA_OFFSETS_KEY as DATA_OFFSETS_KEY
from shardkeep.dcp._impl.hf_files import DCP_SHARDING_INFO_KEY as DCP_SHARDING_INFO_KEY
from shardkeep.dcp._impl.hf_files import DCP_VERSION_KEY as DCP_VERSION_KEY
from shardkeep.dcp._impl.hf_files import DEFAULT_EXTRA_METADATA_KEY as DEFAULT_EXTRA_METADATA_KEY
from shardkeep.dcp._impl.hf_files import DTYPE_KEY as DTYPE_KEY
from shardkeep.dcp._impl.hf_files import DTYPE_MAP as DTYPE_MAP
from shardkeep.dcp._impl.hf_files import HF_DCP_VERSION as HF_DCP_VERSION
from shardkeep.dcp._impl.hf_files import NUM_BYTES_FOR_HEADER_LEN as NUM_BYTES_FOR_HEADER_LEN
from shardkeep.dcp._impl.hf_files import SHAPE_KEY as SHAPE_KEY
from shardkeep.dcp._impl.hf_files import SHARDED_DIR_NAME as SHARDED_DIR_NAME
from shardkeep.dcp._impl.hf_files import _gen_file_name as _gen_file_name
from shardkeep.dcp._impl.hf_files import _get_dcp_custom_metadata as _get_dcp_custom_metadata
from shardkeep.dcp._impl.hf_files import _get_dtype as _get_dtype
from shardkeep.dcp._impl.hf_files import _get_safetensors_file_metadata as _get_safetensors_file_metadata
from shardkeep.dcp._impl.hf_files import _HFStorageInfo as _HFStorageInfo
from shardkeep.dcp._impl.hf_files import _metadata_fn as _metadata_fn
from shardkeep.layouts.safetensors import CUSTOM_METADATA_KEY as CUSTOM_METADATA_KEY
from shardkeep.layouts.safetensors import FILE_NAME as FILE_NAME
from shardkeep.layouts.safetensors import FORMAT_KEY as FORMAT_KEY
from shardkeep.layouts.safetensors import FORMAT_VALUE as FORMAT_VALUE
from shardkeep.layouts.safetensors import SAVED_OFFSETS_KEY as SAVED_OFFSETS_KEY
from shardkeep.layouts.safetensors import SHARDED_FILE_NAME as SHARDED_FILE_NAME
from shardkeep.layouts.safetensors import SUFFIX as SUFFIX
