"""Several ranks of a distributed run plan as one."""
