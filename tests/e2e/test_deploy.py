"""What deploy/ ships is read by the tools that will read it; where a tool is missing, the test says so and is skipped."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from daemon import BALLASTCTL, BALLASTD, ROOT
from monitoring import DEPLOY, HOOK_URL, dashboard, expressions, panels, resolved

ROWS = ["Overview", "Optimizer health", "Loss spikes", "Trainers", "Durability", "Memory", "RPC"]


def tool(name: str) -> str:
    path = shutil.which(name)
    if not path:
        pytest.skip(f"{name} is not installed")
    return path


def check(*command, cwd=ROOT):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd, timeout=180)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


METRICS = (ROOT / "server" / "metrics" / "METRICS.md").read_text()
RULES = [DEPLOY / "prometheus" / name for name in ("rules.yml", "alerts.yml")]
ALERTS = (DEPLOY / "prometheus" / "alerts.yml").read_text()
ALERT_NAMES = sorted(set(re.findall(r"- alert: (\w+)", ALERTS)))
EXPRESSION = r"\n\s+expr:([\s\S]*?)(?=\n\s+(?:for|labels):|\n\n|\Z)"
CASES = [(DEPLOY / "prometheus" / name).read_text() for name in ("alerts_test.yml", "alerts_slow_test.yml")]


def unknown_metrics(text: str) -> set[str]:
    """The daemon's metrics, and recorded ones, that `text` reads and nobody makes."""
    listed = set(re.findall(r"^\| `(\w+)` \|", METRICS, re.MULTILINE))
    recorded = set(re.findall(r"- record: (\S+)", RULES[0].read_text()))
    read = set(re.findall(r"\b(?:ballast|process)_[a-z0-9_]+(?![\w:]*:)(?<!:)|\b\w+:\w+:\w+\b", text))
    return {
        name
        for name in read
        if re.sub(r"_(bucket|sum|count)$", "", name) not in listed and name not in listed | recorded
    }


# --- Prometheus -----------------------------------------------------------------------------------------------------


def test_prometheus_configuration():
    check(tool("promtool"), "check", "config", DEPLOY / "prometheus" / "prometheus.yml")


@pytest.mark.parametrize("cases", ["alerts_test.yml", "alerts_slow_test.yml", "rules_test.yml"])
def test_rules_say_what_they_should(cases):
    check(tool("promtool"), "test", "rules", cases, cwd=DEPLOY / "prometheus")


def test_a_broken_rule_is_found(tmp_path):
    (tmp_path / "alerts.yml").write_text(ALERTS.replace("== 0", "== == 0"))
    with pytest.raises(AssertionError):
        check(tool("promtool"), "check", "rules", tmp_path / "alerts.yml")


@pytest.mark.parametrize("alert", ALERT_NAMES)
def test_each_alert_is_tested(alert, tmp_path):
    """It fires in one case and is silent in another; and were it deaf, its cases would say so."""
    cases = re.findall(rf"alertname: {alert}\n(\s+exp_alerts:)?", "".join(CASES))
    assert any(cases) and not all(cases)
    (tmp_path / "rules.yml").write_text("groups: []\n")
    (tmp_path / "alerts.yml").write_text(
        f"groups: [{{ name: deaf, rules: [{{ alert: {alert}, expr: vector(0) > 1 }}] }}]\n"
    )
    said = ""
    for text in CASES:
        head, *blocks = text.split("\n  - name: ")
        mine = [block for block in blocks if f"alertname: {alert}\n" in block]
        (tmp_path / "cases.yml").write_text("\n  - name: ".join([head, *mine]))
        command = [tool("promtool"), "test", "rules", "cases.yml"]
        said += subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=180).stderr
    assert f"alertname: {alert}, time" in said, said


