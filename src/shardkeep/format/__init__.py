"""What reaches the disk, as values: boxes, dtypes, plain values, index, header and record. No I/O."""
