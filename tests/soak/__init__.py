"""
The long run: jobs of several ranks save, are killed in many ways and go on; whatever was acknowledged is there, and exact.

    contents   what a checkpoint holds, as a function of its job and step alone
    rough      a root whose disk fails, and clocks that jump
    network    a bucket behind a network that fails
    job        what the ranks do
    places     where checkpoints lie: folders, and buckets by boto3
    reader     reads checkpoints by docs/format.md, without a line of shardkeep
    decoding   undoes codecs by docs/format.md and docs/codecs.md, likewise
    ledger     what the ranks wrote down, and what must therefore be on disk
    checker    compares the two
    rounds     what goes wrong in a round
    scene      where jobs save: a disk, a bucket, or both
    driver     goes from round to round
"""
