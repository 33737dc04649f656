"""What deploy/ ships is read by the tools that will read it; where a tool is missing, the test says so and is skipped."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from daemon import BALLASTCTL, BALLASTD, ROOT

DEPLOY = ROOT / "deploy"


def tool(name: str) -> str:
    path = shutil.which(name)
    if not path:
        pytest.skip(f"{name} is not installed")
    return path


def check(*command, cwd=ROOT):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def dashboard():
    return json.loads((DEPLOY / "grafana" / "dashboards" / "ballast.json").read_text())


def test_prometheus_configuration():
    check(tool("promtool"), "check", "config", DEPLOY / "prometheus" / "prometheus.yml")


def test_alert_rules_fire_when_they_should():
    check(tool("promtool"), "test", "rules", "alerts_test.yml", cwd=DEPLOY / "prometheus")


def test_a_broken_rule_is_found(tmp_path):
    broken = (DEPLOY / "prometheus" / "alerts.yml").read_text().replace("== 0", "== == 0")
    (tmp_path / "alerts.yml").write_text(broken)
    with pytest.raises(AssertionError):
        check(tool("promtool"), "check", "rules", tmp_path / "alerts.yml")


def test_alertmanager_configuration():
    check(tool("amtool"), "check-config", DEPLOY / "alertmanager" / "alertmanager.yml")


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_compose_file(profile):
    docker = tool("docker")
    if subprocess.run([docker, "compose", "version"], capture_output=True).returncode != 0:
        pytest.skip("docker has no compose here")
    check(docker, "compose", "--profile", profile, "config", "--quiet")


def test_dashboard_expressions_parse(tmp_path):
    promtool = tool("promtool")
    rules = []
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            expression = (
                target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".+").replace("$run_id", ".+")
            )
            assert "$" not in expression, expression
            rules.append({"record": f"panel:{panel['id']}:{target['refId']}", "expr": expression})
    assert len(rules) > 10
    file = tmp_path / "panels.yml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    check(promtool, "check", "rules", file)


def test_dashboard_panels_are_complete_and_do_not_overlap():
    taken = set()
    for panel in dashboard()["panels"]:
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


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
