"""
Values that several ranks hold, written by one of them.
"""

from __future__ import annotations

import dataclasses

from shardkeep.protocol.metadata import MetadataIndex
from shardkeep.protocol.plans import SavePlan, WriteItem, chunk_nbytes


def dedup_save_plans(all_plans: list[SavePlan], save_to_lowest_rank: bool = False) -> list[SavePlan]:
    """
    Return the plans with each item in one of them only, so that all ranks write about as much.

    An item that several ranks have goes to the one that has least to write, the largest items first; sizes are those
    of the chunks. The plans given are not changed, and items keep their order.

    Args:
        all_plans: What each rank could write.
        save_to_lowest_rank: Choose the first rank that has the item instead.

    """
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(all_plans):
        for item in plan.items:
            held_by = holders.setdefault(item.index, [])
            if not held_by or held_by[-1] != rank:
                held_by.append(rank)
            items.setdefault(item.index, item)

    writer = {index: ranks[0] for index, ranks in holders.items()}
    if not save_to_lowest_rank:
        load = [0] * len(all_plans)
        sizes = {index: chunk_nbytes(item) or 1 for index, item in items.items()}
        shared = []
        for index, ranks in holders.items():
            if len(ranks) == 1:
                load[ranks[0]] += sizes[index]
            else:
                shared.append(index)
        for index in sorted(shared, key=lambda each: -sizes[each]):
            writer[index] = min(holders[index], key=load.__getitem__)
            load[writer[index]] += sizes[index]
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if writer[item.index] == rank])
        for rank, plan in enumerate(all_plans)
    ]


def dedup_tensors(all_plans: list[SavePlan]) -> list[SavePlan]:
    """Return the plans with each item only in the first plan that has it."""
    return dedup_save_plans(all_plans, save_to_lowest_rank=True)
