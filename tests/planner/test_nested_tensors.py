"""Tensors in containers and objects are found, and replaced in copies."""

from types import SimpleNamespace
from typing import Any

import torch

from rekindle.planner.nested_tensors import map_tensors, tensors_in, tensors_in_objects


class Node:
    """An object that may lead to others."""

    def __init__(self, value: Any, following: Any = None) -> None:
        self.value = value
        self.following = following


class Bag(dict[str, Any]):
    """A dict with attributes, of a class that torch does not know."""

    extra: Any = None


def doubled(values: Any) -> Any:
    return map_tensors(lambda tensor: 2 * tensor, values)


def test_tensors_are_found_in_order_in_containers_and_objects() -> None:
    a, b, c, d = map(torch.tensor, range(4))
    bag = Bag(c=c)
    bag.extra = b
    assert [int(t) for t in tensors_in(([a], {"x": SimpleNamespace(bag=bag), "y": d}))] == [
        *range(4)
    ]
    assert [int(t) for t in tensors_in_objects(([a], SimpleNamespace(bag=bag), d))] == [1, 2]


def test_objects_are_copied_with_all_they_lead_to() -> None:
    inner = Node(torch.ones(1), [])
    outer = Node((inner, 5), {"again": inner})
    copy = doubled(outer)
    assert type(copy) is Node
    assert copy is not outer
    assert copy.value[0] is copy.following["again"] is not inner
    assert copy.value[1] == 5
    assert copy.value[0].value == 2
    copy.value[0].following.append(1)
    assert inner.following == []
    assert inner.value == 1


def test_what_is_one_tensor_is_one_in_the_copy() -> None:
    x = torch.ones(2)
    a, (b, c) = doubled((x, [x, Node(x)]))
    assert a is b is c.value


def test_objects_that_lead_back_to_themselves_are_copied_once() -> None:
    node = Node(torch.ones(1))
    node.following = [node]
    assert [int(t) for t in tensors_in(node)] == [1]
    copy = doubled(node)
    assert copy.following[0] is copy


def test_an_object_that_leads_to_too_much_is_left_alone() -> None:
    node = None
    for _ in range(5000):
        node = Node(torch.ones(1), node)
    assert tensors_in([node, torch.zeros(1)]) == [torch.zeros(1)]
    left, copied = doubled([node, torch.ones(1)])
    assert left is node
    assert copied == 2
