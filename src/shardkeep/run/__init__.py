"""Making it happen: the write and read pipelines."""
