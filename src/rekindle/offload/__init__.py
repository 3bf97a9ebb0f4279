"""Offload: activations are copied to host memory or disk, and prefetched for backward.

- `context`: `rekindle.offload`; `offload_options` checks its arguments.
- `owners`, `offloader`: who has an offloader, and the offloader of each device.
- `device_offloader`: what is done with each activation that autograd saves on a device.
- `residency`: the states of an activation (on the device, leaving, away, returning), and every
  transition between them; `activation` and `saved_tensors` are the objects in these states.
- `copy_out_scheduler`: where a copy-out is scheduled; `copy_out_queue`: copy-outs in flight.
- `prefetcher`: copies back, ahead of use.
- `schedule`: which activations leave and when each returns, a pure function of what was measured;
  `learned_steps`, `step_profile` and `step_activations` measure it in the first steps.
- `derive`: activations that one op makes again, which need not leave.
- `tiers`: the places that activations are copied to.
"""