@pytest.mark.parametrize("alert", ALERT_NAMES)
def test_each_alert_has_all_its_words(alert):
    for block in re.findall(rf"- alert: {alert}\n([\s\S]*?)(?=\n\n|\Z)", ALERTS):
        assert re.search(r"^\s+severity: (warning|critical|info)$", block, re.MULTILINE), block
        assert re.search(r"^\s+component: (daemon|run|optimizer)$", block, re.MULTILINE), block
        assert "summary: " in block and "description: " in block
        assert re.search(rf"runbook_url: .*externalLabels.runbook_base.*http://.*/runbook.*#{alert.lower()}'", block)


def test_the_runbook_has_a_section_for_each_alert_and_no_other():
    runbook = (DEPLOY / "README.md").read_text().split("# Runbook\n")[1]
    assert sorted(re.findall(r"^## (\w+)$", runbook, re.MULTILINE)) == ALERT_NAMES


def test_the_table_says_of_each_alert_which_test_has_fired_it():
    """And of one, that none has."""
    text = (DEPLOY / "README.md").read_text().split("## What each alert was fired by\n")[1].split("\n# ")[0]
    rows = [row.strip("| ").split(" | ") for row in re.findall(r"^\| Ballast.*$", text, re.MULTILINE)]
    assert sorted(row[0] for row in rows) == ALERT_NAMES
    for alert, _, *fired in rows:
        tests = re.findall(r"`(test_\w+\.py)`", fired[-1])
        assert tests or fired[0].startswith("not fired: "), alert
        for name in tests:
            assert re.search(rf"\b{alert}\b", (ROOT / "tests" / "e2e" / name).read_text()), (alert, name)


def test_rules_read_metrics_that_exist():
    read = [text for path in RULES for text in re.findall(EXPRESSION, path.read_text())]
    assert len(read) == sum(len(re.findall("- (?:alert|record): ", path.read_text())) for path in RULES)
    assert unknown_metrics(" ".join(read)) == set()
    planted = unknown_metrics("rate(ballast_x_total[1m]) > run_id:ballast_y:sum + ballast_step_duration_seconds_sum")
    assert planted == {"ballast_x_total", "run_id:ballast_y:sum"}


# --- Alertmanager ---------------------------------------------------------------------------------------------------


def test_alertmanager_configuration():
    check(tool("amtool"), "check-config", DEPLOY / "alertmanager" / "alertmanager.yml")


ROUTES = [
    ("trainer-hook,warning", "alertname=BallastLossSpikePredicted severity=warning run_id=r layer=l"),
    ("trainer-hook,warning", "alertname=BallastSpikeActionTaken severity=warning action=skip"),
    ("trainer-hook,critical", "alertname=BallastSpikeActionTaken severity=critical action=stop"),
    ("critical", "alertname=BallastDown severity=critical"),
    ("warning", "alertname=BallastLossSpike severity=warning"),
    ("info", "alertname=BallastPredictorUseless severity=info"),
]


def route(receivers: str, labels: str) -> str:
    file = DEPLOY / "alertmanager" / "alertmanager.yml"
    command = [tool("amtool"), "config", "routes", "test", f"--config.file={file}", f"--verify.receivers={receivers}"]
    return check(*command, *labels.split())


@pytest.mark.parametrize(("receivers", "labels"), ROUTES, ids=[labels for _, labels in ROUTES])
def test_alerts_go_to_their_receivers(receivers, labels):
    route(receivers, labels)
    with pytest.raises(AssertionError):
        route("nobody", labels)


# --- containers -----------------------------------------------------------------------------------------------------


def test_compose_mounts_what_is_shipped():
    compose = (ROOT / "docker-compose.yml").read_text()
    for folder in re.findall(r"- \./(\S+?):", compose):
        assert any((ROOT / folder).iterdir()), folder
    for path in ("prometheus/prometheus.yml", "alertmanager/alertmanager.yml"):
        assert f"--config.file=/etc/{path}" in compose and (DEPLOY / path).exists()
    assert "trainer-hook:host-gateway" in compose and "http://trainer-hook:" in HOOK_URL
    home = re.search(r"GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH: (\S+)", compose)[1]
    provided = (DEPLOY / "grafana" / "provisioning" / "dashboards" / "ballast.yml").read_text()
    assert f"path: {home.rsplit('/', 1)[0]}\n" in provided
    assert (DEPLOY / "grafana" / "dashboards" / home.rsplit("/", 1)[1]).exists()


