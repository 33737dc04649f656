"""Prometheus, Alertmanager and a webhook on free ports, with what deploy/ ships; and the dashboard's expressions.

    with Webhook() as hook, Alertmanager(folder, hook.url) as alerts, Prometheus(folder, daemon.ops, alerts.address) as prometheus:
        prometheus.until("ballast_ready == 1")

Nothing outlives its `with`, and nothing is left in the folders that deploy/ ships.
"""

import contextlib
import json
import queue
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from daemon import ROOT

DEPLOY = ROOT / "deploy"
HOOK_URL = "http://trainer-hook:9465/alerts"  # in the shipped alertmanager.yml
SECONDS = {"s": 1, "m": 60, "h": 3600}
PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager", "amtool")


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if not shutil.which(name)]


def http_json(url: str, body=None):
    request = urllib.request.Request(url, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, None if body is None else json.dumps(body).encode(), timeout=60) as reply:
        return json.loads(reply.read() or "null")


class Service:
    """A program that says on which port it listens, in its log."""

    def __init__(self, folder: Path, *command: str):
        self.folder, self.command, self.address = folder, command, ""
        self.log = folder / f"{command[0]}.log"

    def __enter__(self):
        with self.log.open("wb") as log:
            command = ["setpriv", "--pdeathsig", "KILL", *self.command]  # it ends with us, however we end
            self.process = subprocess.Popen(command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            pattern = r'msg="Listening on" address=(\S+)'
            self.address = self.until_true("it listens", lambda: re.search(pattern, self.log.read_text()))[1]
            self.until_true("it is ready", self.ready)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def ready(self) -> bool:
        """Whether it answers queries: it listens before it does."""
        try:
            urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=60).close()
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            return False
        return True

    def until_true(self, what: str, probe, seconds: float = 120):
        """Waits for the probe to return something true; fails when the program ends, or at the deadline."""
        deadline = time.monotonic() + seconds
        while not (found := probe()):
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}; the log:\n{self.log.read_text()}"
            try:
                code = self.process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"{self.command[0]} ended with {code}; its log:\n{self.log.read_text()}")
        return found


class Alertmanager(Service):
    """Alertmanager with the shipped routes; only the webhook's address differs."""

    def __init__(self, folder: Path, hook_url: str):
        shipped = (DEPLOY / "alertmanager" / "alertmanager.yml").read_text()
        assert shipped.count(HOOK_URL) == 1
        (folder / "alertmanager.yml").write_text(shipped.replace(HOOK_URL, hook_url))
        flags = ["--config.file=alertmanager.yml", "--storage.path=alertmanager", "--cluster.listen-address="]
        super().__init__(folder, "prometheus-alertmanager", *flags, "--web.listen-address=127.0.0.1:0")

    def post(self, *alerts: dict[str, str]) -> None:
        http_json(f"http://{self.address}/api/v2/alerts", [{"labels": labels} for labels in alerts])

    def shown(self) -> list[dict]:
        return http_json(f"http://{self.address}/api/v2/alerts")


class Prometheus(Service):
    """Prometheus with the shipped rules, or those of another folder, evaluated every second; without an Alertmanager or a
    daemon where these are None."""

    def __init__(
        self, folder: Path, daemon: str | None, alertmanager: str | None, rule_folder: Path = DEPLOY / "prometheus"
    ):
        rules = sorted(str(path) for path in rule_folder.glob("*.yml") if "_test" not in path.name)
        target = [{"static_configs": [{"targets": [alertmanager] if alertmanager else []}]}]
        config = {  # JSON is YAML
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [path for path in rules if not path.endswith("/prometheus.yml")],
            "alerting": {"alertmanagers": target},
            "scrape_configs": [{"job_name": "ballast", "static_configs": [{"targets": [daemon] if daemon else []}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        flags = ["--config.file=prometheus.yml", "--storage.tsdb.path=prometheus"]
        super().__init__(folder, "prometheus", *flags, "--web.listen-address=127.0.0.1:0")

    def get(self, path: str, **parameters: str):
        answer = http_json(f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict]:
        """Each series' labels and value; of a scalar too."""
        return self.get("query", query=expression)["result"]

    def until(self, expression: str, seconds: float = 120) -> list[dict]:
        """Waits until the query has series, and returns them."""
        return self.until_true(expression, lambda: self.query(expression), seconds)

    def fired(self) -> set[tuple[str, str]]:
        """Name and run, or "", of each alert that fires, or has in the last five minutes."""
        shown = self.query('max_over_time(ALERTS{alertstate="firing"}[5m])')
        return {(series["metric"]["alertname"], series["metric"].get("run_id", "")) for series in shown}


def hurried_rules(folder: Path) -> Path:
    """The shipped rules, in `folder`, with a twentieth of their durations, from 4 to 30 s; what they compare is as shipped."""

    def hurried(match: re.Match) -> str:
        before, number, unit, after = match.groups()
        return f"{before}{min(30, max(4, int(number) * SECONDS[unit] // 20))}s{after}"

    for name in ("alerts.yml", "rules.yml"):
        text = (DEPLOY / "prometheus" / name).read_text()
        text, count = re.subn(r"(for: |\[|offset )(\d+)([smh])\b(\]?)", hurried, text)
        assert count
        (folder / name).write_text(text)
    return folder


class Webhook:
    """Collects what Alertmanager posts, and answers; after answers.clear() only when that is set again."""

    def __init__(self):
        self.received: queue.SimpleQueue = queue.SimpleQueue()
        self.answers = threading.Event()
        self.answers.set()
        received, answers = self.received, self.answers

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                received.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                answers.wait()
                with contextlib.suppress(OSError):  # who asked has not waited
                    self.send_response(200)
                    self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/alerts"

    def __enter__(self) -> "Webhook":
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.answers.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


# --- the dashboard --------------------------------------------------------------------------------------------------


def dashboard() -> dict:
    return json.loads((DEPLOY / "grafana" / "dashboards" / "ballast.json").read_text())


def panels() -> list[dict]:
    """Without rows."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def resolved(expression: str, interval: str = "1m") -> str:
    """The query as Grafana would send it with everything chosen."""
    text = expression.replace("$__rate_interval", interval)
    for variable in dashboard()["templating"]["list"]:
        text = re.sub(rf"\${variable['name']}\b", variable.get("allValue", "prometheus"), text)
    assert "$" not in text, text
    return text


def expressions() -> list[tuple[str, str]]:
    """(panel's title and letter, expression) of each target, and those of the annotations."""
    found = [
        (f"{panel['title']} {target['refId']}", target["expr"]) for panel in panels() for target in panel["targets"]
    ]
    return found + [(f"annotation {note['name']}", note["expr"]) for note in dashboard()["annotations"]["list"]]
