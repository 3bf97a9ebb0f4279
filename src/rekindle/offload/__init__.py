"""The offload engine: activations leave for host memory or disk and come back in time.

`context` is the front door, `lane` the engine of one device: what becomes of each activation that
autograd saves. `choose` decides which ones go, a pure function of what `lessons` learnt in the
first steps; `derive` finds those that need not go. `tiers` says what a place to go to must do;
`host`, `disk` and `staged` are those there are.
"""