SERVICES = ["x-ballastd: &ballastd", "prometheus:", "alertmanager:", "grafana:"]


def service(name: str) -> str:
    """A service's block of the compose file."""
    compose = (ROOT / "docker-compose.yml").read_text().split("\nvolumes:\n")[0]
    indent = "" if name.startswith("x-") else "  "
    return re.search(rf"^{indent}{re.escape(name)}\n((?:{indent}  .*\n?)+)", compose, re.MULTILINE)[1]


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_has_a_health_check_and_is_started_anew(name):
    block = service(name)
    assert re.search(r"healthcheck:\n\s+test: \[", block) and "<<: *hardened" in block
    assert "restart: unless-stopped" in service("x-hardened: &hardened")


def test_nobody_logs_into_grafana_and_silences_are_kept():
    grafana = service("grafana:")
    assert 'GF_AUTH_BASIC_ENABLED: "false"\n' in grafana
    assert 'GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION: "true"\n' in grafana
    alertmanager = service("alertmanager:")
    assert "- alertmanager:/alertmanager\n" in alertmanager and "--storage.path=/alertmanager" in alertmanager
    assert "tmpfs" not in alertmanager
    assert "\n  alertmanager:\n" in (ROOT / "docker-compose.yml").read_text().split("\nvolumes:")[1]


def test_the_profile_for_gpus_takes_its_image_and_all_gpus():
    text = service("ballastd-gpu:")
    assert "image: ballast:gpu\n" in text and "dockerfile: deploy/Dockerfile.gpu\n" in text
    assert "count: ${BALLAST_GPUS:-all}\n" in text and '"--device", "cuda:all"' in text


def test_a_silent_daemon_ends_and_the_image_knows_its_revision():
    daemon = service("x-ballastd: &ballastd")
    assert '"--watchdog", "60s"' in daemon and "BALLAST_REVISION: ${BALLAST_REVISION:-}" in daemon
    file = (DEPLOY / "Dockerfile").read_text()
    assert "ARG BALLAST_REVISION=\n" in file and '-DBALLAST_REVISION="$BALLAST_REVISION"' in file
    assert "BALLAST_GIVEN_REVISION" in (ROOT / "server" / "CMakeLists.txt").read_text()


def test_flags_that_are_shipped_are_flags(tmp_path):
    """The daemon itself accepts the flags of the compose file, the image and the unit."""
    if not BALLASTD.exists():
        pytest.skip("needs a built daemon")
    unit = (DEPLOY / "systemd" / "ballastd.service").read_text()
    services = [service(name) for name in ("x-ballastd: &ballastd", "ballastd-gpu:")]
    commands = [json.loads(re.search(r"command: (\[.*\])", text)[1]) for text in services]
    for image in ("Dockerfile", "Dockerfile.gpu"):
        commands.append(json.loads(re.search(r"^CMD (\[.*\])", (DEPLOY / image).read_text(), re.MULTILINE)[1]))
    empty = tmp_path / "ballast.yaml"
    empty.write_text("")
    for line in re.findall(r"^ExecStart\w*=\S+ (.*)", unit, re.MULTILINE):
        commands.append(line.replace("/etc/ballast.yaml", str(empty)).split())
    for command in commands:  # of each the folder of storage is on a machine of its own
        command = [part.replace("/var/lib/ballast", str(tmp_path)) for part in command]
        check(BALLASTD, "--check-config", *[part for part in command if part != "--check-config"])
    assert "WatchdogSec=" in unit and "Type=notify" in unit and "LimitNOFILE=" in unit


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_compose_file(profile):
    docker = tool("docker")
    if subprocess.run([docker, "compose", "version"], capture_output=True).returncode != 0:
        pytest.skip("docker has no compose here")
    check(docker, "compose", "--profile", profile, "config", "--quiet")


