"""Whether documents are what Kubernetes takes, without a cluster.

Kubernetes' own kinds by the JSON schemas of its API, which the package kubernetes-validate carries, strictly: a field that
is not in the schema is an error. Kinds that others define, for which there is no such package, by the fields written down
here: those that deploy/kubernetes uses, as their definitions have them
  monitoring.coreos.com/v1        the Prometheus operator's API reference (prometheus-operator.dev)
  leaderworkerset.x-k8s.io/v1     LeaderWorkerSet's (lws.sigs.k8s.io)
  jobset.x-k8s.io/v1alpha2        JobSet's (jobset.sigs.k8s.io)
Pods and jobs within them are Kubernetes' own again.
"""

from collections.abc import Callable

import kubernetes_validate

# The oldest that has all of this as settled (ReadWriteOncePod), and the newest that the package has.
VERSIONS = ("1.29", kubernetes_validate.latest_version())

Check = Callable[[object], list[str]]


def core(document: dict) -> list[str]:
    """What Kubernetes would not take of a document of its own kinds."""
    wrong = []
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            wrong.append(f"{document['kind']}, Kubernetes {version}: {error.message}")
    return wrong


def pod_template(value: dict) -> list[str]:
    return core({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "of-another"}, "template": value})


def job_template(value: dict) -> list[str]:
    if unknown := value.keys() - {"metadata", "spec"}:
        return [f"a job's template has no {sorted(unknown)}"]
    return core({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "of-another"}, "spec": value["spec"]})


def a(kind: type) -> Check:
    return lambda value: [] if type(value) is kind else [f"{value!r} is no {kind.__name__}"]


def one_of(*words: str) -> Check:
    return lambda value: [] if value in words else [f"{value!r} is none of {', '.join(words)}"]


def each(check: Check) -> Check:
    return lambda value: [wrong for item in value for wrong in check(item)] if type(value) is list else ["no list"]


def labels(value: object) -> list[str]:
    fit = type(value) is dict and all(type(word) is str for pair in value.items() for word in pair)
    return [] if fit else [f"{value!r} are no labels"]


def fields(*required: str, **known: Check) -> Check:
    """An object of these fields, and no others."""

    def check(value: object) -> list[str]:
        if type(value) is not dict:
            return [f"{value!r} is no object"]
        wrong = [f"there is no field {name}" for name in sorted(value.keys() - known.keys())]
        wrong += [f"{name} is missing" for name in required if name not in value]
        return wrong + [f"{name}: {what}" for name in value.keys() & known.keys() for what in known[name](value[name])]

    return check


RELABELING = fields(
    action=one_of("replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep", "hashmod"),
    sourceLabels=each(a(str)),
    separator=a(str),
    regex=a(str),
    replacement=a(str),
    targetLabel=a(str),
)
ENDPOINT = fields(
    port=a(str), path=a(str), interval=a(str), scrapeTimeout=a(str), scheme=a(str), relabelings=each(RELABELING)
)
RULE = fields(
    "expr",
    alert=a(str),
    record=a(str),
    expr=a(str),
    labels=labels,
    annotations=labels,
    **{"for": a(str), "keep_firing_for": a(str)},
)
JOBS = fields("name", "template", name=a(str), replicas=a(int), template=job_template)
GROUP = fields(
    "workerTemplate",
    size=a(int),
    restartPolicy=one_of("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
    leaderTemplate=pod_template,
    workerTemplate=pod_template,
)
OTHERS = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): fields(
        "selector", "endpoints", selector=fields(matchLabels=labels), endpoints=each(ENDPOINT)
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): fields(
        groups=each(fields("name", name=a(str), interval=a(str), rules=each(RULE)))
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): fields(
        "leaderWorkerTemplate", replicas=a(int), leaderWorkerTemplate=GROUP
    ),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): fields(failurePolicy=fields(maxRestarts=a(int)), replicatedJobs=each(JOBS)),
}
METADATA = fields("name", name=a(str), namespace=a(str), labels=labels, annotations=labels)


def wrong_in(document: dict) -> list[str]:
    """What is wrong with a document of any kind that deploy/kubernetes has; nothing where it is right."""
    spec = OTHERS.get((document["apiVersion"], document["kind"]))
    if spec is None:
        return core(document)
    check = fields("metadata", "spec", apiVersion=a(str), kind=a(str), metadata=METADATA, spec=spec)
    return [f"{document['kind']}: {what}" for what in check(document)]
