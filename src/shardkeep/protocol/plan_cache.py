"""
Plans of the previous save, used again where nothing changed.

A rank whose plan is the one it sent before sends only word of that, and gets only word back where its part of the
global plan is the one it has. The cache belongs to one planner, so that two states saved in turn by two planners never
meet, and it serves one group of ranks; plans are the same only if everything in them is, dtypes and planner data
included. A round that did not reach its end on a rank is forgotten there: the rank sends its whole plan in the next
one, and gets a whole plan back.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

from shardkeep.errors import RanksDisagree
from shardkeep.protocol.metadata import Metadata, TensorStorageMetadata
from shardkeep.protocol.plans import SavePlan

MakePlan = Callable[[list[SavePlan]], tuple[list[SavePlan], Metadata]]


def _compare_save_plans(plan: SavePlan, other_plan: SavePlan) -> bool:
    """Say whether two plans are the same in everything, index hints included."""
    return plan == other_plan and all(
        mine.index.index == other.index.index for mine, other in zip(plan.items, other_plan.items, strict=True)
    )


def _contains_usable_plan(delta_plans: list[SavePlan]) -> bool:
    """Say whether any rank sent a plan, and not only word that it has not changed."""
    return any(plan and plan.usable for plan in delta_plans)


def _merge_delta_local_plans(cached_plans: list[SavePlan], delta_plans: list[SavePlan]) -> list[SavePlan]:
    """Return each rank's new plan, or its previous one where it sent none."""
    return [
        cached if delta and not delta.usable else delta
        for cached, delta in zip(cached_plans, delta_plans, strict=False)
    ]


class PlanCache:
    """The previous save of one planner on one rank."""

    def __init__(self) -> None:
        # This rank's own plan, and the one it carried out.
        self._local: SavePlan | None = None
        self._final: SavePlan | None = None
        # Set while a round is on its way.
        self._pending: SavePlan | None = None
        # On the coordinator: the plans of all ranks, as they were sent and as they were decided on.
        self._all_local: list[SavePlan] | None = None
        self._all_global: list[SavePlan] = []
        self._metadata: Metadata | None = None

    def offer(self, plan: SavePlan) -> SavePlan:
        """Return what to send for this rank's plan: word that it has not changed, where that is so."""
        if self._pending is not None:  # the previous round failed: who has what is not known
            self._local = self._final = None
        self._pending = plan
        if self._local is not None and self._final is not None and _compare_save_plans(plan, self._local):
            return SavePlan([], usable=False)
        return plan

    def decide(self, sent: list[SavePlan], make: MakePlan) -> tuple[list[SavePlan], list[SavePlan], Metadata]:
        """
        Return what to send to each rank, the global plan, and its metadata. Called on the coordinator.

        Raises:
            RanksDisagree: a rank sent word of a plan that this planner never saw.

        """
        if self._metadata is not None and not _contains_usable_plan(sent) and len(sent) == len(self._all_global):
            return [_word(plan) for plan in sent], self._all_global, _copied(self._metadata)
        merged = self._merged(sent)
        global_plan, metadata = make(merged)
        answers = [
            _word(mine) if self._has_already(rank, mine, new) else new
            for rank, (mine, new) in enumerate(zip(sent, global_plan, strict=True))
        ]
        self._all_local, self._all_global, self._metadata = merged, global_plan, metadata
        return answers, global_plan, _copied(metadata)

    def accept(self, plan: SavePlan) -> SavePlan:
        """Return the plan to carry out, given what came back; ends the round."""
        if not plan.usable:
            if self._final is None:
                raise RanksDisagree(
                    "the coordinator says that this rank's plan has not changed, but it has none",
                    hint="use one planner for all saves on each rank, or none of them with enable_plan_caching",
                )
            # The storage may have named this save's files in the word that came back.
            kept = self._final.storage_data if plan.storage_data is None else plan.storage_data
            plan = dataclasses.replace(self._final, storage_data=kept)
        self._final = plan
        self._local, self._pending = self._pending, None
        return plan

    def _merged(self, sent: list[SavePlan]) -> list[SavePlan]:
        known = self._all_local or []
        silent = [rank for rank, plan in enumerate(sent) if not plan.usable]
        if silent and len(known) != len(sent):
            raise RanksDisagree(
                f"ranks {silent} say that their plans have not changed, but this planner knows the plans of "
                f"{len(known)} ranks, and these are {len(sent)}",
                hint="use one planner for all saves of a group of ranks, on each of them, or a new one on all of them",
            )
        return [
            plan if plan.usable else dataclasses.replace(known[rank], storage_data=plan.storage_data)
            for rank, plan in enumerate(sent)
        ]

    def _has_already(self, rank: int, sent: SavePlan, new: SavePlan) -> bool:
        # A rank that sent its plan may have lost the previous round: it gets the whole.
        return not sent.usable and rank < len(self._all_global) and _compare_save_plans(new, self._all_global[rank])


def _word(sent: SavePlan) -> SavePlan:
    return SavePlan([], storage_data=sent.storage_data, usable=False)


def _copied(metadata: Metadata) -> Metadata:
    """Return metadata that a storage may write into without changing those that are kept."""
    entries = {
        key: TensorStorageMetadata(entry.properties, entry.size, list(entry.chunks))
        if isinstance(entry, TensorStorageMetadata)
        else entry
        for key, entry in metadata.state_dict_metadata.items()
    }
    return dataclasses.replace(metadata, state_dict_metadata=entries, planner_data=copy.copy(metadata.planner_data))
