"""The live page and the JSON under it, against a run in training; the page in a headless Chromium."""

import json
import re
import subprocess
import threading
import time
import urllib.error
from pathlib import Path

import pytest
from browser import Browser, find_browser
from daemon import Daemon, plain_environment, until
from stepping import running
from warm_python import WarmPython

TRAINER = Path(__file__).with_name("page_trainer.py")
ATTACK = "embed.<img src=x onerror=alert(1)>.weight"
RUN = "page"
VIEWERS = 50
SCRAPE_TIMEOUT_S = 10  # Prometheus's own
# A trainer whose step waits for another that never comes.
ONE_OF_TWO = """
import sys, torch, ballast
w = torch.nn.Parameter(torch.ones(8))
optimizer = ballast.SGD([("w", w)], lr=0.1, server=sys.argv[1], run="pair", rank=0, world=2)
w.sum().backward()
sys.stdin.read()
"""
# A trainer of a run that has been written to the daemon's disk.
WRITTEN = """
import sys, torch, ballast
w = torch.nn.Parameter(torch.ones(8))
optimizer = ballast.SGD([("w", w)], lr=0.1, server=sys.argv[1], run="written")
w.sum().backward()
optimizer.step()
assert optimizer.checkpoint() == 1
print("written", flush=True)
sys.stdin.read()
"""
# A trainer of a run whose tensors are too small for RMS_t to be more than noise.
SMALL = """
import sys, torch, ballast
w = torch.nn.Parameter(torch.ones(8, 8))
optimizer = ballast.AdamW([("w", w)], server=sys.argv[1], run="small")
w.sum().backward()
optimizer.step()
print("stepped", flush=True)
sys.stdin.read()
"""
# A trainer of a run of which a version gets a name and loses it, a line of input each.
NAMED = """
import sys, torch, ballast
w = torch.nn.Parameter(torch.ones(512))
optimizer = ballast.SGD([("w", w)], lr=0.1, server=sys.argv[1], run="named", follow=ballast.Follow(tags=4))
w.sum().backward()
optimizer.step()
for turn in (optimizer.tag, optimizer.untag):
    print(turn.__name__, flush=True)
    sys.stdin.readline()
    turn("good")
print("done", flush=True)
sys.stdin.read()
"""
FOCUSED = "document.activeElement.getAttribute('href') ?? document.activeElement.closest('[id]')?.id"
needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium: deploy/packages.sh browser installs it")


def spikes_of(daemon: Daemon) -> set[str]:
    _, text = daemon.get(f"/api/v1/runs/{RUN}/history")
    return set(re.findall("SPIKE_KIND_[A-Z_]+", text))


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """A daemon with a run that is in training until the tests are over, its spikes behind it."""
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        trainer = WarmPython(
            ["-W", "ignore", TRAINER, daemon.server, RUN],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=plain_environment(),
        )
        until("its spikes", lambda: trainer.poll() is not None or "SPIKE_KIND_NONFINITE" in spikes_of(daemon), 300)
        assert trainer.poll() is None, trainer.stderr.read().decode()
        yield daemon
        trainer.kill()
        trainer.communicate()


def ask(daemon: Daemon, path: str):
    code, text = daemon.get(f"/api/v1/{path}")
    assert code == 200, text
    return json.loads(text)


# --- the JSON -------------------------------------------------------------------------------------------------------


def test_the_json_is_what_the_calls_answer(training):
    status = ask(training, "status")
    assert status["ops_address"] == training.ops and status["state"] == "serving"
    runs = ask(training, "runs")["runs"]
    assert [run["run_id"] for run in runs] == [RUN]
    run = ask(training, f"runs/{RUN}")
    assert run["state"] == "RUN_STATE_TRAINING" and int(run["step"]) >= 110
    assert run["steps_aborted"] == "0" and run["failure"] == "", "fields are there when zero"
    spec = ask(training, f"runs/{RUN}/spec")
    assert spec["max_grad_norm"] == 5 and spec["tensors"] == []


