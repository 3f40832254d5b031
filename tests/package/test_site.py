"""The site as a reader sees it: every page in a real Chromium, as wide as a desktop and as a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WIDTHS = [1440, 390]
# Opens each page in a frame of each width, and sends back what is wrong with it.
LOOK = """<body><script>
const short = (element) => element.textContent.trim().slice(0, 60);
const visible = (element) => element.getClientRects().length > 0;
const after = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const missing = (image) => visible(image) && image.naturalWidth === 0;
function* problems(page, width) {
  const root = page.documentElement, right = root.clientWidth + 1;
  if (root.scrollWidth > right) yield "the page is wider than the screen";
  for (const table of page.querySelectorAll(".md-typeset table"))
    if (visible(table) && table.getBoundingClientRect().right > right) yield "a table off the screen: " + short(table);
  if (width > 1000)
    for (const code of page.querySelectorAll(".md-typeset pre > code"))
      if (visible(code) && code.scrollWidth > code.clientWidth + 1) yield "clipped code: " + short(code);
  for (const image of page.querySelectorAll(".md-content img"))
    if (missing(image)) yield "a picture that does not load: " + image.src;
    else if (width < 1000 && image.matches("[src$='.svg']:not(picture img)") && image.naturalWidth > 1.1 * image.width)
      yield "small letters: " + image.src;
  const range = page.createRange();
  const walker = page.createTreeWalker(page.querySelector(".md-content"), NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.parentElement.closest("pre, svg, style, .headerlink") || !visible(node.parentElement)) continue;
    for (const word of node.data.matchAll(/[\\p{L}]{2,18}/gu)) {
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
      const boxes = [...range.getClientRects()].filter((box) => box.width > 0.5);
      if (new Set(boxes.map((box) => Math.round(box.top / 4))).size > 1) yield "a word that is broken: " + word[0];
    }
  }
  if (page.querySelector(".md-nav__link--active") && !page.querySelector(".md-footer__link"))
    yield "no link to the next page";
}
async function look() {
  const found = {};
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    frame.width = WIDTHS[0]; frame.height = 900;
    await new Promise((loaded) => { frame.onload = loaded; frame.src = page; document.body.append(frame); });
    for (const width of WIDTHS) {
      frame.width = width;
      await after(60);
      const shown = frame.contentDocument;  // at another width it may load other pictures
      for (let turn = 0; turn < 100 && [...shown.querySelectorAll(".md-content img")].some(missing); turn++)
        await after(100);
      const wrong = [...new Set(problems(shown, width))];
      if (wrong.length) found[page + " at " + width] = wrong.slice(0, 8);
    }
    frame.remove();
  }
  await fetch("/found", { method: "POST", body: JSON.stringify(found) });
}
look().catch((error) => fetch("/found", { method: "POST", body: JSON.stringify({ "the test": [String(error)] }) }));
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


class Server(ThreadingHTTPServer):
    """Serves the site, and gets what a browser finds."""

    found: dict[str, Any]

    def __init__(self, folder: Path) -> None:
        self.arrived = threading.Event()
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if "search" in self.path:  # every page would build the index anew
            self.send_error(404)
        else:
            super().do_GET()

    def do_POST(self) -> None:
        server: Any = self.server
        server.found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        server.arrived.set()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def server(site: Path) -> Iterator[Server]:
    with Server(site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def answer_of(url: str, server: Server, profile: Path) -> Any:
    """What a page sends back when Chromium opens it."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    server.arrived.clear()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1600,1000", "--remote-debugging-port=0"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        [browser, *options, f"--user-data-dir={profile}", url], stdout=quiet, stderr=quiet
    ) as process:
        try:
            assert server.arrived.wait(400), "the browser did not answer"
        finally:
            process.kill()
    return server.found


def test_pages_look_right(site: Path, server: Server, tmp_path: Path) -> None:
    left_out = {site / "404.html", *(site / "reports").iterdir()}  # reports are pages of their own
    pages = sorted(path.relative_to(site).as_posix() for path in {*site.rglob("*.html")} - left_out)
    (site / "look.html").write_text(LOOK.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS)))
    found = answer_of(f"http://127.0.0.1:{server.server_port}/look.html", server, tmp_path)
    (site / "look.html").unlink()
    shown = "\n".join(f"{where}: {'; '.join(wrong)}" for where, wrong in found.items())
    assert not found, f"\n{shown}"


SEARCH = """<script>
(async () => {
  const toggle = document.getElementById("__search");
  const query = document.querySelector("[data-md-component=search-query]");
  const results = () => document.querySelectorAll(".md-search-result__item").length;
  toggle.checked = true;
  toggle.dispatchEvent(new Event("change", { bubbles: true }));
  query.value = "accumulate";
  query.focus();
  query.dispatchEvent(new Event("keyup", { bubbles: true }));
  for (let turn = 0; turn < 300 && !results(); turn++) await new Promise((done) => setTimeout(done, 100));
  const visible = query.getClientRects().length > 0;
  await fetch("FOUND", { method: "POST", mode: "no-cors", body: JSON.stringify({ visible, results: results() }) });
})();
</script>"""


def test_search_works_from_files(site: Path, server: Server, tmp_path: Path) -> None:
    probe = site / "guides" / "probe.html"
    script = SEARCH.replace("FOUND", f"http://127.0.0.1:{server.server_port}/found")
    probe.write_text((site / "guides" / "train.html").read_text().replace("</body>", f"{script}</body>"))
    found = answer_of(probe.as_uri(), server, tmp_path)
    probe.unlink()
    assert found["visible"]
    assert found["results"] > 3


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="https?://[^"]*"', path.read_text())
        assert not [tag for tag in loaded if "canonical" not in tag], path.name


def test_pictures_follow_the_dark_mode(site: Path) -> None:
    inverted = (site / "site.css").read_text()
    for path in (site / "pictures").glob("*.svg"):
        assert "prefers-color-scheme: dark" in path.read_text() or f"/{path.name}" in inverted, path.name


def test_examples_that_a_page_names_are_linked(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = re.sub(r"<(pre|a)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        assert not re.findall(r"<code>examples/[\w/.-]+</code>", text), path.name
