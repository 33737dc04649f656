// What stands about the chosen run beside its charts: its state, figures, bytes, ranks, events and tensors.

import {draw, fillTable, keepChildren, make, makeTable, setText} from "./elements.js";
import {NONE, byteRate, bytes, clock, count, number, parse, plural, seconds, short} from "./format.js";
import {legendMark} from "./charts.js";
import {isFinite, lag, throughput} from "./history.js";

const EVENTS = 100;
// Of waiting for a rank, and of ranks.
const LATE_S = 20, MOST_NAMED = 4;
const WIDE_FIGURES = ["Optimizer", "On the disk", "Followers"];
const NAMES = {
  rms: "RMS",
  curvature: "curvature",
  gradient_norm: "gradient norm",
  nonfinite: "not finite",
  loss: "loss spike"
};

export const stateWord = (run) => String(run.state).replace("RUN_STATE_", "").toLowerCase();

// Those that train first, then those that may; of each kind the one that made the last step first.
const BY_STATE = ["training", "relayed", "idle", "waiting", "finished", "failed"];
const sinceStep = (run) => parse(run.since_step_seconds) ?? Infinity;
export const newestFirst = (runs) => [...runs].sort(
  (a, b) => BY_STATE.indexOf(stateWord(a)) - BY_STATE.indexOf(stateWord(b)) || sinceStep(a) - sinceStep(b) ||
    a.run_id.localeCompare(b.run_id));

// Of a run that trains elsewhere. `relay`, `follow`: as in RunStatus.
function relayState(relay, follow) {
  const old = parse(relay.closed_unix_s) ? seconds(Math.floor(Date.now() / 1000 - parse(relay.closed_unix_s))) : NONE;
  const here = follow?.newest ? `The weights here are of step ${count(parse(follow.newest.step))}, ${old} old.` :
                                "There are no weights here yet.";
  if (relay.connected) return {tone: follow?.newest ? "good" : "wait", text: `Relayed from ${relay.upstream}. ${here}`};
  return {tone: "bad", text: `Nothing comes from ${relay.upstream}: ${relay.failure}. ${here}`};
}

// What is the matter, and what to do about it. {tone: "good" | "wait" | "bad", text}
export function stateOf(run) {
  if (run.relay) return relayState(run.relay, run.follow);
  const again = `delete the run (ballastctl delete ${run.run_id}) and create it again from weights that you saved.`;
  const durable = Number(run.durability?.durable_step ?? 0);
  if (stateWord(run) === "failed" && durable > 0)
    return {
      tone: "bad",
      text: `Failed: ${run.failure}. Step ${durable} is on the daemon's disk: start the trainer again, or ask for ` +
        `ballastctl restore ${run.run_id} --step ${durable}, and it goes on from there.`
    };
  if (stateWord(run) === "failed")
    return {tone: "bad", text: `Lost: ${run.failure}. Its weights are gone from the daemon: ${again}`};
  if (run.failure) return {tone: "bad", text: `Stopped: ${run.failure}`};
  if (!run.weights_loaded)
    return {tone: "wait", text: "Waits for its weights: the first trainer that attaches loads them."};
  const attached = (run.ranks ?? []).filter((rank) => /, connected\b/.test(rank)).length;
  const alone = seconds(Math.floor(parse(run.idle_seconds) ?? 0));
  const texts = {
    finished: `Finished ${alone} ago: its trainers have left. The run is kept until it is deleted.`,
    idle: `Idle: ${plural(attached, "rank")} attached, and no step for ${seconds(Math.floor(sinceStep(run)))}. ` +
      "An evaluation, or a trainer that hangs.",
    training: `In training, ${plural(attached, "rank")} attached.`
  };
  const word = stateWord(run);
  if (texts[word]) return {tone: word === "training" ? "good" : "wait", text: texts[word]};
  if (attached) return {tone: "wait", text: `Waits for its first step, ${plural(attached, "rank")} attached.`};
  return {
    tone: "wait",
    text: `No trainer has been attached for ${alone}. The run is kept: start the trainer again, and it goes on from here.`
  };
}

// Whom the open step has awaited for long; empty: nobody.
export function awaitedText(run) {
  const late = (run.awaited ?? []).filter((rank) => rank.seconds >= LATE_S);
  if (!late.length) return "";
  const texts = late.slice(0, MOST_NAMED).map(({rank, connected, what, seconds: s}) =>
    `rank ${rank}${connected ? "" : " (not connected)"}, which ${what}, for ${seconds(Math.floor(s))}`);
  if (late.length > MOST_NAMED) texts.push(`and ${late.length - MOST_NAMED} more`);
  return `Step ${count(parse(run.step) + 1)} waits for ${texts.join("; ")}.`;
}

