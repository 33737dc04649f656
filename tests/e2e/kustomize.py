"""What `kubectl kustomize FOLDER` prints, for machines without it: of kustomize what deploy/kubernetes uses, and not more.

A key of a kustomization that is not known here is an error, never left out. test_kubernetes.py holds it against kubectl where
there is one.
"""

import copy
from pathlib import Path

import yaml

KEYS = {"apiVersion", "kind", "namespace", "resources", "components", "configMapGenerator", "patches", "images"}
# Lists that are merged item by item, and the key by which an item is known (Kubernetes' own patchMergeKey). A patch
# replaces every other list.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "topologySpreadConstraints": "topologyKey",
}


def build(folder: Path) -> list[dict]:
    """The documents that a kustomization makes."""
    kustomization = read(folder, "Kustomization")
    documents = []
    for name in kustomization.get("resources", []):
        path = folder / name
        documents += build(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for name in kustomization.get("components", []):
        transform(documents, folder / name, read(folder / name, "Component"))
    transform(documents, folder, kustomization)
    return documents


def read(folder: Path, kind: str) -> dict:
    found = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if found["kind"] != kind:
        raise ValueError(f"{folder} is a {found['kind']}, not a {kind}")
    if unknown := found.keys() - (KEYS if kind == "Kustomization" else KEYS - {"resources", "components"}):
        raise ValueError(f"{folder}/kustomization.yaml has {sorted(unknown)}, which this resolver does not know")
    return found


def transform(documents: list[dict], folder: Path, kustomization: dict) -> None:
    """In kustomize's order: what is generated, patches, the namespace, images."""
    documents += [config_map(folder, wanted) for wanted in kustomization.get("configMapGenerator", [])]
    for wanted in kustomization.get("patches", []):
        patch(documents, folder, wanted)
    for document in documents if "namespace" in kustomization else []:
        document["metadata"]["namespace"] = kustomization["namespace"]
    for wanted in kustomization.get("images", []):
        for document in documents:
            rename_image(document, wanted)


def config_map(folder: Path, wanted: dict) -> dict:
    options = wanted["options"]
    if wanted.keys() != {"name", "files", "options"} or options.keys() - {"disableNameSuffixHash", "labels"}:
        raise ValueError(f"{folder}: this resolver makes ConfigMaps of files alone, not of {wanted}")
    if not options.get("disableNameSuffixHash"):
        raise ValueError(f"{folder}: this resolver gives no names with a hash")
    metadata = {"name": wanted["name"], "labels": options["labels"]}
    data = {Path(name).name: (folder / name).read_text() for name in wanted["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def patch(documents: list[dict], folder: Path, wanted: dict) -> None:
    if wanted.keys() != {"path"}:
        raise ValueError(f"{folder}: this resolver knows patches by their file alone, not {wanted}")
    text = yaml.safe_load((folder / wanted["path"]).read_text())
    named = [d for d in documents if d["kind"] == text["kind"] and d["metadata"]["name"] == text["metadata"]["name"]]
    if len(named) != 1:
        raise ValueError(f"{folder / wanted['path']} patches {len(named)} documents")
    merge(named[0], text)


def merge(into: dict, changes: dict) -> None:
    """A strategic merge."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        elif key in MERGE_KEYS and isinstance(into.get(key), list):
            merge_items(into[key], value, MERGE_KEYS[key])
        else:
            into[key] = copy.deepcopy(value)


def merge_items(into: list[dict], changes: list[dict], key: str) -> None:
    """New items come first, as kustomize has them."""
    new = []
    for change in changes:
        [found] = [item for item in into if item[key] == change[key]] or [None]
        if change.get("$patch") == "delete":
            into.remove(found)
        elif found is None:
            new.append(copy.deepcopy(change))
        else:
            merge(found, change)
    into[:0] = new


def rename_image(node: object, wanted: dict) -> None:
    """Wherever a container has the image of that name."""
    if unknown := wanted.keys() - {"name", "newName", "newTag"}:
        raise ValueError(f"this resolver does not know of images' {sorted(unknown)}")
    if isinstance(node, dict):
        name, _, tag = str(node.get("image", "")).partition(":")
        if name == wanted["name"]:
            node["image"] = f"{wanted.get('newName', name)}:{wanted.get('newTag', tag)}"
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else []:
        rename_image(child, wanted)
