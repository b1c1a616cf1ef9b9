"""`python -m shardkeep` is the `shardkeep` command."""

import sys

from shardkeep.cli.main import main

sys.exit(main())
