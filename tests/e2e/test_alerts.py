"""From a gradient that jumps to a trainer's webhook: a real daemon, Prometheus and Alertmanager with what deploy/ ships."""

import contextlib
import queue
import re
import subprocess
import time
from types import SimpleNamespace

import pytest
from daemon import Daemon
from monitoring import Alertmanager, Prometheus, Webhook, expressions, missing_programs, resolved
from stepping import running

pytestmark = pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}")

# Calm until the detector's warm-up of 100 steps is over, and until it is told to go on; then one gradient thirty times too
# large, and, three steps later, a batch with wrong labels, whose loss is huge. At last it waits for its input's end.
TRAINER = """
import sys, torch, ballast
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential()
model.add_module("body", torch.nn.Linear(16, 64))
model.add_module("bend", torch.nn.Tanh())
model.add_module("head", torch.nn.Linear(64, 1))
x = torch.randn(256, 16)
y = x[:, :4].sum(1, keepdim=True).sin()
opt = ballast.AdamW(model.named_parameters(), lr=1e-3, server=sys.argv[1], run="live", durability="journal",
                    spikes=ballast.Spikes(rms_min_elements=1, rms_margin=1.5))
for step in range(1, 151):
    if step == 121:
        print("calm", flush=True)
        assert sys.stdin.readline() == "go on\\n"
    loss = torch.nn.functional.mse_loss(model(x), y + (5 if step == 124 else 0))
    (loss * (30 if step == 121 else 1)).backward()
    opt.step(loss=loss)
    opt.zero_grad()
print("done", flush=True)
sys.stdin.readline()
"""

# Panels whose subject cannot occur in a run of AdamW on a CPU that goes well, and why.
SILENT = {
    "GPU memory A": "the daemon here has no GPU",
    "GPU memory B": "the daemon here has no GPU",
    "GPU failures A": "the daemon here has no GPU",
    "Curvature A": "it is measured where spikes.curvature is on",
    "Updates let through by the first component A": "only weights stored in two components (mcf) have one",
    "Damage and restores A": "no checkpoint is damaged",
    "Damage and restores B": "the daemon was not started anew",
    "Copies of checkpoints B": "no copy has failed",
    "Time to restore a run A": "the daemon was not started anew",
    "annotation Daemon starts": "the daemon was not started anew",
}


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A run with a spike, seen by all."""
    folder = tmp_path_factory.mktemp("monitoring")
    storage = folder / "storage"
    storage.mkdir()
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(Daemon(folder, "--storage.dir", str(storage)))
        hook = stack.enter_context(Webhook())
        alertmanager = stack.enter_context(Alertmanager(folder, hook.url))
        prometheus = stack.enter_context(Prometheus(folder, daemon.ops, alertmanager.address))
        process = stack.enter_context(running(TRAINER, daemon.server))
        assert process.stdout.readline() == "calm\n"
        prometheus.until('ballast_step{run_id="live"} == 120')
        assert prometheus.query("sum(ballast_rms_spike_events_total)")[0]["value"][1] == "0"
        assert prometheus.query('ALERTS{alertname="BallastLossSpikePredicted"}') == []
        process.stdin.write("go on\n")
        process.stdin.flush()
        jumped = time.monotonic()
        assert process.stdout.readline() == "done\n"
        yield SimpleNamespace(daemon=daemon, hook=hook, alertmanager=alertmanager, prometheus=prometheus, jumped=jumped)


def test_a_predicted_spike_reaches_the_trainers_webhook(live):
    """With its run and layer, while it may still be acted on; and each layer's, though they share a group."""
    layers = set()
    while layers != {"body", "head"}:
        try:
            post = live.hook.received.get(timeout=120)
        except queue.Empty:
            pytest.fail(f"alerts of {layers} only came; Prometheus has {live.prometheus.query('ALERTS')}")
        assert post["receiver"] == "trainer-hook" and post["status"] == "firing"
        assert post["groupLabels"] == {"alertname": "BallastLossSpikePredicted", "run_id": "live"}
        for alert in post["alerts"]:
            assert alert["labels"]["run_id"] == "live" and alert["labels"]["severity"] == "info"
            assert alert["annotations"]["runbook_url"] == f"http://{live.daemon.ops}/runbook#ballastlossspikepredicted"
            layers.add(alert["labels"]["layer"])
    assert time.monotonic() - live.jumped < 120, "some 20 s, and what a busy machine adds"


