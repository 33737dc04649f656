"""deploy/kubernetes for its tests: an overlay as it is built, taken apart, and what lies beside the overlays."""

import re
import subprocess
from pathlib import Path

import kustomize
import yaml
from daemon import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ["one", "sharded", "gpu"]
EXAMPLES = ["leaderworkerset.yaml", "jobset.yaml"]
README = (ROOT / "deploy" / "README.md").read_text()


def example(name: str) -> dict:
    return yaml.safe_load((FOLDER / "trainers" / name).read_text())


def monitoring() -> list[dict]:
    printed = subprocess.run([FOLDER / "monitoring" / "prometheus-rule.sh"], capture_output=True, text=True, check=True)
    return kustomize.build(FOLDER / "monitoring") + list(yaml.safe_load_all(printed.stdout))


def commands(pattern: str) -> list[str]:
    """Of the README's section, those that begin so."""
    section = re.search(r"^## Kubernetes\n([\s\S]*?)^## ", README, re.MULTILINE)[1]
    return re.findall(rf"^    ({pattern}.*)", section.replace("\\\n", " "), re.MULTILINE)


class Built:
    """An overlay, taken apart."""

    def __init__(self, folder: Path):
        self.documents = kustomize.build(folder)
        self.kinds = {document["kind"]: document for document in self.documents}
        assert len(self.kinds) == len(self.documents)
        self.stateful = self.kinds["StatefulSet"]["spec"]
        self.pod = self.stateful["template"]["spec"]
        [self.daemon] = self.pod["containers"]
        self.config = self.kinds["ConfigMap"]["data"]["ballast.yaml"]
        self.keys = yaml.safe_load(self.config)
        self.namespace = self.kinds["StatefulSet"]["metadata"]["namespace"]
        self.pods = [f"{self.kinds['StatefulSet']['metadata']['name']}-{i}" for i in range(self.stateful["replicas"])]

    def service_names(self) -> list[str]:
        return [f"{pod}.{self.stateful['serviceName']}.{self.namespace}.svc" for pod in self.pods]

    def environment(self, pod: str) -> dict[str, str]:
        """As the kubelet sets it."""
        of_the_pod = {"metadata.name": pod, "metadata.namespace": self.namespace}
        return {
            entry["name"]: entry.get("value") or of_the_pod[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            for entry in self.daemon["env"]
        }

    def arguments(self, pod: str) -> list[str]:
        """With the variables that the kubelet replaces."""
        known = self.environment(pod)
        return [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word) for word in self.daemon["args"]]

    def mount(self, name: str) -> str:
        [path] = [mount["mountPath"] for mount in self.daemon["volumeMounts"] if mount["name"] == name]
        return path

    def volume(self, kind: str) -> dict:
        [volume] = [volume for volume in self.pod["volumes"] if kind in volume]
        return volume

    def containers(self) -> list[dict]:
        return [self.daemon, *self.pod["initContainers"]]
