"""Inside `torch.compile`, a region is handed to torch's own higher-order op.

Dynamo knows activation checkpointing by the identity of torch's function, so the original is kept
here, for when `rekindle.patch_torch()` has put ours in its place. `noop_context_fn` is compared by
identity inside torch: there is one, and it is torch's.
"""

import torch.utils.checkpoint

torch_checkpoint = torch.utils.checkpoint.checkpoint
noop_context_fn = torch.utils.checkpoint.noop_context_fn
