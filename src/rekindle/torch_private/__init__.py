"""Every touch of torch's private names: one small function or one bound name each.

A name is bound once, at import, where a hot path calls it. Each docstring says on which versions of
torch the name was tried, why the public API does not do, and when the name can go. Nothing here
knows about regions, strategies or plans; `tests/torch_private` holds the other rooms to public
names.
"""
