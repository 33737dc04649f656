// The live page: asks the daemon every 2 s while it is looked at, and shows what it says. It changes nothing there.

import {LineChart} from "./charts.js";
import {draw, keepChildren, make, setText} from "./elements.js";
import {bytes, count, NONE, number, parse, seconds} from "./format.js";
import {Heatmap} from "./heatmap.js";
import {History} from "./history.js";
import {
  awaitedText, Bytes, Events, fillFigures, newestFirst, Ranks, stateOf, stateWord, StepTable, Tensors, Throughput, totalHeld,
  unwrittenText
} from "./panels.js";

const EVERY_MS = 2000;
const PATIENCE_MS = 5000;
const BUSY_MS = 10000;      // for so long it may say so before the reader is told
const RMS_THRESHOLD = 2.3;  // the daemon's default
const byId = (id) => document.getElementById(id);

// --- the daemon ------------------------------------------------------------------------------------------------------

class Refusal extends Error {
  constructor(status, text) {
    super(text.trim());
    this.status = status;
  }
}

async function ask(path) {
  const reply = await fetch(`/api/v1/${path}`, {cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS)});
  if (!reply.ok) throw new Refusal(reply.status, await reply.text());
  return reply.json();
}

// --- the chosen run --------------------------------------------------------------------------------------------------

function chosenInHash() {
  const found = /^#run=(.+)$/.exec(location.hash);
  if (!found) return null;
  try {
    return decodeURIComponent(found[1]);
  } catch {
    return found[1];  // a stray percent sign
  }
}

const chosen = {
  id: null,
  history: new History(),
  spec: null,
  movedAt: 0
};
let lastRuns = null;

function choose(id) {
  if (chosen.id === id) return;
  Object.assign(chosen, {id, history: new History(), spec: null, movedAt: performance.now()});
}

async function askHistory(id) {
  const path = `runs/${encodeURIComponent(id)}/history`;
  for (let turn = 0; turn < 2; turn += 1) {
    const query = chosen.history.query();
    const answer = await ask(query ? `${path}?${query}` : path);
    if (chosen.id !== id) return;  // another one was chosen meanwhile
    const before = chosen.history.last;
    const holds = chosen.history.take(answer);
    if (chosen.history.last !== before) chosen.movedAt = performance.now();
    if (holds) return;
    chosen.spec = null;  // perhaps another run of this name
  }
}

// --- drawing ---------------------------------------------------------------------------------------------------------

const clipAt = () => parse(chosen.spec?.max_grad_norm);
const threshold = () => parse(chosen.spec?.spikes?.rms_threshold) ?? RMS_THRESHOLD;
const cursor = (index) => charts.forEach((chart) => chart.point(index));
const lossChart = {
  title: "Loss",
  note: "As the trainers told it, the mean over ranks.",
  lines: [{name: "loss", of: (step) => step.loss}],
  markNames: {predicted: "a spike is predicted", real: "loss spike", nonfinite: "not finite"},
  marks: (step) =>
    [
      ...(step.predicted.length ? [{kind: "predicted", value: null}] : []),
      ...(step.real.length ? [{kind: "real", value: step.loss}] : []),
      ...(step.nonfinite.length ? [{kind: "nonfinite", value: null}] : []),
    ],
};
const normChart = {
  title: "Gradient norm",
  note: "L2 over all tensors, before clipping and after it.",
  lines: [
    {name: "norm", of: (step) => step.norm},
    {name: "after clipping", of: (step) => (step.norm === null || step.clip === null ? null : step.norm * step.clip)},
  ],
  levels: () => (clipAt() ? [{name: `clipped at ${number(clipAt())}`, value: clipAt()}] : []),
};
const percent = (value) => (value === null ? NONE : `${Number((value * 100).toPrecision(3))} %`);
const qualityChart = {
  title: "Lost arithmetic",
  note: "EDQ: how much of the wanted update reaches the stored weights; 100 % is all of it. Unchanged: elements that " +
    "rounding left as they were. At steps with full statistics.",
  lines: [
    {name: "EDQ", of: (step) => step.edq, format: percent, sparse: true},
    {name: "unchanged", of: (step) => step.unchanged, format: percent, sparse: true},
  ],
  always: [0, 1],
};
const timeChart = {
  title: "Time of a step",
  note: "Parts overlap: tensors are updated while others still come in.",
  lines: [
    {name: "step", of: (step) => step.seconds, format: seconds},
    {name: "receive", of: (step) => step.receive, format: seconds},
    {name: "update", of: (step) => step.update, format: seconds},
    {name: "wait for the last rank", of: (step) => step.wait || null, format: seconds},
  ],
};

const loss = new LineChart(byId("loss"), lossChart, cursor);
const heatmap = new Heatmap(byId("rms"), cursor);
const lines = [
  loss,
  ...[["norm", normChart], ["quality", qualityChart], ["times", timeChart]].map(
    ([id, options]) => new LineChart(byId(id), options, cursor))
];
const charts = [...lines, heatmap];
const throughputs = new Throughput(byId("throughput"));
const bytesHeld = new Bytes(byId("bytes"));
const ranks = new Ranks(byId("ranks"));
const tensors = new Tensors(byId("tensors"));
const events = new Events(byId("events"));
const stepTable = new StepTable(byId("table"));

