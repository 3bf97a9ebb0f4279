"""The budget: profile a model's blocks, choose the fate of every activation, and make it fit.

The front door is `front`. `profiling` measures a `step`: in `outline`, then each block `alone`;
`graph`, `menu` and `options` find what is worth having; `together` sees what blocks alone do not;
`static` is what is there all the time; the model ends `untouched`. A step has a `loss`.
`imagining` does without a device, on `fake` tensors and with the table of `devices`. `simulate` and
`solving` choose one option for each block, which `planning` makes a `plan` of; `fitting` has it
tried out in a `trial`, and `verifying` compares `fingerprints` of its gradients; `execute` is what
a block is given to carry it out; `standing` is a plan while a model trains by it. For people:
`names` of ops, what is `nearby` a budget, `progress`, a `warning`, and all of it as `text`.
"""