def test_history_brings_what_is_new(training):
    history = ask(training, f"runs/{RUN}/history?most=500")
    steps = [int(step["step"]) for step in history["steps"]]
    assert steps == list(range(1, steps[-1] + 1))
    infinite = history["steps"][109]
    assert infinite["loss"] == "Infinity" and infinite["reason"] == "nonfinite"
    assert any(tensor["tensor"] == ATTACK for tensor in history["tensors"])
    later = ask(training, f"runs/{RUN}/history?after={steps[-1] - 1}&most=2")
    assert 1 <= len(later["steps"]) <= 2 and int(later["steps"][0]["step"]) >= steps[-1]


@pytest.mark.parametrize(
    ("path", "code", "says"),
    [
        (f"runs/{RUN}/history?after=x", 400, "after wants a step's number, got 'x'"),
        (f"runs/{RUN}/history?most=-1", 400, "most wants a number of steps, got '-1'"),
        (f"runs/{RUN}/history?before=1", 400, "history takes after=STEP and most=N, got 'before'"),
        ("status?verbose=1", 400, "takes no query"),
        ("runs/nope", 404, f"no run 'nope'; there are: {RUN}"),
        ("runs/nope/history", 404, "no run 'nope'"),
        (f"runs/{RUN}/weights", 404, "there are /api/v1/status"),
    ],
)
def test_what_is_wrong_is_said(training, path, code, says):
    got, text = training.get(f"/api/v1/{path}")
    assert (got, says in text) == (code, True), text


def test_many_viewers_leave_room_for_a_scrape(training):
    """VIEWERS pages ask every 2 s, all at once; a scrape beside them is answered in time."""
    over, codes, problems = threading.Event(), [], []

    def view():
        query = ""
        while True:
            try:
                for path in ("status", "runs"):
                    codes.append(training.status(f"/api/v1/{path}"))
                code, text = training.get(f"/api/v1/runs/{RUN}/history{query}")
                codes.append(code)
                if code == 200 and (steps := json.loads(text)["steps"]):
                    query = f"?after={int(steps[-1]['step']) - 1}"
            except (OSError, urllib.error.URLError) as error:
                problems.append(error)
            if over.wait(2):
                return

    viewers = [threading.Thread(target=view) for _ in range(VIEWERS)]
    for viewer in viewers:
        viewer.start()
    slowest = 0.0
    for _ in range(12):
        began = time.monotonic()
        assert training.get("/metrics")[0] == 200
        slowest = max(slowest, time.monotonic() - began)
        over.wait(0.5)
    over.set()
    for viewer in viewers:
        viewer.join()
    assert not problems
    assert slowest < SCRAPE_TIMEOUT_S, f"a scrape took {slowest:.2f} s"
    assert set(codes) <= {200, 503} and codes.count(200) > 0.5 * len(codes), {c: codes.count(c) for c in set(codes)}


# --- the page -------------------------------------------------------------------------------------------------------


@pytest.fixture
def page(training, tmp_path):
    with Browser(tmp_path) as browser:
        browser.show_as("light", 1280)
        browser.open(f"http://{training.ops}/")
        browser.wait_for("document.querySelectorAll('#events li').length > 1")
        yield browser
        own = [url for url in browser.requests if url.startswith(f"http://{training.ops}/")]
        assert browser.requests == own, "it asks its own origin alone"


def shows(page: Browser, selector: str, *patterns: str) -> None:
    """Each section is drawn when its figures have come."""
    for pattern in patterns:
        until(f"{pattern} in {selector}", lambda: re.search(pattern, page.text(selector)))


