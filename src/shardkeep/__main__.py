"""`python -m shardkeep` is the `shardkeep` command."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("shardkeep.cli.main", run_name="__main__", alter_sys=True)