// The last step that survives the daemon, and the age of the newest checkpoint. `durability`: as in RunStatus.
export function durableText(durability) {
  const step = parse(durability.durable_step);
  if (!step) return durability.writing ? "being written" : "nothing yet";
  return `step ${count(step)}, checkpoint ${seconds(Math.floor(parse(durability.checkpoint_age_s)))} ago`;
}

// Versions that have names. `follow`: as in RunStatus.
export function tagsText(follow) {
  return `${count(parse(follow.tags))}, ${bytes(parse(follow.tag_bytes))}`;
}

// Who keeps up with the weights, and how. `follow`: as in RunStatus.
export function followText(follow) {
  const readers = parse(follow.readers) ?? 0;
  if (!readers || !follow.newest) return readers ? `${count(readers)}, and no version yet` : "nobody";
  const behind = parse(follow.behind_seconds) ?? 0;
  const changed = 100 * (parse(follow.changed_ratio) ?? 0);
  return `${count(readers)}, at step ${count(parse(follow.newest.step))}, ${number(changed)} % changed` +
    (behind >= LATE_S ? `, one behind for ${seconds(Math.floor(behind))}` : "");
}

// Why later steps are not on the disk; empty: nothing is wrong, or there is no disk.
export function unwrittenText(run) {
  const { last_failure: checkpoint, journal_failure: journal } = run.durability ?? {};
  if (checkpoint) return `Its last checkpoint failed, and the steps since the one before are in memory alone: ${checkpoint}`;
  return journal ? `Its journal failed, and the steps since the last checkpoint are in memory alone: ${journal}` : "";
}

export function fillFigures(list, run, steps) {
  const last = steps.at(-1);
  const rates = throughput(steps, parse(run.parameters));
  const figures = [
    ["Step", count(parse(run.step))],
    ["Loss", number(parse(run.loss))],
    ["Gradient norm", number(parse(run.grad_norm))],
    ["Largest RMS", number(parse(run.rms_ratio_max))],
    ["Learning rate", number(last?.learningRate ?? null)],
    ["Step time", seconds(parse(run.step_seconds))],
    ["Steps a second", number(rates.steps)],
    ["Applied", count(parse(run.steps_applied))],
    [
      "Skipped, partial, aborted",
      [run.steps_skipped, run.steps_partial, run.steps_aborted].map((n) => count(parse(n))).join(", ")
    ],
    ["Parameters", count(parse(run.parameters))],
    ["Optimizer", run.optimizer],
    ["On", (run.plan?.devices ?? []).join(", ") || NONE],
    ...(run.durability ? [["On the disk", durableText(run.durability)]] : []),
    ...(run.follow ? [["Followers", followText(run.follow)]] : []),
    ...(parse(run.follow?.tags) ? [["Versions with names", tagsText(run.follow)]] : []),
  ];
  keepChildren(
    list, figures, ([name]) => name,
    ([name]) => make("div", {class: WIDE_FIGURES.includes(name) ? "wider" : null}, make("dt", {}, name), make("dd")),
    (div, [, value]) => setText(div.lastChild, value));
}

// --- throughput ------------------------------------------------------------------------------------------------------

const divide = (a, b) => (isFinite(a) && b > 0 && a > 0 ? a / b : null);

const WHAT =
  "Of the last 50 steps. Push: gradients, while they came in. Update: parameters, while the device was busy. " +
  "Pull: weights, over the whole step. Steps: closed, by the daemon's clock.";

export class Throughput {
  constructor(section) {
    this.table =
      makeTable("Throughput of the last 50 steps", [{name: ""}, {name: "Rate", number: true}, {name: "By step"}]);
    section.append(make("h3", {}, "Throughput"), make("p", {class: "note"}, WHAT), this.table.element);
  }

  update(run, steps) {
    const parameters = parse(run.parameters);
    const rates = throughput(steps, parameters);
    const elements = (value) => (value === null ? NONE : `${short(value)}/s`);
    const rows = [
      ["Push", byteRate(rates.push), (step) => divide(step.received, step.receive)],
      [
        "Update", elements(rates.update),
        (step) => (step.outcome === "applied" ? divide(parameters, step.update) : null)
      ],
      ["Pull", byteRate(rates.pull), (step) => divide(step.sent, step.seconds)],
      ["Steps", elements(rates.steps), (step) => divide(1, step.seconds)],
    ];
    fillTable(this.table, rows.map(([name, rate]) => [name, rate, ""]));
    rows.forEach(
      ([name, , of], i) =>
        this.table.body.children[i].children[2].replaceChildren(sparkline(steps.slice(-200).map(of), name)));
  }
}

