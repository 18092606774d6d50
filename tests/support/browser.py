"""A headless Chromium driven through its DevTools protocol; Python standard library only.

    with Browser() as browser:
        page = browser.open("http://127.0.0.1:8000/", 1280, 800)
        page.wait("document.title", lambda title: title)
"""

import base64
import http.client
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time


class BrowserError(Exception):
    """The browser did not do what was asked."""


def find():
    """The browser's path, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Socket:
    """The client side of a WebSocket (RFC 6455), text frames only."""

    def __init__(self, port, path):
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=120)
        self.rest = b""
        self.sock.sendall(("GET %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nupgrade: websocket\r\n"
                           "connection: Upgrade\r\nsec-websocket-key: %s\r\n"
                           "sec-websocket-version: 13\r\n\r\n"
                           % (path, port, base64.b64encode(os.urandom(16)).decode())).encode())
        while b"\r\n\r\n" not in self.rest:
            self.rest += self._more()
        head, self.rest = self.rest.split(b"\r\n\r\n", 1)
        if b" 101 " not in head.split(b"\r\n")[0]:
            raise BrowserError(head.decode())

    def _more(self):
        data = self.sock.recv(1 << 16)
        if not data:
            raise BrowserError("the browser closed its connection")
        return data

    def _take(self, n):
        while len(self.rest) < n:
            self.rest += self._more()
        taken, self.rest = self.rest[:n], self.rest[n:]
        return taken

    def send(self, text):
        data, mask = text.encode(), os.urandom(4)
        n = len(data)
        head = b"\x81" + (bytes([0x80 | n]) if n < 126 else b"\xfe" + struct.pack(">H", n)
                          if n < 65536 else b"\xff" + struct.pack(">Q", n))
        self.sock.sendall(head + mask + bytes(b ^ mask[i & 3] for i, b in enumerate(data)))

    def receive(self):
        whole = b""
        while True:
            first, second = self._take(2)
            n = second & 0x7f
            if n == 126:
                n = struct.unpack(">H", self._take(2))[0]
            elif n == 127:
                n = struct.unpack(">Q", self._take(8))[0]
            data = self._take(n)
            if first & 0x0f in (0, 1):
                whole += data
                if first & 0x80:
                    return whole.decode()
            elif first & 0x0f == 8:
                raise BrowserError("the browser closed the page")


class Page:
    """One tab.  `complaints` collects console errors, exceptions and what the policy refused."""

    def __init__(self, port, path, width, height, dark):
        self.socket = Socket(port, path)
        self.next_id = 0
        self.complaints = []
        self.requests = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1 if width > 600 else 2, mobile=width <= 600)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def _event(self, message):
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:400])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def call(self, method, **params):
        self.next_id += 1
        self.socket.send(json.dumps({"id": self.next_id, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.receive())
            if message.get("id") == self.next_id:
                if "error" in message:
                    raise BrowserError("%s: %s" % (method, message["error"]))
                return message["result"]
            self._event(message)

    def close(self):
        self.call("Page.close")
        self.socket.sock.close()

    def go(self, url):
        self.call("Page.navigate", url=url)

    def eval(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True,
                           awaitPromise=True)
        if "exceptionDetails" in result:
            raise BrowserError("%s: %s" % (expression, result["exceptionDetails"]))
        return result["result"].get("value")

    def wait(self, expression, good=bool, seconds=60):
        """Waits until good(value) holds; returns (value, seconds it took)."""
        begin = time.monotonic()
        while True:
            value = self.eval(expression)
            if good(value):
                return value, time.monotonic() - begin
            if time.monotonic() - begin > seconds:
                raise BrowserError("%s is %r after %d s" % (expression, value, seconds))
            time.sleep(0.05)

    def click(self, selector):
        self.eval("document.querySelector(%s).click()" % json.dumps(selector))

    def type(self, selector, text):
        self.eval("document.querySelector(%s).focus()" % json.dumps(selector))
        self.call("Input.insertText", text=text)

    def press_enter(self):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter",
                      windowsVirtualKeyCode=13, text="\r" if kind == "keyDown" else "")

    def picture(self, path, whole=False):
        options = {"captureBeyondViewport": True} if whole else {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = dict(x=0, y=0, width=size["width"], height=size["height"], scale=1)
        with open(path, "wb") as out:
            out.write(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))


class Browser:
    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="ds4-browser-")
        self.process = subprocess.Popen(
            [find(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--disable-dev-shm-usage", "--disable-background-networking", "--disable-sync",
             "--disable-component-update", "--mute-audio", "--hide-scrollbars",
             "--remote-debugging-port=0", "--user-data-dir=" + self.folder, "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=dict(os.environ, HOME=self.folder))
        try:
            self.port = self._wait_for_port()
        except BrowserError:
            self.__exit__()
            raise

    def _wait_for_port(self):
        path, deadline = os.path.join(self.folder, "DevToolsActivePort"), time.monotonic() + 180
        while time.monotonic() < deadline:
            if os.path.exists(path):
                with open(path, encoding="ascii") as lines:
                    text = lines.read().split()
                if len(text) == 2:
                    return int(text[0])
            if self.process.poll() is not None:
                raise BrowserError("the browser ended with status %d" % self.process.returncode)
            time.sleep(0.05)
        raise BrowserError("the browser did not start")

    def open(self, url, width, height, dark=False):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("PUT", "/json/new?about:blank")
        target = json.loads(connection.getresponse().read())
        connection.close()
        page = Page(self.port, target["webSocketDebuggerUrl"].split(str(self.port), 1)[1], width,
                    height, dark)
        page.go(url)
        return page

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