# --- the dashboard --------------------------------------------------------------------------------------------------


def test_dashboard_expressions_parse(tmp_path):
    promtool = tool("promtool")
    rules = [{"record": f"panel:{i}", "expr": resolved(text)} for i, (_, text) in enumerate(expressions())]
    assert len(rules) > 50
    file = tmp_path / "panels.yml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    check(promtool, "check", "rules", file)
    rules[7]["expr"] += ")"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    with pytest.raises(AssertionError):
        check(promtool, "check", "rules", file)


def test_dashboard_reads_metrics_that_exist():
    for title, text in expressions():
        assert unknown_metrics(text) == set(), title
    for variable in dashboard()["templating"]["list"]:
        assert unknown_metrics(variable["query"]) == set()


def test_dashboard_filters_by_what_is_chosen():
    """Every series has an instance, those of a run its id, those of a layer its name: a panel obeys the choice."""
    for title, text in expressions():
        for name, selector in re.findall(r"\b((?:ballast|process)_\w+|\w+:ballast_\w+:\w+|up)\{(.*?)\}", text):
            labels = re.search(rf"`{re.sub('_(bucket|sum|count)$', '', name)}` \| \w+ \| (.*?) \|", METRICS)
            wanted = ["instance", *(label for label in ("run_id", "layer") if labels and f"`{label}`" in labels[1])]
            wanted += ["run_id"] if ":" in name else []
            assert all(f'{label}=~"${label}"' in selector for label in wanted), f"{title}: {name}"
        assert "rate(" not in text or "[$__rate_interval]" in text, title


def test_dashboard_panels_are_complete_and_do_not_overlap():
    taken, ids, titles = set(), [], []
    for panel in dashboard()["panels"]:
        ids.append(panel["id"])
        titles.append(panel["title"])
        if panel["type"] != "row":
            assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len(set(ids)) == len(ids) and len(set(titles)) == len(titles)


def test_dashboard_is_bound_to_no_installation():
    """Another Grafana's data source has another uid: every part asks for the one that is chosen."""
    board = dashboard()
    assert board["id"] is None and board["uid"] and not board["editable"] and board["timezone"] == "utc"
    assert [panel["title"] for panel in board["panels"] if panel["type"] == "row"] == ROWS
    variables = board["templating"]["list"]
    assert [variable["name"] for variable in variables] == ["datasource", "instance", "run_id", "layer"]
    asking = [part for panel in panels() for part in (panel, *panel["targets"])]
    for part in [*asking, *variables[1:], *board["annotations"]["list"]]:
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board)))
    assert used == {"datasource", "instance", "run_id", "layer", "__rate_interval", "__all"}


# --- the image ------------------------------------------------------------------------------------------------------


def test_the_image_installs_every_library_the_programs_link():
    """The runtime group of packages.sh names Debian 12's packages; each library linked directly is in one of them."""
    if not BALLASTD.exists() or "bookworm" not in Path("/etc/os-release").read_text():
        pytest.skip("needs a built daemon on Debian 12")
    listed = check(DEPLOY / "packages.sh", "--list", "runtime").split()
    everywhere = {"libc6", "libgcc-s1"}
    for program in (BALLASTD, BALLASTCTL):
        for library in re.findall(r"NEEDED\s+(\S+)", check(tool("objdump"), "-p", program)):
            owner = subprocess.run(["dpkg", "-S", f"*/{library}"], capture_output=True, text=True).stdout
            packages = {entry.split(":")[0] for entry in owner.splitlines()}
            assert packages & (
                set(listed) | everywhere
            ), f"{program.name} links {library} of {packages or 'no package'}"
