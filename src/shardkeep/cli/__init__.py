"""The `shardkeep` command: one file a subcommand."""