def test_what_fires_is_what_happened(live):
    """The jump, the loss that spiked, the outliers of the norm; nothing else is wrong with this run."""
    happened = {"BallastLossSpikePredicted", "BallastLossSpike", "BallastGradientNormOutlier"}
    live.prometheus.until(f'count(group by (alertname) (ALERTS{{alertstate="firing"}})) == {len(happened)}')
    assert {series["metric"]["alertname"] for series in live.prometheus.query("ALERTS")} == happened


def test_the_predictor_is_scored(live):
    """The jump came three steps before the one loss spike."""
    of = '{run_id="live",predictor="rms"}'
    for name, value in {"recall:ratio": 1, "precision:ratio": 1, "lead_steps:mean": 3}.items():
        live.prometheus.until(f"run_id_predictor:ballast_spike_prediction_{name}{of} == {value}")


def test_every_rule_is_evaluated_without_an_error(live):
    def unhealthy():
        rules = [rule for group in live.prometheus.get("rules")["groups"] for rule in group["rules"]]
        return [] if any(rule["health"] == "unknown" for rule in rules) else [rules]

    rules = live.prometheus.until_true("every rule was evaluated", unhealthy)[0]
    assert len(rules) > 15
    assert [rule for rule in rules if rule["health"] != "ok" or rule.get("lastError")] == []


def test_promtool_accepts_the_scrape(live):
    text = live.daemon.get("/metrics")[1]
    result = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_panel_is_answered(live):
    live.prometheus.until('run_id_predictor:ballast_spike_prediction_lead_steps:mean{predictor="rms"} == 3')
    live.daemon.ctl("runs")
    live.prometheus.until('rate(ballast_rpc_handled_total{method="ListRuns"}[5m]) > 0')
    written = live.daemon.ctl("checkpoint", "live")
    assert written.returncode == 0, written.stderr
    live.prometheus.until("increase(ballast_checkpoint_step_stall_seconds_count[1h]) > 0")
    silent = {title for title, text in expressions() if not live.prometheus.query(resolved(text, "5m"))}
    assert silent == set(SILENT), "a panel without a series, or one that is named silent and is not"


def test_variables_find_their_values(live):
    for name in ("instance", "run_id", "layer"):
        assert live.prometheus.get(f"label/{name}/values", **{"match[]": "ballast_rms_spike_events_total"}), name


def test_a_daemon_that_is_down_silences_the_rest_of_its_alerts(live):
    """Gradients that are not finite inhibit the prediction of a spike, for the same run alone."""
    down = {"alertname": "BallastDown", "instance": "gone"}
    named = [
        down,
        {"alertname": "BallastAdmissionRejecting", "instance": "gone"},
        {"alertname": "BallastAdmissionRejecting", "instance": "there"},
        {"alertname": "BallastGradientsNonFinite", "instance": "there", "run_id": "a"},
        {"alertname": "BallastLossSpikePredicted", "instance": "there", "run_id": "a"},
        {"alertname": "BallastLossSpikePredicted", "instance": "there", "run_id": "b"},
    ]
    live.alertmanager.post(*named)

    def inhibited():
        shown = {tuple(sorted(alert["labels"].items())): alert["status"] for alert in live.alertmanager.shown()}
        states = [shown.get(tuple(sorted(labels.items())), {"state": "unprocessed"}) for labels in named]
        return (
            [] if any(state["state"] == "unprocessed" for state in states) else [bool(s["inhibitedBy"]) for s in states]
        )

    live.alertmanager.until_true("inhibitions", lambda: inhibited() == [False, True, False, False, True, False])


def test_a_webhook_that_hangs_delays_no_other_run_and_is_asked_again(tmp_path):
    """Alertmanager gives it ten seconds; then the alert is sent anew, and meanwhile another run's comes through."""
    with Webhook() as hook, Alertmanager(tmp_path, hook.url) as alertmanager:

        def told_of() -> str:
            return hook.received.get(timeout=120)["groupLabels"]["run_id"]

        hook.answers.clear()
        alertmanager.post({"alertname": "BallastLossSpikePredicted", "severity": "warning", "run_id": "first"})
        assert told_of() == "first"
        alertmanager.post({"alertname": "BallastLossSpikePredicted", "severity": "warning", "run_id": "second"})
        assert told_of() == "second"
        assert {told_of(), told_of()} == {"first", "second"}
