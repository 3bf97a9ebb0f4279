"""The planner: makes a training step fit a budget of memory at the least time.

```
model + batch ─trace/─▶ BlockTraces ─candidates─▶ Candidates ─measure/─▶ Profile ─solve/─▶ Plan
                                                  Plan ─verify─▶ Plan ─runtime─▶ the same model
```

`types`, `candidates`, `timeline` and `solve/` compute with plain values and need no torch.
`profile_model` runs the first three arrows on a device, `fake_profile` on fake tensors with times
from the table of `devices`. `fit` runs the others: `verified_plan` solves until a measured step
agrees, `verify` compares gradients, `runtime` applies a plan and watches the model's calls.
`ranks/` has the ranks of a distributed run agree; `training_step` is the step that all of it runs;
`instruments/` are the meters and clocks of tracing and measuring.
"""
