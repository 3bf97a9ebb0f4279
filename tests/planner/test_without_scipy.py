"""Profiles and explanations need no scipy; planning says that it does."""

import subprocess
import sys

from tests.ranks import ROOT

PROGRAM = """
import sys
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

def find_all_but_scipy(name, *args):
    return None if name.partition(".")[0] == "scipy" else find_spec(name, *args)

PathFinder.find_spec = find_all_but_scipy

import torch
import rekindle
from tests.toys import Stack

model, x = Stack(3, 16), torch.randn(64, 16)
loss = lambda out: out.square().mean()
profile = rekindle.profile(model, x, loss=loss)
fake = rekindle.profile(model, x, loss=loss, device="meta", like="H100")
for found in (profile, fake):
    assert len(found.blocks[0].candidates) > 2, found

explained = rekindle.explain(model, x, loss=loss, device="meta", like="H100")
names = [change.name for change in (*explained.changes, *explained.others, *explained.unhelpful)]
assert "recompute every block" in names, names
assert not any("plan" in name for name in names), names

for call in (lambda: rekindle.solve(profile, "60%"), lambda: rekindle.fit(model, x, "60%")):
    try:
        call()
    except ImportError as error:
        assert "pip install scipy" in str(error), error
    else:
        raise AssertionError("it planned without a solver")
assert "scipy" not in sys.modules
"""


def test_a_model_is_profiled_without_scipy_and_a_plan_asks_for_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
