"""deploy/kubernetes/ballast.yaml: it is YAML, its parts fit together, and the daemon accepts its configuration."""

import re
import subprocess

import pytest
import yaml
from daemon import BALLASTD, ROOT

FILE = ROOT / "deploy" / "kubernetes" / "ballast.yaml"
DOCUMENTS = {document["kind"]: document for document in yaml.safe_load_all(FILE.read_text())}
STATEFUL = DOCUMENTS["StatefulSet"]["spec"]
POD = STATEFUL["template"]["spec"]
[DAEMON] = POD["containers"]
CONFIG = DOCUMENTS["ConfigMap"]["data"]["ballast.yaml"]
KEYS = yaml.safe_load(CONFIG)


def seconds(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(s|m|h)", text).groups()
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]


def bytes_of(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)B?", text).groups()
    return int(number) * {"Mi": 2**20, "Gi": 2**30}[unit]


def checked(arguments: list[str]) -> str:
    """What the daemon has of this command line; fails where it refuses it."""
    result = subprocess.run([BALLASTD, *arguments, "--print-config"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(not BALLASTD.exists(), reason="needs a built daemon")
@pytest.mark.parametrize("comments", [False, True])
def test_the_daemon_accepts_the_configuration(tmp_path, comments):
    """Also with the keys that are shown in comments."""
    text = re.sub(r"^( +)# (on_published\w*:)", r"\1\2", CONFIG, flags=re.MULTILINE) if comments else CONFIG
    assert ("\n  on_published: [" in text) == comments
    (tmp_path / "ballast.yaml").write_text(text)
    mount = next(m["mountPath"] for m in DAEMON["volumeMounts"] if m["name"] == "config")
    arguments = [part.replace(mount, str(tmp_path)) for part in DAEMON["args"]]
    assert arguments != DAEMON["args"]
    effective = yaml.safe_load(checked(arguments))
    assert effective["storage"]["dir"] == KEYS["storage"]["dir"]
    assert bool(effective["storage"]["on_published"]) == comments
    assert effective["ops_http"]["hosts"] == KEYS["ops_http"]["hosts"]


def test_ports_and_names_are_those_of_the_configuration():
    ports = {port["name"]: port["containerPort"] for port in DAEMON["ports"]}
    assert KEYS["listen"] == f"0.0.0.0:{ports['grpc']}" and KEYS["ops_http"]["listen"] == f"0.0.0.0:{ports['metrics']}"
    service = DOCUMENTS["Service"]
    assert service["spec"]["clusterIP"] == "None" and STATEFUL["serviceName"] == service["metadata"]["name"]
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    pod = f"{DOCUMENTS['StatefulSet']['metadata']['name']}-0.{STATEFUL['serviceName']}"
    assert all(host == pod or host.startswith(f"{pod}.training.svc") for host in KEYS["ops_http"]["hosts"])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert DAEMON[probe]["httpGet"]["port"] in ports
    assert DAEMON["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert DAEMON["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_the_files_of_tls_lie_in_the_secret_and_nobody_else_can_read_the_key():
    [secret] = [volume["secret"] for volume in POD["volumes"] if "secret" in volume]
    [mount] = [mount["mountPath"] for mount in DAEMON["volumeMounts"] if mount["name"] == "tls"]
    commands = FILE.read_text().split("apiVersion:")[0]
    made = re.search(rf"create secret generic {secret['secretName']} ((?:--from-file=\S+|[\s#\\])+)", commands)[1]
    assert {f"{mount}/{name}" for name in re.findall(r"=pki/(\S+)", made)} == {
        KEYS["tls"][key] for key in ("certificate", "key", "client_ca")
    }
    assert secret["defaultMode"] & 0o007 == 0
    assert (
        f"certs init --out pki --host {next(h for h in KEYS['ops_http']['hosts'] if h.endswith('.svc'))} " in commands
    )


def test_labels_select_the_pod():
    labels = STATEFUL["template"]["metadata"]["labels"]
    for selector in (
        STATEFUL["selector"]["matchLabels"],
        DOCUMENTS["Service"]["spec"]["selector"],
        DOCUMENTS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector and selector.items() <= labels.items()


def test_storage_lies_on_the_claim():
    [claim] = STATEFUL["volumeClaimTemplates"]
    volumes = {volume["name"] for volume in POD["volumes"]} | {claim["metadata"]["name"]}
    for container in (DAEMON, *POD["initContainers"]):
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() <= volumes
        assert KEYS["storage"]["dir"].startswith(mounts[claim["metadata"]["name"]] + "/")
    [folder] = POD["initContainers"]
    assert KEYS["storage"]["dir"] in folder["command"]
    [config] = [volume for volume in POD["volumes"] if "configMap" in volume]
    assert config["configMap"]["name"] == DOCUMENTS["ConfigMap"]["metadata"]["name"]
    assert STATEFUL["replicas"] == 1


def test_the_pod_has_time_to_drain_and_memory_for_its_limit():
    # The open step, the last checkpoints, and then the commands: writing has ten minutes.
    assert POD["terminationGracePeriodSeconds"] >= 2 * seconds(KEYS["drain_timeout"]) + 600
    assert bytes_of(DAEMON["resources"]["limits"]["memory"]) >= bytes_of(KEYS["memory_limit"]) + 2**30


def test_it_has_no_rights_that_it_does_not_need():
    assert POD["securityContext"]["runAsNonRoot"] and not POD["automountServiceAccountToken"]
    user = re.search(r"^USER (\d+):(\d+)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    assert [POD["securityContext"][key] for key in ("runAsUser", "fsGroup")] == [
        int(number) for number in user.groups()
    ]
    for container in (DAEMON, *POD["initContainers"]):
        context = container["securityContext"]
        assert not context["allowPrivilegeEscalation"] and context["readOnlyRootFilesystem"]
        assert context["capabilities"] == {"drop": ["ALL"]}
