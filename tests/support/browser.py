"""A browser without a window, for tests that look at pages as a reader does."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def screenshot(page: Path, width: int = 1280, height: int = 1000) -> np.ndarray:
    """What a browser shows of a page that has no network: (height, width, 3), 0 to 255.

    Skips the test where there is no browser.
    """
    image = pytest.importorskip("matplotlib.image", reason="needs matplotlib to read a picture")
    picture = page.with_suffix(".png")
    _browse(page, f"--screenshot={picture}", f"--window-size={width},{height}")
    return np.round(image.imread(picture)[..., :3] * 255).astype(int)


def shown_document(page: Path | str) -> str:
    """The document that a browser has made of a page, after scripts have run if there are any.

    Args:
        page: a file, or the address of a server on 127.0.0.1, whose page has some seconds, by
            the browser's own clock, to ask for what it shows.
    """
    if isinstance(page, Path):
        return _browse(page, "--dump-dom")
    return _browse(page, "--dump-dom", "--virtual-time-budget=2500")


def _browse(page: Path | str, *options: str) -> str:
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip("needs Chromium, to see what a page looks like")
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
