"""Policies as JSON: those that are data, with ops by their names."""

from collections.abc import Callable
from typing import Any

from rekindle.regions.selective.decisions import Decision, decision_named
from rekindle.regions.selective.op_names import name_of, op_of
from rekindle.regions.selective.policy_kinds import (
    CheapOpsPolicy,
    CountedPolicy,
    JoinedPolicy,
    KeepInputsPolicy,
    NamedPolicy,
    OpsPolicy,
    PathPolicy,
    Policy,
)
from rekindle.strategy_json import register_policies, wrong


def policy_to_json(policy: Any) -> dict[str, Any]:
    """A policy as a dict of JSON values; a `ValueError` if Python code is part of it."""
    match policy:
        case OpsPolicy(then, ops):
            names = None if ops is None else _names(ops)
            return {"policy": "ops", "decision": then.value, "ops": names}
        case KeepInputsPolicy(ops):
            return {"policy": "inputs", "ops": _names(ops)}
        case CheapOpsPolicy():
            return {"policy": "recompute_cheap"}
        case PathPolicy(pattern, then):
            return {"policy": "at", "pattern": pattern, "then": policy_to_json(then)}
        case NamedPolicy(then, names):
            return {"policy": "named", "decision": then.value, "names": list(names)}
        case CountedPolicy(step, limit, then):
            tag, n = ("every", step) if limit is None else ("first", limit)
            return {"policy": tag, "n": n, "then": policy_to_json(then)}
        case JoinedPolicy(policies):
            return {"policy": "joined", "policies": [policy_to_json(each) for each in policies]}
    raise ValueError(
        f"The policy {policy!r} cannot be saved as JSON: it is Python code. Policies that "
        "rekindle.policies makes of ops, module paths and names can be saved."
    )


def policy_from_json(values: Any, place: str) -> Policy:
    """The policy that `policy_to_json` wrote; `place` is where `values` are, for errors."""
    if not isinstance(values, dict):
        raise wrong(place, "an object with a field 'policy'", values)
    tag = values.get("policy")
    if not isinstance(tag, str) or tag not in _READERS:
        raise wrong(f"{place}.policy", f"one of {', '.join(_READERS)}", tag)
    given = _Fields({key: values[key] for key in values if key != "policy"}, place)
    policy = _READERS[tag](given)
    given.refuse_rest()
    return policy


class _Fields:
    """The fields of one JSON object, each taken once."""

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self._values, self._place = values, place

    def take(self, name: str) -> tuple[Any, str]:
        """The value of a field, and its place."""
        if name not in self._values:
            raise ValueError(f"{self._place}.{name} should be a field, but is missing")
        return self._values.pop(name), f"{self._place}.{name}"

    def refuse_rest(self) -> None:
        for name in self._values:
            raise ValueError(f"{self._place}.{name} should be no field, but is there")

    def decision(self, name: str) -> Decision:
        found, place = self.take(name)
        try:
            return decision_named(found)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None

    def ops_or_none(self, name: str) -> frozenset[Any] | None:
        if self._values.get(name, 0) is None:
            self.take(name)
            return None
        return self.ops(name)

    def ops(self, name: str) -> frozenset[Any]:
        found, place = self.take(name)
        if not isinstance(found, list) or not all(isinstance(op, str) for op in found):
            raise wrong(place, "a list of ops' names", found)
        try:
            return frozenset(map(op_of, found))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None

    def texts(self, name: str) -> tuple[str, ...]:
        found, place = self.take(name)
        if not isinstance(found, list) or not found or not all(type(t) is str for t in found):
            raise wrong(place, "a list of texts", found)
        return tuple(found)

    def text(self, name: str) -> str:
        found, place = self.take(name)
        if type(found) is not str or not found:
            raise wrong(place, "text", found)
        return found

    def count(self, name: str) -> int:
        found, place = self.take(name)
        if type(found) is not int or found < 1:
            raise wrong(place, "a whole number from 1 on", found)
        return found

    def policy(self, name: str) -> Policy:
        return policy_from_json(*self.take(name))

    def policies(self, name: str) -> tuple[Policy, ...]:
        found, place = self.take(name)
        if not isinstance(found, list) or len(found) < 2:
            raise wrong(place, "a list of two policies or more", found)
        return tuple(policy_from_json(each, f"{place}[{i}]") for i, each in enumerate(found))


def _names(ops: frozenset[Any]) -> list[str]:
    found = [name_of(op) for op in ops]
    for name in found:
        if not isinstance(name, str):
            raise ValueError(f"The op {name.__name__} cannot be saved as JSON: it is a class")
    return sorted(found)


_READERS: dict[str, Callable[[_Fields], Policy]] = {
    "ops": lambda given: OpsPolicy(given.decision("decision"), given.ops_or_none("ops")),
    "inputs": lambda given: KeepInputsPolicy(given.ops("ops")),
    "recompute_cheap": lambda _: CheapOpsPolicy(),
    "at": lambda given: PathPolicy(given.text("pattern"), given.policy("then")),
    "named": lambda given: NamedPolicy(given.decision("decision"), given.texts("names")),
    "every": lambda given: CountedPolicy(given.count("n"), None, given.policy("then")),
    "first": lambda given: CountedPolicy(None, given.count("n"), given.policy("then")),
    "joined": lambda given: JoinedPolicy(given.policies("policies")),
}

register_policies(policy_to_json, policy_from_json)
