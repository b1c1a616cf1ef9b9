"""`python -m shardkeep.dcp script.py …`: run a script with `shardkeep.dcp` in the place of torch's checkpoint."""

import sys

from shardkeep.dcp_install import run

if __name__ == "__main__":
    run(sys.argv[1:])
