"""Serves the built page and its tests, opens them in a headless Chromium in both colour schemes, and prints the results.

python3 integrations/web/tests/run.py FOLDER [--screenshots FOLDER]
"""

import argparse
import http.server
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TIMEOUT = 240
HOLD = 12


def handler(site, results, done):
    folders = {"/tests/": HERE, "/golden/": ROOT / "golden" / "data", "/": site}

    class Handler(http.server.SimpleHTTPRequestHandler):
        extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".wasm": "application/wasm"}

        def translate_path(self, path):
            path = path.split("?")[0].split("#")[0]
            prefix = next(p for p in folders if path.startswith(p))
            return str(folders[prefix] / path[len(prefix) :])

        def do_POST(self):
            length = int(self.headers["Content-Length"])
            results.extend(json.loads(self.rfile.read(length)))
            self.send_response(204)
            self.end_headers()
            done.set()

        # `shown.html` loads this last: the screenshot, taken when a page has loaded, waits for what the page shows.
        def do_GET(self):
            if self.path.startswith("/hold"):
                time.sleep(HOLD)
                return self.send_error(404)
            super().do_GET()

        # A page that the next test replaces resets its connections.
        def copyfile(self, source, outputfile):
            try:
                super().copyfile(source, outputfile)
            except ConnectionError:
                pass

        def log_message(self, *_):
            pass

    return Handler


def chromium(url, scheme, extra=()):
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    profile = tempfile.mkdtemp()
    # preferredColorScheme: 0 is dark, 1 is light.
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--force-device-scale-factor=2"]
    options += [f"--user-data-dir={profile}", f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"]
    return subprocess.Popen([program, *options, *extra, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), profile


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("--screenshots", type=pathlib.Path)
    args = parser.parse_args()
    results, done = [], threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(args.site.resolve(), results, done))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    for scheme in ("light", "dark"):
        done.clear()
        browser, profile = chromium(f"{base}/tests/test.html?{scheme}", scheme)
        if not done.wait(TIMEOUT):
            results.append([f"{scheme}: the tests end within {TIMEOUT} s", "no result"])
        browser.kill()
        browser.wait()
        shutil.rmtree(profile, ignore_errors=True)
        if args.screenshots:
            args.screenshots.mkdir(parents=True, exist_ok=True)
            for name, width in ((name, width) for name in ("check", "layout") for width in (390, 1280)):
                picture = args.screenshots / f"{name}-{width}-{scheme}.png"
                extra = [f"--screenshot={picture}", f"--window-size={width},1400"]
                browser, profile = chromium(f"{base}/tests/shown.html?{name}", scheme, extra)
                browser.wait(TIMEOUT)
                shutil.rmtree(profile, ignore_errors=True)
    failed = [(name, why) for name, why in results if why]
    for name, why in results:
        print(f"test {name} ... {'FAILED: ' + why if why else 'ok'}")
    verdict = "FAILED" if failed else "ok"
    print(f"test result: {verdict}. {len(results) - len(failed)} passed; {len(failed)} failed; 0 ignored;")
    sys.stdout.flush()
    os._exit(1 if failed else 0)


main()
