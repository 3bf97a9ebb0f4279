"""An account of where the memory of a training step goes, storage by storage."""
