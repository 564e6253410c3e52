"""A headless browser that renders pages for tests."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def screenshot(page: Path, width: int = 1280, height: int = 1000) -> np.ndarray:
    """Render a page without network access; return its pixels, (height, width, 3), 0 to 255.

    Skip the test if no browser is installed.
    """
    image = pytest.importorskip("matplotlib.image", reason="needs matplotlib to read an image")
    picture = page.with_suffix(".png")
    _browse(page, f"--screenshot={picture}", f"--window-size={width},{height}")
    return np.round(image.imread(picture)[..., :3] * 255).astype(int)


def shown_document(page: Path | str) -> str:
    """Return a page's DOM as HTML, after its scripts have run.

    Args:
        page: a file, or the address of a server on 127.0.0.1. A server's page gets 2.5 seconds
            of the browser's virtual time to fetch its data.
    """
    if isinstance(page, Path):
        return _browse(page, "--dump-dom")
    return _browse(page, "--dump-dom", "--virtual-time-budget=2500")


def _browse(page: Path | str, *options: str) -> str:
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip("needs Chromium to render pages")
    with tempfile.TemporaryDirectory() as profile:
        result = subprocess.run(
            [
                browser,
                *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *(
                    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                    f"--user-data-dir={profile}",
                ),
                *options,
                page.as_uri() if isinstance(page, Path) else page,
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    return result.stdout
