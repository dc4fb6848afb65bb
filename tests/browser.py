"""A headless Chromium that reaches this machine only, asked in its own protocol: what a page fetches and says."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest

from tests.faults import wait_until

__all__ = ["Browser", "Visit", "chromium", "keep"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_SECONDS, ANSWER_SECONDS = 60.0, 60.0

_WIDE = """
(() => [...document.querySelectorAll('body *')]
  .filter(e => !e.closest('.skip') && e.getBoundingClientRect().width > 0
          && (e.getBoundingClientRect().right > window.innerWidth + 0.5 || e.scrollWidth > e.clientWidth + 1
              && getComputedStyle(e).overflowX !== 'visible' && e.clientWidth > 0))
  .slice(0, 10)
  .map(e => e.tagName + '.' + (e.getAttribute('class') || '') + ' ' + (e.textContent || '').slice(0, 60)))()
"""
_FACTS = """
(() => ({width: window.innerWidth, scroll: document.documentElement.scrollWidth,
         body: document.body.scrollWidth, height: document.documentElement.scrollHeight,
         background: getComputedStyle(document.body).backgroundColor, color: getComputedStyle(document.body).color,
         text: document.body.innerText}))()
"""


@dataclass
class Visit:
    """What a browser saw: requests besides the page itself, everything on the console, sizes, text, a picture."""

    requests: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    wide: list[str] = field(default_factory=list)
    picture: bytes = b""


class Browser:
    """A running browser.

    Parameters
    ----------
    port
        Of its protocol, on the loopback interface.
    """

    def __init__(self, port: int) -> None:
        self.port = port

    def visit(
        self,
        page: Path | str,
        *,
        width: int,
        height: int = 900,
        dark: bool = False,
        media: str = "screen",
        until: str = "",
        seconds: float = 60.0,
    ) -> Visit:
        """Open a file or an address at a width, and look at it.

        A page that fills itself is looked at when it shows the text ``until``, or ``seconds`` later without it.
        """
        url = page if isinstance(page, str) else page.as_uri()
        return asyncio.run(_visit(self.port, url, width, height, dark, media, until, seconds))


async def _visit(
    port: int, url: str, width: int, height: int, dark: bool, media: str, until: str, seconds: float
) -> Visit:
    from tornado.websocket import websocket_connect

    opener = build_opener(ProxyHandler({}))

    def new_tab() -> Any:
        from urllib.request import Request

        with opener.open(Request(f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT"), timeout=30) as answer:
            return json.load(answer)

    tab = await asyncio.to_thread(new_tab)
    socket = await websocket_connect(tab["webSocketDebuggerUrl"], max_message_size=2**28)
    visit, numbers = Visit(), itertools.count(1)
    loaded = False

    def note(message: dict[str, Any]) -> None:
        nonlocal loaded
        method, given = message.get("method", ""), message.get("params", {})
        if method == "Network.requestWillBeSent" and given["request"]["url"] != url:
            address = given["request"]["url"]
            visit.requests += [] if address.startswith(("data:", "blob:")) else [address]
        elif method == "Log.entryAdded":
            visit.console.append(f"{given['entry']['level']}: {given['entry']['text']}")
        elif method == "Runtime.consoleAPICalled":
            visit.console.append(f"{given['type']}: {given['args']}")
        elif method == "Runtime.exceptionThrown":
            visit.console.append(f"exception: {given['exceptionDetails'].get('text')}")
        elif method == "Page.loadEventFired":
            loaded = True

    async def ask(method: str, **given: Any) -> Any:
        number = next(numbers)
        await socket.write_message(json.dumps({"id": number, "method": method, "params": given}))
        while True:
            message = json.loads(await asyncio.wait_for(socket.read_message(), ANSWER_SECONDS))
            if message.get("id") == number:
                assert "error" not in message, message
                return message.get("result", {})
            note(message)

    async def value(script: str) -> Any:
        return (await ask("Runtime.evaluate", expression=script, returnByValue=True))["result"]["value"]

    for domain in ("Network", "Log", "Runtime", "Page"):
        await ask(f"{domain}.enable")
    await ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    await ask("Emulation.setEmulatedMedia", media=media, features=scheme)
    await ask("Page.navigate", url=url)
    for _ in range(600):
        if loaded and await value("document.readyState") == "complete":
            break
        await asyncio.sleep(0.1)
        await value("0")  # hears what happened in the meantime
    assert loaded, "the page was not loaded"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and until not in await value("document.body.innerText"):
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.3)  # what a page fetches late
    visit.facts = await value(_FACTS)
    visit.wide = await value(_WIDE)
    picture = await ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
    visit.picture = base64.b64decode(picture["data"])
    socket.close()
    while await asyncio.wait_for(socket.read_message(), ANSWER_SECONDS) is not None:
        pass  # until it is closed
    return visit


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser that lives as long as the block; the test is skipped, and counted, where none is installed."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no Chromium on this machine (none of {', '.join(NAMES)})")
    profile = folder / "profile"
    profile.mkdir()
    command = [
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-port=0",
        f"--user-data-dir={profile}", "--hide-scrollbars", "about:blank",
    ]  # fmt: skip
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            ready = profile / "DevToolsActivePort"
            wait_until(lambda: ready.exists() and len(ready.read_text().split()) > 1, START_SECONDS)
            yield Browser(int(ready.read_text().split()[0]))
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(15)


def keep(visit: Visit, name: str, folder: Path) -> None:
    """Leave the picture where DKRR_PICTURES names a folder, for people to look at."""
    target = Path(os.environ.get("DKRR_PICTURES") or folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / f"{name}.png").write_bytes(visit.picture)
    assert visit.picture.startswith(b"\x89PNG")
