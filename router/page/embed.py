#!/usr/bin/env python3
"""embed.py index.html style.css page.js -> a C header with the page and its content security policy.

The style and the script take the places of <!--style--> and <!--script--> in the page.  The policy names
them by their digests, so a browser runs exactly what was built here.
"""

import base64
import hashlib
import sys

PER_LINE = 20


def digest(text):
    return "'sha256-%s'" % base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def main():
    page, style, script = (open(name, encoding="utf-8").read() for name in sys.argv[1:])
    for mark in ("<!--style-->", "<!--script-->"):
        if page.count(mark) != 1:
            sys.exit("%s: %s must stand there once" % (sys.argv[1], mark))
    policy = "; ".join([
        "default-src 'none'", "style-src " + digest(style), "script-src " + digest(script),
        "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'",
        "frame-ancestors 'none'"])
    page = page.replace("<!--style-->", "<style>" + style + "</style>")
    page = page.replace("<!--script-->", "<script>" + script + "</script>")
    data = page.encode()
    print("/* Made by router/page/embed.py. */")
    print('static const char ds4_page_policy[] = "%s";' % policy)
    print("static const unsigned char ds4_page_html[%d] = {" % len(data))
    for at in range(0, len(data), PER_LINE):
        print(",".join(str(byte) for byte in data[at:at + PER_LINE]) + ",")
    print("};")


main()