@needs_browser
def test_every_section_says_what_the_run_does(page):
    shows(page, "#daemon", r"0\.\d+\.\d+ .* · cpu")
    shows(page, "#memory", r"memory [\d.]+ MiB of [\d.]+ GiB")
    shows(page, "#run-title", f"^Run {RUN}$")
    shows(page, "#run-state", "1 rank attached")
    assert "On the disk" not in page.text("#figures"), "this daemon has no storage"
    shows(page, "#loss", r"a spike is predicted \([1-9]", r"loss spike \([1-9]")
    assert page.evaluate("document.querySelectorAll('#loss .mark.real').length") >= 2  # and one in the legend
    assert "model.layers.3" in page.evaluate("document.querySelector('#rms svg.over').textContent")
    assert page.evaluate("document.querySelector('#rms canvas:not([width=\"120\"])').width") > 600
    assert "clipped at 5" in page.evaluate("document.querySelector('#norm svg.chart').textContent")
    quality = page.evaluate("document.querySelector('#quality svg.chart desc').textContent")
    assert re.search(r"EDQ: last [\d.]+ %, .*unchanged: last [\d.]+ %", quality), quality
    shows(page, "#times .readout", r"receive [\d.]+ (ms|µs|s)")
    shows(page, "#throughput", r"Push\s+[\d.]+ [KM]?i?B/s")
    shows(page, "#bytes", r"1 weights\s+[\d.]+ KiB", r"7 snapshots\s+[\d.]+ KiB", r"8 client_state\s+[\d.]+ MiB")
    shows(page, "#ranks", "connected, transport")
    shows(page, "#events", "Step 110 skipped: nonfinite", "RMS_t of")
    assert page.complaints == []


@needs_browser
def test_what_comes_after_a_spike_does_not_predict_it(page):
    """As the page reads two steps' events, of which the second is of a loss spike that goes on."""
    kinds = ("RMS", "CURVATURE", "GRADIENT_NORM")
    spikes = [[{"kind": f"SPIKE_KIND_{kind}", "since_step": since} for kind in kinds] for since in ("0", "205")]
    steps = [{"step": str(206 + place), "spikes": found} for place, found in enumerate(spikes)]
    script = f"""import("/static/history.js").then(({{History}}) => {{
        const history = new History();
        history.take({json.dumps({"steps": steps})});
        return history.steps.map((step) => [step.predicted.length, step.spikes.length]);
    }})"""
    assert page.evaluate(script) == [[3, 3], [0, 3]]


@needs_browser
def test_marks_and_levels_leave_the_texts_of_a_chart_alone(page):
    """Marks stand above the lines, a level's name anywhere: what is not a figure of an axis stands beside the chart."""
    on_log = "[...document.querySelectorAll('#loss .legend li, #norm .legend li')].filter(li => li.innerText === 'log scale')"
    page.show_as("light", 360)
    assert page.evaluate(f"{on_log}.length") > 0
    texts = "[...document.querySelectorAll('svg.chart text')]"
    assert page.evaluate(f"{texts}.every(text => !text.textContent.includes('scale'))")
    covered = f"""{texts}.flatMap(text => [...text.parentNode.querySelectorAll('.mark')].filter(mark => {{
        const [a, b] = [text.getBoundingClientRect(), mark.getBoundingClientRect()];
        return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    }}).map(() => text.textContent))"""
    assert page.evaluate(covered) == []
    page.show_as("light", 1280)


def test_it_follows_the_training(page):
    step = "Number(document.querySelector('#runs tbody td.number').textContent.replace(',', ''))"
    before = page.evaluate(step)
    readout = page.text("#loss .readout")
    page.wait_for(f"{step} > {before}")
    page.wait_for(f"document.querySelector('#loss .readout').textContent !== {json.dumps(readout)}")
    assert page.complaints == []


@needs_browser
def test_a_name_that_is_markup_is_text(page):
    assert ATTACK in page.text("#tensors") and ATTACK in page.text("#events")
    page.evaluate("location.hash = '#run=' + encodeURIComponent('<img src=x onerror=alert(2)>')")
    page.wait_for("document.querySelector('#alert').textContent.includes('There is no run \\'<img src=x')")
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.complaints == []


@needs_browser
def test_it_is_read_in_light_and_dark_and_on_a_phone(page):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.show_as("dark", 1280)
    assert page.evaluate(ground) != light
    for scheme in ("light", "dark"):
        page.show_as(scheme, 360, 740)
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.complaints == []


