"""What stands behind the names of `shardkeep.dcp`: planners, values, drivers, storages, and the import hook."""
