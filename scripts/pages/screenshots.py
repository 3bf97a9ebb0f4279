"""Pictures of the pages that rekindle writes, for the docs: `python -m scripts.pages.screenshots`.

Shown is a step of a Llama as wide and as deep as Llama 3 8B, explained and planned for an H100
without memory. Needs transformers, Pillow, and Chromium with selenium.
"""

import io
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import rekindle
from benchmarks.llama import LLAMA_8B, Llama
from tests.browsing import chromium

IMAGES = Path(__file__).parents[2] / "docs" / "img"
THEMES = {"": "light", "-dark": "dark"}
SIZES = {"page-plan": (1180, 1480), "page-explanation": (1180, 1290)}
COLORS = 64


def write_pages(folder: Path) -> None:
    """Write a page for each picture."""
    model = Llama(LLAMA_8B, device="meta", dtype=torch.bfloat16).model
    tokens = torch.zeros(1, LLAMA_8B.tokens, dtype=torch.long, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    optimizer = torch.optim.AdamW(model.parameters())
    found = rekindle.explain(model, batch, optimizer=optimizer, device="meta", like="H100")
    found.report(folder / "page-explanation.html")
    plan = rekindle.solve(found.profile, rekindle.Device.named("H100").usable_bytes)
    plan.report(folder / "page-plan.html")


def shoot(browser: Any, page: Path, theme: str, size: tuple[int, int]) -> Image.Image:
    """Return what the browser shows of a page, in a palette of few colors."""
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())
    browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 500))")
    shown = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    return shown.quantize(COLORS, dither=Image.Dither.NONE)


def main() -> None:
    """Write all pictures."""
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder, "profile")) as browser:
        write_pages(Path(folder))
        for name, size in SIZES.items():
            for suffix, theme in THEMES.items():
                picture = shoot(browser, Path(folder, f"{name}.html"), theme, size)
                picture.save(IMAGES / f"{name}{suffix}.png", optimize=True)


if __name__ == "__main__":
    main()
