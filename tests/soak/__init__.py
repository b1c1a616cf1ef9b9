"""
The long run: jobs of several ranks save, are killed in many ways and go on; whatever was acknowledged is there, and exact.

    contents   what a checkpoint holds, as a function of its job and step alone
    rough      a root whose disk fails, and clocks that jump
    job        what the ranks do
    reader     reads checkpoints by docs/format.md, without a line of shardkeep
    ledger     what the ranks wrote down, and what must therefore be on disk
    checker    compares the two
    rounds     what goes wrong in a round
    driver     goes from round to round
"""
