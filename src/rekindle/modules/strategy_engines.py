"""The engines that strategies run on: policies for regions, and contexts that offload."""

from typing import Any

from rekindle.offload.context import Offload as OffloadContext
from rekindle.offload.offload_options import offload_strategy
from rekindle.offload.owners import OffloaderSet
from rekindle.policies import Policy
from rekindle.regions.selective import planned_ops
from rekindle.strategy import NumberedOps, Offload, PlannedOps


def runnable_policy(policy: Any) -> Policy:
    """The policy that a selective region runs by; one is made of ops that a plan chose."""
    if policy == PlannedOps(tier=getattr(policy, "tier", "host")):  # nothing to find by an address
        policy = NumberedOps(tier=policy.tier)
    if isinstance(policy, PlannedOps | NumberedOps):
        return planned_ops.policy_of(policy)
    assert isinstance(policy, Policy), "strategy_of reads others into one"
    return policy


def offload_context(strategy: Offload, owner: OffloaderSet | None = None) -> OffloadContext:
    """The context that offloads for an owner; a folder for temporary files is looked up."""
    checked = offload_strategy(
        tier=strategy.tier,
        quota="auto" if strategy.quota is None else strategy.quota,
        min_bytes="1MiB" if strategy.min_bytes is None else strategy.min_bytes,
        max_host_bytes=strategy.max_host_bytes,
        directory=strategy.directory,
        on_full=strategy.on_full,
        derive=strategy.derive,
    )
    return OffloadContext(checked, owner)
