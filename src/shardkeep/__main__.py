"""`python -m shardkeep` is the `shardkeep` command."""

from __future__ import annotations

import sys

from shardkeep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
