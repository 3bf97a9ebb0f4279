"""The table of devices, and the times of ops by it."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

import rekindle
from rekindle.planner.devices import DEVICES, Device, Efficiency, OpClock, device_named, device_of
from tests.planner.fake_cases import that_learns

pytest.importorskip("scipy")


EVEN = Device(
    "even", 4e12, 2e12, 1e12, 1e9, link=0.0, memory_bytes=0, launch=1.0,
    efficiency=Efficiency(0.5, 0.25, 0.5, 0.5),
)  # fmt: skip
"""Half of 1 GB a second, a second for each op, 5e11 FLOP/s in float32."""
MIB = 2**20


def taken(run: Callable[[], Any], device: Device = EVEN) -> float:
    """Seconds by the table, without what launches take: these are a second each."""
    with FakeTensorMode(), OpClock(device) as clock:
        return clock.timed(run)


def test_an_op_without_a_formula_takes_what_its_bytes_take_and_a_launch() -> None:
    assert taken(lambda: torch.empty(MIB) + 1) == pytest.approx(1 + 8 * MIB / 5e8)


def test_a_product_takes_what_its_arithmetic_takes_in_its_type() -> None:
    def product(dtype: torch.dtype) -> Callable[[], Any]:
        return lambda: torch.empty(4096, 4096, dtype=dtype) @ torch.empty(4096, 4096, dtype=dtype)

    quick = replace(EVEN, memory=1e15, launch=0.0)
    flops = 2 * 4096**3
    assert taken(product(torch.float32), quick) == pytest.approx(flops / 5e11)
    assert taken(product(torch.bfloat16), quick) == pytest.approx(flops / 2e12)


def test_a_product_of_float32_is_quicker_where_its_precision_may_be_less() -> None:
    before = torch.get_float32_matmul_precision()
    quick = replace(EVEN, memory=1e15, launch=0.0)
    try:
        torch.set_float32_matmul_precision("high")
        found = taken(lambda: torch.empty(64, 64) @ torch.empty(64, 64), quick)
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == pytest.approx(2 * 64**3 / 1e12)


def test_a_small_product_takes_what_its_bytes_take() -> None:
    found = taken(lambda: torch.empty(MIB, 1) @ torch.empty(1, 1))
    assert found == pytest.approx(1 + (8 * MIB + 4) / 5e8)


@pytest.mark.parametrize("share", [(False, 1.0), (True, 0.5)], ids=["all", "causal"])
def test_attention_takes_two_products_and_five_in_backward(share: tuple[bool, float]) -> None:
    causal, part = share
    quick = replace(EVEN, memory=1e18, launch=0.0)
    product = 2 * 2 * 4 * 64 * 64 * 8 / (1e12 * 0.25) * part
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 4, 64, 8, requires_grad=True) for _ in range(3))
    out: list[Tensor] = []
    with q.fake_mode, OpClock(quick) as clock:  # type: ignore[attr-defined]
        forward = clock.timed(
            lambda: out.append(scaled_dot_product_attention(q, k, v, is_causal=causal))
        )
        backward = clock.timed(lambda: out[0].backward(torch.empty_like(out[0])))
    assert forward == pytest.approx(2 * product, rel=1e-3)
    assert backward == pytest.approx(5 * product, rel=1e-3)


def test_views_and_memory_that_nobody_writes_take_no_time() -> None:
    assert taken(lambda: torch.empty(8, 8).view(64)[3:].detach().t()) == 0.0


def test_what_is_picked_from_a_large_table_counts_and_not_the_table() -> None:
    def pick() -> None:
        nn.functional.embedding(torch.empty(1000, dtype=torch.long), torch.empty(MIB, 64))

    assert taken(pick) == pytest.approx(1 + 2 * 4 * 64 * 1000 / 5e8)


def test_a_device_that_is_not_in_the_table_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"no device 'H2000'.*'H200', 'H100'.*'RTX 4090'"):
        rekindle.profile(*that_learns(), device="meta", like="H2000")


@pytest.mark.parametrize("name", ["rtx4090", "RTX-4090", "a100-80gb", "cpu"])
def test_a_name_may_be_written_in_other_ways(name: str) -> None:
    assert device_named(name) in (DEVICES["RTX 4090"], DEVICES["A100-80GB"], DEVICES["cpu"])


DEVICE_NAMES = {
    "NVIDIA H200": "H200",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA A100-PCIE-40GB": "A100-40GB",
    "NVIDIA L40S": "L40S",
    "NVIDIA L4": "L4",
    "Tesla T4": "T4",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA L40": None,
    "NVIDIA T400": None,
}


@pytest.mark.parametrize("told", DEVICE_NAMES)
def test_a_gpu_that_is_there_is_found_in_the_table(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: told)
    found = device_of(torch.device("cuda", 0))
    assert (found and found.name) == DEVICE_NAMES[told]


def test_every_device_of_the_table_is_whole() -> None:
    for name, device in DEVICES.items():
        assert device.name == name
        assert device.half >= device.tf32 >= device.single > 0
        assert 0 < device.memory < 2e13
        assert (device.link > 0) == (name != "cpu")


def test_the_page_lists_the_devices_of_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "budget.md").read_text()
    for device in DEVICES.values():
        link = f"{device.link / 1e9:.4g}" if device.link else "none"
        rates = [device.half / 1e12, device.tf32 / 1e12, device.single / 1e12, device.memory / 1e9]
        cells = [f"`{device.name}`", *(f"{rate:.4g}" for rate in rates), link]
        assert f"| {' | '.join(cells)} | {device.memory_bytes >> 30} GiB |\n" in page


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("A100", "'A100-80GB' or 'A100-40GB', perhaps?"),
        ("4090", "'RTX 4090', perhaps?"),
        ("RTX 4091", "'RTX 4090', perhaps?"),
        ("NVIDIA H100 80GB HBM3", "'H100', perhaps?"),
        ("a toaster", "in the table. There are 'B200'"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=re.escape(meant)):
        Device.named(name)


def test_a_device_has_a_twentieth_of_its_memory_for_what_torch_does_not_give_out() -> None:
    assert Device.named("H100").usable_bytes == 76 * 2**30
    assert Device.named("H100") in Device.known()
