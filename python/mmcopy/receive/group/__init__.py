"""Receiving on a group of ranks: who reads which bytes, agreed first, and how they get to the others."""

from __future__ import annotations

from .plan import GroupPlan, ItemFacts, ParallelOptions, Section, Strategy, choose_strategy, plan_group

__all__ = ["GroupPlan", "ItemFacts", "ParallelOptions", "Section", "Strategy", "choose_strategy", "plan_group"]
