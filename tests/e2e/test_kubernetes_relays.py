"""deploy/kubernetes/overlays/relays: relays that find the daemon of overlays/one, and readers that find them."""

import re
import subprocess

import kustomize
import pytest
import yaml
from daemon import BALLASTCTL, BALLASTD, ROOT, plain_environment
from kubernetes_kinds import wrong_in
from kubernetes_overlay import FOLDER, README, Built, commands
from test_kubernetes import bytes_of, seconds

RELAYS = FOLDER / "overlays" / "relays"


class Relays:
    """The overlay, taken apart."""

    def __init__(self):
        self.documents = kustomize.build(RELAYS)
        self.kinds = {document["kind"]: document for document in self.documents}
        assert len(self.kinds) == len(self.documents)
        self.deployment = self.kinds["Deployment"]["spec"]
        self.labels = self.deployment["template"]["metadata"]["labels"]
        self.pod = self.deployment["template"]["spec"]
        [self.relay] = self.pod["containers"]
        self.config = self.kinds["ConfigMap"]["data"]["ballast.yaml"]
        self.keys = yaml.safe_load(self.config)
        self.environment = {entry["name"]: entry["value"] for entry in self.relay["env"]}
        self.mounts = {mount["name"]: mount["mountPath"] for mount in self.relay["volumeMounts"]}


@pytest.fixture(scope="module")
def relays() -> Relays:
    return Relays()


@pytest.fixture(scope="module")
def upstream() -> Built:
    return Built(FOLDER / "overlays" / "one")


