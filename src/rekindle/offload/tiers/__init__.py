"""The places that activations are copied to: host memory and disk."""