// Its text is the rate beside it.
function sparkline(values, name) {
  const known = values.filter(isFinite);
  const most = Math.max(...known, 1e-300);
  const points = values.map(
    (value, i) =>
      (isFinite(value) ?
         `${((i / Math.max(1, values.length - 1)) * 118 + 1).toFixed(1)} ${(23 - (value / most) * 21).toFixed(1)}` :
         null));
  const d = points.filter((point) => point !== null).map((point, i) => `${i ? "L" : "M"}${point}`).join("");
  return draw(
    "svg", {class: "spark", width: 120, height: 24, viewBox: "0 0 120 24", role: "img"},
    draw("title", {}, `${name} by step, the largest at the top`), draw("path", {d}));
}

// --- bytes -----------------------------------------------------------------------------------------------------------

// As ByteCounts of the API has them, without padding, which is part of others. Snapshots, client_state and following are in host memory.
const KINDS = ["weights", "momentum", "variance", "averages", "gradients", "staging", "snapshots", "client_state", "following"];

const bytesOf = (run) => KINDS.map((kind) => parse(run.bytes?.[kind]) ?? 0);
const sum = (values) => values.reduce((a, b) => a + b, 0);
export const totalHeld = (run) => sum(bytesOf(run));

export class Bytes {
  constructor(section) {
    this.bar = draw("svg", {class: "bar", height: 18, role: "img"});
    this.table = makeTable(
      "Bytes by kind", [{name: "Kind"}, {name: "Bytes", number: true}, {name: "Per parameter", number: true}]);
    this.note = make("p", {class: "note"});
    section.append(make("h3", {}, "Bytes held, by kind"), this.note, this.bar, this.table.element);
  }

  update(run) {
    const held = bytesOf(run);
    const total = sum(held);
    const parameters = parse(run.parameters) || 1;
    const width = Math.max(200, this.bar.clientWidth);
    this.bar.setAttribute("viewBox", `0 0 ${width} 18`);
    this.bar.replaceChildren(draw("title", {}, KINDS.map((kind, i) => `${kind} ${bytes(held[i])}`).join(", ")));
    let x = 0;
    held.forEach((value, i) => {
      const size = total ? (value / total) * width : 0;
      this.bar.append(
        draw("rect", {class: `kind${i}`, x: x.toFixed(1), y: 0, width: Math.max(0, size - 2).toFixed(1), height: 18}));
      if (size > 18) this.bar.append(draw("text", {x: (x + 5).toFixed(1), y: 13}, String(i + 1)));
      x += size;
    });
    const rows = KINDS.map((kind, i) => [`${i + 1} ${kind}`, bytes(held[i]), number(held[i] / parameters)]);
    fillTable(this.table, [...rows, ["all", bytes(total), number(total / parameters)]]);
    const inState = held[0] + held[1] + held[2];
    setText(
      this.note,
      `${number(inState / parameters)} bytes a parameter for weights and moments, ${
        bytes(parse(run.bytes?.padding) ?? 0)} of it padding.`);
  }
}

// --- ranks -----------------------------------------------------------------------------------------------------------

export class Ranks {
  constructor(section) {
    const numbers = ["Last at", "Others waited", "Longest"].map((name) => ({name, number: true}));
    this.table = makeTable("Ranks", [{name: "Rank"}, ...numbers, {name: "Connection"}]);
    this.note = make("p", {class: "note"});
    section.append(make("h3", {}, "Ranks and their lag"), this.note, this.table.element);
  }

  update(run, steps) {
    const lags = lag(steps);
    const described = new Map(
      (run.ranks ?? []).map((text) => [Number(/^rank (\d+)/.exec(text)?.[1]), text.replace(/^rank \d+: /, "")]));
    const all = [...new Set([...described.keys(), ...lags.keys()])].sort((a, b) => a - b);
    fillTable(this.table, all.map((rank) => {
      const {last, waited, longest} = lags.get(rank) ?? {last: 0, waited: 0, longest: 0};
      return [
        String(rank), plural(last, "step"), seconds(waited), seconds(longest), described.get(rank) ?? "not attached"
      ];
    }));
    const slowest = [...lags].sort((a, b) => b[1].waited - a[1].waited)[0];
    const many = all.length > 1 && slowest;
    setText(
      this.note,
      many ? `The others waited longest for rank ${slowest[0]}: ${seconds(slowest[1].waited)} in the last ${
               plural(steps.length, "step")}.` :
             "One rank: there is nobody to wait for.");
  }
}

// --- tensors ---------------------------------------------------------------------------------------------------------

