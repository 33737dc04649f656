"""deploy/kubernetes: what its overlays build is what Kubernetes takes, its parts fit together, and the daemon accepts its
configuration. No cluster has a part in it."""

import copy
import re
import shutil
import subprocess

import kustomize
import pytest
import yaml
from daemon import BALLASTCTL, BALLASTD, ROOT, plain_environment
from kubernetes_kinds import wrong_in
from kubernetes_overlay import EXAMPLES, FOLDER, OVERLAYS, README, Built, commands, example, monitoring


def seconds(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(s|m|h)", text).groups()
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]


def bytes_of(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)B?", text).groups()
    return int(number) * {"Mi": 2**20, "Gi": 2**30}[unit]


@pytest.fixture(params=[*OVERLAYS, "sharded on GPUs"], scope="module")
def built(request, tmp_path_factory) -> Built:
    name, *with_gpus = request.param.split(" on ")
    if not with_gpus:
        return Built(FOLDER / "overlays" / name)
    copied = shutil.copytree(FOLDER, tmp_path_factory.mktemp("kubernetes") / "kubernetes")
    file = copied / "overlays" / name / "kustomization.yaml"
    switch = re.search(r"`(components: \[.*?\])`", file.read_text())[1]  # as its comment says
    file.write_text(file.read_text() + switch + "\n")
    return Built(file.parent)


# --- what is built ----------------------------------------------------------------------------------------------------


def in_order(documents: list[dict]) -> list[dict]:
    return sorted(documents, key=lambda document: (document["kind"], document["metadata"]["name"]))


@pytest.mark.parametrize("folder", [*(f"overlays/{name}" for name in (*OVERLAYS, "relays")), "monitoring"])
def test_it_is_built_as_kubectl_builds_it(folder):
    """Where there is a kubectl of 1.21 or later; elsewhere the tests stand on the resolver alone."""
    kubectl = shutil.which("kubectl")
    if not kubectl:
        pytest.skip("kubectl is not installed: the tests' own resolver was not compared with kustomize")
    told = subprocess.run([kubectl, "kustomize", FOLDER / folder], capture_output=True, text=True, timeout=60)
    if "json: unknown field" in told.stderr or "Component" in told.stderr:
        pytest.skip(f"this kubectl is too old for kustomize's components: {told.stderr}")
    assert told.returncode == 0, told.stderr
    assert in_order(yaml.safe_load_all(told.stdout)) == in_order(kustomize.build(FOLDER / folder))


def test_the_resolver_refuses_what_it_does_not_know(tmp_path):
    (tmp_path / "kustomization.yaml").write_text("kind: Kustomization\nnamePrefix: my-\n")
    with pytest.raises(ValueError, match="namePrefix"):
        kustomize.build(tmp_path)


def test_each_kustomization_names_all_files_beside_it():
    for file in FOLDER.rglob("kustomization.yaml"):
        text = yaml.safe_load(file.read_text())
        named = {name for name in text.get("resources", []) if name.endswith(".yaml")}
        named |= {wanted["path"] for wanted in text.get("patches", [])}
        named |= {name for made in text.get("configMapGenerator", []) for name in made["files"]}
        assert named == {path.name for path in file.parent.glob("*.yaml")} - {file.name}, file


def test_kubernetes_takes_it(built):
    assert [wrong for document in built.documents for wrong in wrong_in(document)] == []


def test_kubernetes_takes_what_is_beside_it():
    examples = [example(name) for name in EXAMPLES]
    assert {document["kind"] for document in examples} == {"LeaderWorkerSet", "JobSet"}
    assert [wrong for document in [*examples, *monitoring()] for wrong in wrong_in(document)] == []


def planted():
    """(document, where in it, a field that is none)."""
    stateful = Built(FOLDER / "overlays" / "one").kinds["StatefulSet"]
    monitor, *_ = [document for document in monitoring() if document["kind"] == "ServiceMonitor"]
    group, jobs = (example(name) for name in EXAMPLES)
    return [
        (stateful, ["spec", "template", "spec", "containers", 0]),
        (stateful, ["spec"]),
        (monitor, ["spec", "endpoints", 0, "relabelings", 0]),
        (group, ["spec", "leaderWorkerTemplate"]),
        (group, ["spec", "leaderWorkerTemplate", "workerTemplate", "spec", "containers", 0, "securityContext"]),
        (jobs, ["spec", "replicatedJobs", 0, "template", "spec", "template", "spec"]),
        (jobs, ["spec", "failurePolicy"]),
    ]