function showDaemon(status) {
  const state = status.state === "serving" ? "" : ` · ${status.state}`;
  setText(
    byId("daemon"),
    `${status.version} (${status.revision}) · ${status.device} · up ${seconds(status.uptime_s)}${state}`);
  const reserved = parse(status.memory_reserved_bytes);
  const limit = parse(status.memory_limit_bytes);
  const text = `memory ${bytes(reserved)} of ${bytes(limit)}`;
  const filled = limit ? Math.min(1, reserved / limit) * 160 : 0;
  const bar = draw(
    "svg", {class: "memory", width: 160, height: 8, viewBox: "0 0 160 8", "aria-hidden": "true"},
    draw("rect", {width: 160, height: 8, rx: 2}),
    draw("rect", {class: "full", width: Math.max(filled, reserved ? 2 : 0).toFixed(1), height: 8, rx: 2}));
  const failed = (status.devices ?? [])
                   .filter((device) => device.failure)
                   .map((device) => ` ${device.device} failed: ${device.failure}.`);
  byId("memory").replaceChildren(bar, ` ${text}${failed.join("")}`);
}

function showRuns(runs) {
  byId("no-runs").hidden = runs.length > 0;
  byId("runs").hidden = !runs.length;
  const row = (run) => {
    const link = make("a", {href: `#run=${encodeURIComponent(run.run_id)}`}, run.run_id);
    return make(
      "tr", {}, make("th", {scope: "row"}, link),
      ...Array.from({length: 8}, (_, i) => make("td", {class: i > 0 && i < 7 ? "number" : null})));
  };
  keepChildren(byId("runs").tBodies[0], newestFirst(runs), (run) => run.run_id, row, (tr, run) => {
    const cells = [
      stateWord(run) + (run.failure && stateWord(run) !== "failed" ? ", stopped": ""), count(parse(run.step)),
      number(parse(run.loss)), number(parse(run.grad_norm)), number(parse(run.rms_ratio_max)),
      count(parse(run.parameters)), bytes(totalHeld(run)), run.optimizer
    ];
    cells.forEach((cell, i) => setText(tr.children[i + 1], cell));
    const link = tr.firstChild.firstChild;
    if (run.run_id === chosen.id)
      link.setAttribute("aria-current", "true");
    else
      link.removeAttribute("aria-current");
  });
}

function showRun(run) {
  byId("run").hidden = !run;
  document.title = run ? `${run.run_id}, step ${run.step} – Ballast` : "Ballast";
  if (!run) return;
  const {steps, layers} = chosen.history;
  setText(byId("run-title"), `Run ${run.run_id}`);
  const state = stateOf(run);
  const still = (performance.now() - chosen.movedAt) / 1000;
  const awaited = awaitedText(run) ||
    (still > 30 && stateWord(run) === "training" ? `No step has closed for ${seconds(Math.floor(still))}: look at the ranks below.` : "");
  const matters = [state.tone === "good" ? awaited : "", unwrittenText(run)].filter((text) => text);
  byId("run-state").className = `state ${state.tone === "good" && matters.length ? "wait" : state.tone}`;
  setText(byId("run-state"), [state.text, ...matters].join(" "));
  fillFigures(byId("figures"), run, steps);
  lines.forEach((chart) => chart.update(steps));
  heatmap.update(steps, layers, threshold());
  throughputs.update(run, steps);
  bytesHeld.update(run);
  ranks.update(run, steps);
  tensors.update(chosen.history.tensors);
  events.update(steps);
  stepTable.update(steps);
}

function alarm(text) {
  byId("alert").hidden = !text;
  setText(byId("alert"), text ?? "");
}

// --- turns -----------------------------------------------------------------------------------------------------------

let timer = null;
let lastAnswerAt = null;

function why(error) {
  const since =
    lastAnswerAt ? ` What is shown is ${seconds(Math.round((performance.now() - lastAnswerAt) / 1000))} old.` : "";
  if (error instanceof Refusal) return `The daemon says: ${error.message}${since}`;
  return `The daemon does not answer at ${location.host}.${since} Asking again every ${EVERY_MS / 1000} s.`;
}

async function lookAt(runs) {
  const wanted = chosenInHash() ?? chosen.id;
  const found = runs.find((run) => run.run_id === wanted);
  if (wanted !== null && !found) {
    choose(wanted);
    showRun(null);
    const others = runs.length ? "Choose another below." : "There are no others.";
    return alarm(`There is no run '${wanted}': it was deleted, or the daemon was started anew. ${others}`);
  }
  const run = found ?? newestFirst(runs)[0];
  if (!run) {
    alarm(null);
    return showRun(null);
  }
  choose(run.run_id);
  await askHistory(run.run_id);
  if (chosen.id !== run.run_id) return;
  if (!run.relay) chosen.spec ??= await ask(`runs/${encodeURIComponent(run.run_id)}/spec`);
  alarm(null);
  showRun(run);
}

async function turn() {
  clearTimeout(timer);
  const began = performance.now();
  try {
    const [status, runs] = await Promise.all([ask("status"), ask("runs")]);
    lastAnswerAt = performance.now();
    lastRuns = runs.runs ?? [];
    showDaemon(status);
    await lookAt(lastRuns);
    showRuns(lastRuns);
    setText(byId("freshness"), `as of ${new Date().toLocaleTimeString("en-GB")}`);
  } catch (error) {
    if (!(error instanceof Refusal || error instanceof TypeError || error instanceof DOMException)) throw error;
    const isBusy = error instanceof Refusal && error.status === 503;
    if (!isBusy || performance.now() - (lastAnswerAt ?? 0) > BUSY_MS) alarm(why(error));
  } finally {
    clearTimeout(timer);
    // A daemon that takes long to answer is asked less often.
    if (!document.hidden) timer = setTimeout(turn, Math.max(EVERY_MS, 5 * (performance.now() - began)));
  }
}

window.addEventListener("hashchange", turn);
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : turn()));
const redraw = () => showRun((lastRuns ?? []).find((run) => run.run_id === chosen.id) ?? null);
window.addEventListener("resize", redraw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
turn();
