"""What lies beside the overlays of deploy/kubernetes: trainers that find their daemons, and a Prometheus that watches them."""

import os
import re
import subprocess

import kustomize
import pytest
import yaml
from daemon import ROOT
from kubernetes_overlay import EXAMPLES, FOLDER, OVERLAYS, Built, commands, example, monitoring
from torch.distributed.run import get_args_parser


@pytest.fixture(params=OVERLAYS, scope="module")
def built(request) -> Built:
    return Built(FOLDER / "overlays" / request.param)


def template_of(document: dict) -> tuple[dict, int]:
    """The pods' template, and how many of them there are."""
    if document["kind"] == "LeaderWorkerSet":
        group = document["spec"]["leaderWorkerTemplate"]
        return group["workerTemplate"], group["size"]
    [jobs] = document["spec"]["replicatedJobs"]
    job = jobs["template"]["spec"]
    assert job["completions"] == job["parallelism"] and job["completionMode"] == "Indexed"
    assert job["template"]["spec"]["containers"][0]["command"][4].startswith(
        f"--master-addr={document['metadata']['name']}-{jobs['name']}-0-0.{document['metadata']['name']}"
    )
    return job["template"], job["completions"]


@pytest.mark.parametrize(("name", "overlay"), list(zip(EXAMPLES, ["one", "sharded"])))
def test_trainers_reach_their_daemons(name, overlay):
    document = example(name)
    template, _ = template_of(document)
    of = Built(FOLDER / "overlays" / overlay)
    policy = of.kinds["NetworkPolicy"]["spec"]["ingress"]
    [wanted] = [rule["from"][0]["podSelector"]["matchLabels"] for rule in policy if rule["ports"] == [{"port": 7700}]]
    assert wanted.items() <= template["metadata"]["labels"].items()
    assert document["metadata"]["namespace"] == of.namespace
    [trainer] = template["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in trainer["env"]}
    assert variables["BALLAST_SERVER"].split(",") == [f"{name}:7700" for name in of.service_names()]


@pytest.mark.parametrize("name", EXAMPLES)
def test_trainers_have_the_files_of_tls(name):
    template, _ = template_of(example(name))
    pod, [trainer] = template["spec"], template["spec"]["containers"]
    [secret], [mount] = [volume["secret"] for volume in pod["volumes"]], trainer["volumeMounts"]
    variables = {entry["name"]: entry["value"] for entry in trainer["env"]}
    [made] = commands(f"kubectl -n training create secret generic {secret['secretName']} ")
    assert {f"{mount['mountPath']}/{name}" for name in re.findall(r"=pki/(\S+)", made)} == {
        variables[f"BALLAST_TLS_{name}"] for name in ("CA", "CERTIFICATE", "KEY")
    }
    # A key of root's that its group may read: the client takes it, and the pod's user is in that group.
    assert secret["defaultMode"] == 0o440 and pod["securityContext"]["fsGroup"]
    assert pod["securityContext"]["runAsNonRoot"] and trainer["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", EXAMPLES)
def test_trainers_are_eight_ranks_of_torchrun(name):
    template, pods = template_of(example(name))
    [trainer] = template["spec"]["containers"]
    set_by_others = {"LWS_GROUP_SIZE": str(pods), "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader"}
    known = {**set_by_others, "JOB_COMPLETION_INDEX": "1"}
    words = [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word) for word in trainer["command"]]
    assert words[0] == "torchrun"
    found = get_args_parser().parse_args(words[1:])
    assert int(found.nnodes) == pods and pods * int(found.nproc_per_node) == 8
    assert found.node_rank == 1 and found.training_script == "train.py"
    assert trainer["resources"]["limits"]["nvidia.com/gpu"] == int(found.nproc_per_node)


# --- monitoring -------------------------------------------------------------------------------------------------------


def test_the_rules_are_those_of_prometheus():
    rules = {d["metadata"]["name"]: d["spec"] for d in monitoring() if d["kind"] == "PrometheusRule"}
    files = {
        name: yaml.safe_load((ROOT / "deploy" / "prometheus" / f"{name}.yml").read_text())
        for name in ("rules", "alerts")
    }
    assert rules == {f"ballast-{name}": text for name, text in files.items()}


def test_rules_have_the_label_that_is_asked_for():
    script = FOLDER / "monitoring" / "prometheus-rule.sh"
    printed = subprocess.run([script, "--label", "release=on"], capture_output=True, text=True, check=True).stdout
    assert [d["metadata"]["labels"]["release"] for d in yaml.safe_load_all(printed)] == ["on", "on"]
    assert subprocess.run([script, "--label", "a b"], capture_output=True, env=os.environ).returncode == 2


def scraped(name: str) -> dict[str, dict]:
    """By kind, what is made for a Prometheus that watches the pods of this name."""
    return {d["kind"]: d for d in monitoring() if d["metadata"]["labels"].get("app.kubernetes.io/name") == name}


def test_what_is_scraped_is_what_the_alerts_look_at(built):
    kinds = scraped("ballast")
    [endpoint] = kinds["ServiceMonitor"]["spec"]["endpoints"]
    service = built.kinds["Service"]
    assert kinds["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert kinds["ServiceMonitor"]["metadata"]["namespace"] == built.namespace
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    # The operator names the job as the service.
    assert f'up{{job="{service["metadata"]["name"]}"}}' in (ROOT / "deploy/prometheus/alerts.yml").read_text()
    shipped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["global"]["scrape_interval"]
    assert endpoint["interval"] == endpoint["scrapeTimeout"] == shipped
    [relabeling] = endpoint["relabelings"]
    joined = relabeling["separator"].join([built.pods[0], built.namespace])
    found = re.fullmatch(relabeling["regex"], joined).expand(relabeling["replacement"].replace("$", "\\"))
    assert found == f"{built.service_names()[0]}:9464" and relabeling["targetLabel"] == "instance"
    policy = kinds["NetworkPolicy"]
    assert policy["metadata"]["name"] != built.kinds["NetworkPolicy"]["metadata"]["name"]
    assert policy["spec"]["podSelector"] == built.kinds["NetworkPolicy"]["spec"]["podSelector"]
    assert [rule["ports"] for rule in policy["spec"]["ingress"]] == [[{"port": 9464}]]


def test_so_are_relays():
    kinds = scraped("ballast-relay")
    relays = {document["kind"]: document for document in kustomize.build(FOLDER / "overlays" / "relays")}
    [endpoint] = kinds["ServiceMonitor"]["spec"]["endpoints"]
    of_daemons = scraped("ballast")["ServiceMonitor"]["spec"]["endpoints"][0]
    assert {**endpoint, "relabelings": of_daemons["relabelings"]} == of_daemons
    assert endpoint["relabelings"] == [{"action": "replace", "replacement": "ballast", "targetLabel": "job"}]
    service = relays["Service"]
    assert kinds["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    policy = kinds["NetworkPolicy"]
    assert policy["spec"]["podSelector"] == relays["NetworkPolicy"]["spec"]["podSelector"]
    assert [rule["ports"] for rule in policy["spec"]["ingress"]] == [[{"port": 9464}]]
    assert {kinds[kind]["metadata"]["namespace"] for kind in kinds} == {service["metadata"]["namespace"]}