export class Tensors {
  constructor(section) {
    const numbers =
      ["RMS", "Gradient norm", "Largest gradient", "Update norm", "Not finite"].map((name) => ({name, number: true}));
    this.table = makeTable("Tensors to look at first", [{name: "Tensor", long: true}, ...numbers]);
    this.table.element.classList.add("high");
    section.append(
      make("h3", {}, "Tensors to look at first"),
      make("p", {class: "note"}, "Of the last step that was applied: at most 20, the largest RMS first."),
      this.table.element);
  }

  update(tensors) {
    fillTable(
      this.table,
      tensors.map(
        (tensor) =>
          [tensor.tensor, number(parse(tensor.rms_ratio)), number(parse(tensor.gradient_norm)),
           number(parse(tensor.gradient_absmax)), number(parse(tensor.update_norm)), count(parse(tensor.nonfinite))]));
  }
}

// --- events ----------------------------------------------------------------------------------------------------------

const sign = (step) =>
  (step.real.length        ? "real" :
     step.nonfinite.length ? "nonfinite" :
     step.predicted.length ? "predicted" :
                             null);

function headline(step) {
  const kinds = new Map();
  for (const spike of step.spikes) kinds.set(spike.kind, (kinds.get(spike.kind) ?? 0) + 1);
  const found =
    [...kinds].map(([kind, times]) => (times > 1 ? `${NAMES[kind] ?? kind} × ${times}` : NAMES[kind] ?? kind));
  const outcome = step.outcome === "applied" ? [] : [step.reason ? `${step.outcome}: ${step.reason}` : step.outcome];
  const early =
    step.predicted.length && !step.real.length && !step.nonfinite.length ? ["a loss spike is predicted"] : [];
  const back = step.wentBack === null ? [] : [`the run went back here from step ${count(step.wentBack)}`];
  return [...back, ...outcome, ...early, ...found].join(" · ");
}

export class Events {
  constructor(section) {
    this.list = make("ol", {class: "events"});
    this.note = make("p", {class: "note"});
    const region = make("div", {class: "high", tabindex: 0, role: "region", "aria-label": "Events"}, this.list);
    section.append(make("h3", {}, "Events"), this.note, region);
  }

  update(steps) {
    const happened = (step) => step.spikes.length || step.outcome !== "applied" || step.wentBack !== null;
    const events = steps.filter(happened).reverse();
    setText(
      this.note,
      events.length ? `Newest first; ${plural(events.length, "step")} of the last ${count(steps.length)}${
                        events.length > EVENTS ? `, ${EVENTS} shown` : ""}.` :
                                                 "Nothing has happened in the steps that are kept.");
    const key = (step) => `${step.step} ${step.closedAt}`;
    keepChildren(this.list, events.slice(0, EVENTS), key, makeEvent, () => {});
  }
}

function makeEvent(step) {
  const texts = [...(step.detail ? [step.detail] : []), ...step.spikes.map((spike) => spike.text)];
  const lines = texts.map((text) => make("li", {}, text));
  const more = lines.length > 3 ?
    make("details", {}, make("summary", {}, `${lines.length - 2} more`), make("ul", {}, ...lines.splice(2))) :
    null;
  const mark = sign(step);
  const head = make(
    "p", {}, mark ? legendMark(mark) : make("span", {class: "dot", "aria-hidden": "true"}, "•"), " ",
    make("strong", {}, `Step ${count(step.step)}`), ` ${headline(step)} `,
    make("time", {class: "muted"}, clock(step.closedAt)));
  return make("li", {}, head, make("ul", {}, ...lines), more);
}

// --- the last steps in words -----------------------------------------------------------------------------------------

export class StepTable {
  constructor(section) {
    const numbers = ["Loss", "Gradient norm", "Clipped to", "Largest RMS", "Took", "Received", "Sent"].map(
      (name) => ({name, number: true}));
    this.table = makeTable("The last steps", [{name: "Step"}, {name: "Outcome"}, ...numbers]);
    this.details = make("details", {}, make("summary", {}, "The last 50 steps as a table"), this.table.element);
    section.append(this.details);
    this.details.addEventListener("toggle", () => this.update(this.steps));
    this.steps = [];
  }

  update(steps) {
    this.steps = steps;
    if (!this.details.open) return;
    fillTable(this.table, steps.slice(-50).reverse().map((step) => {
      const rms = Math.max(...step.rms.filter(isFinite));
      return [
        count(step.step), step.reason ? `${step.outcome}: ${step.reason}` : step.outcome, number(step.loss),
        number(step.norm), number(step.clip), number(isFinite(rms) ? rms : null), seconds(step.seconds),
        bytes(step.received), bytes(step.sent)
      ];
    }));
  }
}
