"""Opens a page in a real Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest


def title_after(page: Path, script: str, *, width: int = 1200) -> tuple[str, str]:
    """What a script at the end of the page makes the title, and what the browser's console says."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    probe = page.with_name("probe.html")
    probe.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    options = [f"--window-size={width},800"]
    done = subprocess.run(
        [*command, *options, "--dump-dom", f"--user-data-dir={page.parent / 'profile'}", probe.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    return title[1], "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)