@pytest.mark.parametrize(("document", "path"), planted(), ids=lambda value: ".".join(map(str, value))[-40:])
def test_a_field_that_is_none_is_found(document, path):
    document = copy.deepcopy(document)
    place = document
    for step in path:
        place = place[step]
    place["repplicas"] = 1
    assert any("repplicas" in wrong for wrong in wrong_in(document))


# --- the daemon -------------------------------------------------------------------------------------------------------


def effective(built: Built, pod: str, folder, config: str) -> dict:
    """What the daemon has of the pod's command line, environment and files."""
    (folder / "ballast.yaml").write_text(config)
    arguments = [part.replace(f"={built.mount('config')}/", f"={folder}/") for part in built.arguments(pod)]
    assert arguments != built.arguments(pod)
    environment = {**plain_environment(), **built.environment(pod)}
    command = [BALLASTD, *arguments, "--print-config"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert told.returncode == 0, told.stderr
    return yaml.safe_load(told.stdout)


@pytest.mark.skipif(not BALLASTD.exists(), reason="needs a built daemon")
@pytest.mark.parametrize("comments", [False, True])
def test_the_daemon_accepts_the_configuration(built, tmp_path, comments):
    """Also with the keys that are shown in comments."""
    text = re.sub(r"^( +)# (on_published\w*:)", r"\1\2", built.config, flags=re.MULTILINE) if comments else built.config
    assert ("\n  on_published: [" in text) == comments
    on_gpus = "nvidia.com/gpu" in built.daemon["resources"]["limits"]
    for pod in built.pods:
        found = effective(built, pod, tmp_path, text)
        assert found["storage"]["dir"] == built.keys["storage"]["dir"]
        assert bool(found["storage"]["on_published"]) == comments
        assert found["device"] == ("cuda:all" if on_gpus else "cpu")


@pytest.mark.skipif(not BALLASTD.exists(), reason="needs a built daemon")
def test_the_daemon_answers_to_the_names_that_its_pod_has(built, tmp_path):
    for pod in built.pods:
        short = f"{pod}.{built.stateful['serviceName']}"
        full = f"{short}.{built.namespace}.svc"
        hosts = effective(built, pod, tmp_path, built.config)["ops_http"]["hosts"]
        assert hosts == [short, full, f"{full}.cluster.local"]


def test_ports_are_those_of_the_configuration(built):
    ports = {port["name"]: port["containerPort"] for port in built.daemon["ports"]}
    assert built.keys["listen"] == f"0.0.0.0:{ports['grpc']}"
    assert built.keys["ops_http"]["listen"] == f"0.0.0.0:{ports['metrics']}"
    service = built.kinds["Service"]
    assert service["spec"]["clusterIP"] == "None" and built.stateful["serviceName"] == service["metadata"]["name"]
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert built.daemon[probe]["httpGet"]["port"] == "metrics"
    assert built.daemon["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert built.daemon["readinessProbe"]["httpGet"]["path"] == "/readyz"
    open_to = {port["port"] for rule in built.kinds["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]}
    assert open_to == set(ports.values())


def test_labels_select_the_pod(built):
    labels = built.stateful["template"]["metadata"]["labels"]
    selectors = [
        built.stateful["selector"]["matchLabels"],
        built.kinds["Service"]["spec"]["selector"],
        built.kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        built.kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        *(entry["labelSelector"]["matchLabels"] for entry in built.pod.get("topologySpreadConstraints", [])),
    ]
    for selector in selectors:
        assert selector and selector.items() <= labels.items()
    assert len(selectors) == (5 if len(built.pods) > 1 else 4)


def test_storage_lies_on_the_claim(built):
    [claim] = built.stateful["volumeClaimTemplates"]
    volumes = {volume["name"] for volume in built.pod["volumes"]} | {claim["metadata"]["name"]}
    for container in built.containers():
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() <= volumes
        assert built.keys["storage"]["dir"].startswith(mounts[claim["metadata"]["name"]] + "/")
    [folder] = built.pod["initContainers"]
    assert built.keys["storage"]["dir"] in folder["command"]
    assert built.volume("configMap")["configMap"]["name"] == built.kinds["ConfigMap"]["metadata"]["name"]


def test_the_pod_has_time_to_drain_and_memory_for_its_limit(built):
    # The open step, the last checkpoints, and then the commands: writing has ten minutes.
    assert built.pod["terminationGracePeriodSeconds"] >= 2 * seconds(built.keys["drain_timeout"]) + 600
    resources = built.daemon["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    limit = built.environment(built.pods[0]).get("BALLAST_MEMORY_LIMIT")
    assert (limit is None) == ("nvidia.com/gpu" in resources["limits"])
    assert limit is None or bytes_of(resources["limits"]["memory"]) >= bytes_of(limit) + 2**31
    assert "memory_limit" not in built.keys and "lifecycle" not in built.daemon


def test_it_has_no_rights_that_it_does_not_need(built):
    """Pod security's profile `restricted`, and more."""
    context = built.pod["securityContext"]
    assert context["runAsNonRoot"] and context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not built.pod["automountServiceAccountToken"] and not built.pod["enableServiceLinks"]
    user = re.search(r"^USER (\d+):(\d+)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    assert [context[key] for key in ("runAsUser", "fsGroup")] == [int(number) for number in user.groups()]
    for container in built.containers():
        context = container["securityContext"]
        assert not context["allowPrivilegeEscalation"] and context["readOnlyRootFilesystem"]
        assert context["capabilities"] == {"drop": ["ALL"]}
    assert built.kinds["NetworkPolicy"]["spec"]["egress"] == []


def test_the_image_is_of_this_version(built):
    version = re.search(r"project\(ballast VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
    tag = f"{version}-gpu" if "nvidia.com/gpu" in built.daemon["resources"]["limits"] else version
    assert {container["image"] for container in built.containers()} == {f"registry.example.org/ballast:{tag}"}
    for tag in (version, f"{version}-gpu"):
        assert f" -t registry.example.org/ballast:{tag} " in README


# --- certificates ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not BALLASTCTL.exists(), reason="needs a built ballastctl")
def test_the_certificate_that_is_shown_is_for_every_pod(built, tmp_path):
    """Made by the commands of the README, and taken by the daemon."""
    made = commands("ballastctl certs init")
    command = next(c for c in made if ("ballast-2" in c) == (len(built.pods) > 1)).split("#")[0].split()
    assert command[:5] == ["ballastctl", "certs", "init", "--out", "pki"]
    pki = tmp_path / "pki"
    subprocess.run([BALLASTCTL, *command[1:4], pki, *command[5:]], check=True, timeout=60, env=plain_environment())
    shown = ["openssl", "x509", "-noout", "-ext", "subjectAltName", "-in", pki / "daemon.crt"]
    names = re.findall(r"DNS:([^,\s]+)", subprocess.run(shown, capture_output=True, text=True, check=True).stdout)
    assert set(built.service_names()) <= set(names)
    text = built.config.replace(built.mount("tls"), str(pki)).replace("dir: /var", f"dir: {tmp_path} # ")
    effective(built, built.pods[0], tmp_path, text)
    check = [BALLASTD, "--config", tmp_path / "ballast.yaml", "--check-config"]
    told = subprocess.run(check, capture_output=True, text=True, timeout=60, env=plain_environment())
    assert told.returncode == 0, told.stderr


def test_the_files_of_tls_lie_in_the_secret_and_nobody_else_can_read_the_key(built):
    secret = built.volume("secret")["secret"]
    [made] = commands(f"kubectl -n {built.namespace} create secret generic {secret['secretName']} ")
    assert {f"{built.mount('tls')}/{name}" for name in re.findall(r"=pki/(\S+)", made)} == {
        built.keys["tls"][key] for key in ("certificate", "key", "client_ca")
    }
    assert secret["defaultMode"] & 0o007 == 0
