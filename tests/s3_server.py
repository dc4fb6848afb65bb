"""An S3 server for tests, in a process of its own: moto behind a gate that counts requests and fails them on purpose.

``python tests/s3_server.py`` prints its port and serves until its standard input is closed. Two paths are its own:
``POST /-/faults`` takes a JSON list of faults, ``GET /-/log`` returns the requests so far.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

STATUS = {403: "403 Forbidden", 500: "500 Internal Server Error", 503: "503 Service Unavailable"}


class Gate:
    """The WSGI application in front of moto.

    A fault is ``{"method": regex, "path": regex, "times": count, "status": 503}``, or with ``"sleep": seconds`` before
    the answer, ``"ignore_conditions": true`` (a store that takes If-Match and does not honour it), ``"lose_answer":
    true`` (done, and 500 said), or ``"cut": true`` (half of the body). With ``"every": 3`` each third one is hit.
    """

    def __init__(self) -> None:
        self.app = DomainDispatcherApplication(create_backend_app)
        self.log: list[dict[str, Any]] = []
        self.faults: list[dict[str, Any]] = []
        self.gate = threading.Lock()
        self.writing = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path.startswith("/-/"):
            return self.control(path, environ, start)
        fault = self.next_fault(method, path)
        if "sleep" in fault:
            time.sleep(fault["sleep"])
        if "status" in fault:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            self.record(method, path, fault["status"], environ)
            start(STATUS[fault["status"]], [("Content-Type", "application/xml"), ("Content-Length", "0")])
            return []
        if fault.get("ignore_conditions"):
            environ.pop("HTTP_IF_MATCH", None)
            environ.pop("HTTP_IF_NONE_MATCH", None)
        said: list[Any] = []
        # moto compares and writes in two steps: what S3 does at once is done by one request at a time
        with self.writing if method != "GET" else threading.Lock():
            body = b"".join(self.app(environ, lambda status, headers, info=None: said.extend([status, headers])))
        status, headers = said[0], said[1]
        if fault.get("lose_answer"):
            status, headers, body = STATUS[500], [("Content-Length", "0")], b""
        if fault.get("cut"):
            body = body[: len(body) // 2]
        self.record(method, path, int(status.split()[0]), environ)
        start(status, headers)
        return [body]

    def next_fault(self, method: str, path: str) -> dict[str, Any]:
        with self.gate:
            for fault in self.faults:
                if (
                    fault.get("times", 1) > 0
                    and re.fullmatch(fault.get("method", ".*"), method)
                    and re.search(fault.get("path", ""), path)
                ):
                    fault["seen"] = fault.get("seen", 0) + 1
                    if fault["seen"] % fault.get("every", 1):
                        return {}
                    fault["times"] = fault.get("times", 1) - 1
                    return fault
        return {}

    def record(self, method: str, path: str, status: int, environ: dict[str, Any]) -> None:
        size = int(environ.get("CONTENT_LENGTH") or 0)
        self.log.append({"method": method, "path": path, "status": status, "bytes": size})

    def control(self, path: str, environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        with self.gate:
            if path == "/-/faults":
                self.faults = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            body = json.dumps(self.log if path == "/-/log" else {}).encode()
        start("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, Gate(), threaded=True)
    print(server.server_port, flush=True)

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
