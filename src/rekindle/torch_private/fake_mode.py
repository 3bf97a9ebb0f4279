"""Fake tensors: shapes, dtypes and devices without memory."""

from torch._subclasses import fake_tensor

FakeTensor = fake_tensor.FakeTensor
"""A tensor without memory.

Tried on torch 2.11 and 2.13, whose documentation of fake tensors names it. Goes when it has a
public path, as pytorch/pytorch#113456 asks."""

FakeTensorMode = fake_tensor.FakeTensorMode
"""The dispatch mode in which ops make fake tensors.

Tried on torch 2.11 and 2.13. Goes when `FakeTensor` does."""

DataDependentOutputException = fake_tensor.DataDependentOutputException
"""Raised where code asks for a fake tensor's values.

Tried on torch 2.11 and 2.13. Goes when `FakeTensor` does."""

DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
"""Raised where a result's shape depends on a fake tensor's values.

Tried on torch 2.11 and 2.13. Goes when `FakeTensor` does."""