def test_kubernetes_takes_it(relays):
    assert [wrong for document in relays.documents for wrong in wrong_in(document)] == []
    assert {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget", "ConfigMap"} == relays.kinds.keys()
    assert {document["metadata"]["namespace"] for document in relays.documents} == {"training"}


def test_labels_select_the_pods(relays, upstream):
    for selector in (
        relays.deployment["selector"]["matchLabels"],
        relays.kinds["Service"]["spec"]["selector"],
        relays.kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        relays.kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        *(entry["labelSelector"]["matchLabels"] for entry in relays.pod["topologySpreadConstraints"]),
    ):
        assert selector and selector.items() <= relays.labels.items()
        assert not selector.items() <= upstream.stateful["template"]["metadata"]["labels"].items()


def test_they_reach_their_upstream_and_it_lets_them_in(relays, upstream):
    host, port = relays.keys["relay"]["upstream"].rsplit(":", 1)
    assert host in upstream.service_names()
    out = relays.kinds["NetworkPolicy"]["spec"]["egress"]
    labels = upstream.stateful["template"]["metadata"]["labels"]
    [rule] = [rule for rule in out if "to" in rule]
    assert rule["ports"] == [{"port": int(port)}]
    assert rule["to"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    let_in = [
        source["podSelector"]["matchLabels"]
        for rule in upstream.kinds["NetworkPolicy"]["spec"]["ingress"]
        if rule["ports"] == [{"port": int(port)}]
        for source in rule["from"]
    ]
    assert any(wanted.items() <= relays.labels.items() for wanted in let_in)
    resolver = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
    assert [rule["ports"] for rule in out if "to" not in rule] == [resolver], "names are asked for, and nothing else"


def test_readers_reach_them(relays):
    ports = {port["name"]: port["containerPort"] for port in relays.relay["ports"]}
    assert relays.keys["listen"] == f"0.0.0.0:{ports['grpc']}"
    assert relays.keys["ops_http"]["listen"] == f"0.0.0.0:{ports['metrics']}"
    service = relays.kinds["Service"]
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    assert "clusterIP" not in service["spec"] and "publishNotReadyAddresses" not in service["spec"]
    rules = relays.kinds["NetworkPolicy"]["spec"]["ingress"]
    open_to = {rule["ports"][0]["port"]: rule["from"][0]["podSelector"]["matchLabels"] for rule in rules}
    assert open_to == {7700: {"ballast.dev/reader": "true"}, 9464: {"ballast.dev/monitor": "true"}}
    for label in ('`ballast.dev/reader: "true"`', f"`{service['metadata']['name']}.training.svc:7700`"):
        assert label in README
    for probe, path in (("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        assert relays.relay[probe]["httpGet"] == {"path": path, "port": "metrics"}


@pytest.mark.skipif(not BALLASTCTL.exists(), reason="needs a built ballastctl")
def test_the_daemon_accepts_the_configuration_and_the_certificate_is_for_the_service(relays, tmp_path):
    """With the certificates that the README's command makes, one authority for the daemon and its relays."""
    [command] = [c for c in commands("ballastctl certs init") if "ballast-relay" in c]
    words = command.split("#")[0].split()
    pki = tmp_path / "pki"
    subprocess.run([BALLASTCTL, *words[1:4], pki, *words[5:]], check=True, timeout=60, env=plain_environment())
    shown = ["openssl", "x509", "-noout", "-ext", "subjectAltName", "-in", pki / "daemon.crt"]
    names = re.findall(r"DNS:([^,\s]+)", subprocess.run(shown, capture_output=True, text=True, check=True).stdout)
    assert f"{relays.kinds['Service']['metadata']['name']}.training.svc" in names
    assert relays.keys["relay"]["upstream"].rsplit(":", 1)[0] in names
    text = relays.config.replace(relays.mounts["tls"], str(pki)).replace(relays.mounts["upstream-tls"], str(pki))
    (tmp_path / "ballast.yaml").write_text(text)
    [argument] = relays.relay["args"]
    assert argument == f"--config={relays.mounts['config']}/ballast.yaml"
    environment = {**plain_environment(), **relays.environment}
    for ask in ("--check-config", "--print-config"):
        told = subprocess.run(
            [BALLASTD, "--config", tmp_path / "ballast.yaml", ask],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
        )
        assert told.returncode == 0, told.stderr
    found = yaml.safe_load(told.stdout)
    assert found["relay"]["runs"] == ["my-run"] and found["relay"]["readers"] == 200
    assert found["storage"]["dir"] == "off"


def test_the_files_of_tls_lie_in_the_secrets_and_nobody_else_can_read_the_keys(relays, upstream):
    secrets = {volume["name"]: volume["secret"] for volume in relays.pod["volumes"] if "secret" in volume}
    for volume, keys, named in (
        ("tls", relays.keys["tls"], ("certificate", "key", "client_ca")),
        ("upstream-tls", relays.keys["relay"], ("certificate", "key", "ca")),
    ):
        [made] = commands(f"kubectl -n training create secret generic {secrets[volume]['secretName']} ")
        files = {f"{relays.mounts[volume]}/{name}" for name in re.findall(r"=pki/(\S+)", made)}
        assert files == {keys[key] for key in named}
        assert secrets[volume]["defaultMode"] & 0o007 == 0
    assert secrets["tls"]["secretName"] == upstream.volume("secret")["secret"]["secretName"]


def test_they_have_no_rights_that_they_do_not_need(relays):
    """Pod security's profile `restricted`, and more; and nothing to write to but /tmp."""
    context = relays.pod["securityContext"]
    assert context["runAsNonRoot"] and context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not relays.pod["automountServiceAccountToken"] and not relays.pod["enableServiceLinks"]
    confined = relays.relay["securityContext"]
    assert not confined["allowPrivilegeEscalation"] and confined["readOnlyRootFilesystem"]
    assert confined["capabilities"] == {"drop": ["ALL"]}
    writable = [mount["mountPath"] for mount in relays.relay["volumeMounts"] if not mount.get("readOnly")]
    assert writable == ["/tmp"]


def test_they_have_memory_for_their_limit_and_time_to_end(relays):
    resources = relays.relay["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    limit = relays.environment["BALLAST_MEMORY_LIMIT"]
    assert bytes_of(resources["limits"]["memory"]) >= bytes_of(limit) + 2**31
    assert relays.pod["terminationGracePeriodSeconds"] >= 2 * seconds(relays.keys["drain_timeout"]) + 20
    # One is there while another is replaced, and while a node is drained.
    assert relays.deployment["replicas"] > relays.kinds["PodDisruptionBudget"]["spec"]["maxUnavailable"]
    assert relays.deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_the_image_is_of_this_version(relays):
    version = re.search(r"project\(ballast VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
    assert relays.relay["image"] == f"registry.example.org/ballast:{version}"
