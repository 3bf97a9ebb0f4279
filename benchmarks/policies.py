"""Bytes held and ops replayed in one block, by policy: `scripts/bench policies [--json PATH]`.

The figures are counted, not timed: a block of the shape `8b` runs forward and backward on fake
tensors, which have sizes and no memory. `held` is what the block's region holds from forward to
backward beyond its input, each storage once; `replayed` the ops that run again in backward, and how
many of these are no views.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from benchmarks.decoder import SHAPES, Block
from benchmarks.measure import format_table, save_json
from rekindle import policies
from rekindle.policies import Policy, at, every, keep, keep_inputs

POLICIES: dict[str, Policy] = {
    "keep()": keep(),
    "recompute_cheap": policies.recompute_cheap,
    "keep_matmuls_and_attention": policies.keep_matmuls_and_attention,
    "keep(MATMULS, ATTENTION)": keep(policies.MATMULS, policies.ATTENTION),
    "keep_matmuls": policies.keep_matmuls,
    "every(2, keep_matmuls)": every(2, policies.keep_matmuls),
    "keep_attention": policies.keep_attention,
    'at("attention", "keep")': at("attention", "keep"),
    'at("mlp", keep_matmuls)': at("mlp", policies.keep_matmuls),
    "keep_inputs(ATTENTION)": keep_inputs(policies.ATTENTION),
    "recompute()": policies.recompute(),
}


@dataclass(frozen=True)
class Result:
    """One policy on one block."""

    policy: str
    mib_held: float
    share: float
    """Of what plain autograd holds."""
    ops_replayed: int
    ops_computed: int
    """Those of them that do something: no views."""


class _Count(TorchDispatchMode):
    """Counts the ops that run again: those that backward runs more than a plain one does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.all = self.computed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.all += 1
        self.computed += not (func.is_view or "_unsafe_view" in func.name())
        return func(*args, **(kwargs or {}))


def measure(policy: Policy) -> tuple[int, int, int]:
    """Bytes held beyond the input, ops and computing ops of the backward."""
    shape = SHAPES["8b"]
    with FakeTensorMode():
        block = Block(shape)
        x = shape.hidden_states().requires_grad_()
        with rekindle.observe() as seen:
            out = rekindle.checkpoint(block, x, context_fn=policy)
        with _Count() as count:
            out.backward(torch.ones_like(out))
    return seen.total.bytes_held - x.numel() * x.element_size(), count.all, count.computed


def results() -> list[Result]:
    plain_bytes, plain_ops, plain_computed = measure(keep())
    found = []
    for name, policy in POLICIES.items():
        held, ops, computed = measure(policy)
        found.append(
            Result(
                policy=name,
                mib_held=round(held / 2**20, 1),
                share=round(held / plain_bytes, 3),
                ops_replayed=ops - plain_ops,
                ops_computed=computed - plain_computed,
            )
        )
    return found


def format_results(found: list[Result]) -> str:
    rows = [
        [r.policy, f"{r.mib_held:.1f}", f"{r.share:.2f}", str(r.ops_replayed), str(r.ops_computed)]
        for r in found
    ]
    return format_table(["policy", "MiB held", "of plain", "ops replayed", "no views"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="What policies hold and replay in one block.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    options = parser.parse_args()
    found = results()
    print(format_results(found))
    if options.json:
        save_json(options.json, "policies", [asdict(result) for result in found])


if __name__ == "__main__":
    main()