@needs_browser
def test_it_is_read_by_keyboard(page):
    reached = []
    for _ in range(40):
        page.press("Tab")
        reached.append(page.evaluate(FOCUSED))
        if reached[-1] == "loss":
            break
    assert f"#run={RUN}" in reached and reached[-1] == "loss", reached
    page.press("Home")
    page.wait_for("document.querySelector('#norm .readout').textContent.startsWith('Step 1:')")
    page.press("ArrowRight")
    page.wait_for("document.querySelector('#loss .readout').textContent.startsWith('Step 2:')")


@needs_browser
def test_a_run_that_goes_back_is_drawn_so(page, training):
    """The last of this run's tests: afterwards numbers of steps come twice."""
    before = page.evaluate("document.querySelectorAll('#loss path.remade').length")
    went_back = training.ctl("rewind", RUN, "--back", "20", "--json")
    assert went_back.returncode == 0, went_back.stderr
    page.wait_for("document.querySelector('#events').textContent.includes('the run went back here from step')")
    again = f"Step {int(json.loads(went_back.stdout)['step']) + 1} the run went back here from step"
    assert again in page.text("#events"), page.text("#events")
    page.wait_for(f"document.querySelectorAll('#loss path.remade').length > {before}")
    page.wait_for("document.querySelector('#loss svg.chart desc').textContent.includes('The run went back from step')")
    assert page.complaints == []


@needs_browser
def test_it_names_the_rank_that_a_step_awaits(tmp_path):
    with Daemon(tmp_path) as daemon, Browser(tmp_path) as browser:
        with running(ONE_OF_TWO, daemon.server):
            until("its step", lambda: daemon.status("/api/v1/runs/pair") == 200, 120)
            browser.open(f"http://{daemon.ops}/#run=pair")
            shows(
                browser,
                "#run-state",
                r"Step 1 waits for .*rank 1 \(not connected\), which has no process yet, for \d\d",
            )


@needs_browser
def test_it_says_what_is_on_the_disk(tmp_path):
    (tmp_path / "storage").mkdir()
    with Daemon(tmp_path, "--storage.dir", str(tmp_path / "storage")) as daemon, Browser(tmp_path) as browser:
        with running(WRITTEN, daemon.server) as trainer:
            assert trainer.stdout.readline() == "written\n"
            browser.open(f"http://{daemon.ops}/#run=written")
            shows(browser, "#figures", r"On the disk\s+step 1, checkpoint \d+ \w+ ago")


@needs_browser
def test_it_says_why_small_tensors_have_no_rms(tmp_path):
    with Daemon(tmp_path) as daemon, Browser(tmp_path) as browser:
        with running(SMALL, daemon.server) as trainer:
            assert trainer.stdout.readline() == "stepped\n"
            browser.open(f"http://{daemon.ops}/#run=small")
            shows(browser, "#rms .readout", "all tensors are smaller than spikes.rms_min_elements")


@needs_browser
def test_it_says_how_many_versions_have_names(tmp_path):
    with Daemon(tmp_path) as daemon, Browser(tmp_path) as browser:
        with running(NAMED, daemon.server) as trainer:
            assert trainer.stdout.readline() == "tag\n"
            browser.open(f"http://{daemon.ops}/#run=named")
            shows(browser, "#figures", r"Step\s+1\s")
            assert "Versions with names" not in browser.text("#figures"), "it has none"
            trainer.stdin.write("\n")
            trainer.stdin.flush()
            assert trainer.stdout.readline() == "untag\n"
            shows(browser, "#figures", r"Versions with names\s+1, 2\.00 KiB")
            trainer.stdin.write("\n")
            trainer.stdin.flush()
            assert trainer.stdout.readline() == "done\n"
            until("the line is gone", lambda: "Versions with names" not in browser.text("#figures"))
            assert browser.complaints == []


@needs_browser
def test_it_says_when_the_run_or_the_daemon_is_gone(tmp_path):
    with Daemon(tmp_path) as daemon, Browser(tmp_path) as browser:
        browser.open(f"http://{daemon.ops}/#run=gone")
        browser.wait_for("document.querySelector('#alert').textContent.includes(\"There is no run 'gone'\")")
        assert "No run yet" in browser.text()
        daemon.stop()
        browser.wait_for("document.querySelector('#alert').textContent.includes('does not answer')")
