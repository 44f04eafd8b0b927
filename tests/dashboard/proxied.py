"""A reverse proxy before a dashboard, and a dashboard below a path of another app, for tests in a browser."""

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp

HEADER = "X-Forwarded-User"
# Of one connection, and not of the request.
HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@contextmanager
def proxied(address: str, user: str | None = None) -> Iterator[str]:
    """Pass requests on to `address` as proxies do, in the name of `user`, and give the proxy's own address."""
    before = urlsplit(address).netloc

    class Proxy(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing of requests."""

        def passed_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
            headers.pop(HEADER, None)  # nobody names himself
            headers |= {"X-Forwarded-For": self.client_address[0], "X-Forwarded-Proto": "http"}
            if user is not None:
                headers[HEADER] = user
            call = http.client.HTTPConnection(before)
            try:
                call.request(self.command, self.path, body or None, headers)
                answer = call.getresponse()
                content = answer.read()
            finally:
                call.close()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP:
                    self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = passed_on  # noqa: N815

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """Serve an app of this process, and give its address."""
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
