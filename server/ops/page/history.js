// What the page knows of a run's steps.

import {parse} from "./format.js";

const PREDICTORS = new Set(["rms", "curvature", "gradient_norm"]);
const MOST = 2048;  // as the daemon keeps

const word = (name, prefix) => String(name ?? "").replace(prefix, "").toLowerCase();

function toStep(record) {
  const spikes = (record.spikes ?? []).map((spike) => ({
                                             kind: word(spike.kind, "SPIKE_KIND_"),
                                             layer: spike.layer,
                                             tensor: spike.tensor,
                                             value: parse(spike.value),
                                             text: spike.text,
                                             since: parse(spike.since_step),
                                           }));
  return {
    step: parse(record.step),
    outcome: word(record.outcome, "STEP_OUTCOME_"),
    reason: record.reason ?? "",
    detail: record.detail ?? "",
    closedAt: parse(record.closed_at_s),
    loss: parse(record.loss),
    learningRate: parse(record.learning_rate),
    norm: parse(record.grad_norm),
    clip: parse(record.clip_coefficient),
    edq: parse(record.edq_ratio),
    unchanged: parse(record.unchanged_ratio),
    seconds: parse(record.seconds),
    receive: parse(record.receive_seconds),
    update: parse(record.update_seconds),
    wait: parse(record.wait_seconds),
    lastRank: parse(record.last_rank),
    received: parse(record.received_bytes),
    sent: parse(record.sent_bytes),
    rms: (record.layer_rms ?? []).map(Number),
    spikes,
    // What comes after a spike does not predict it.
    predicted: spikes.filter((spike) => PREDICTORS.has(spike.kind) && !spike.since),
    real: spikes.filter((spike) => spike.kind === "loss"),
    nonfinite: spikes.filter((spike) => spike.kind === "nonfinite"),
    remade: false,   // a later step has this number or a smaller one: the run went back
    wentBack: null,  // from which step, where this is the first after a rewind
  };
}

export class History {
  constructor() {
    this.steps = [];  // as they closed
    this.layers = [];
    this.tensors = [];
  }

  get last() {
    return this.steps.at(-1) ?? null;
  }

  // Asks for the last known step as well: where it is another one, or not there, the run went back or is a new one.
  query() {
    return this.last ? `after=${Math.max(0, this.last.step - 1)}` : "";
  }

  // False: what was known no longer holds and is forgotten; ask again.
  take(answer) {
    const steps = (answer.steps ?? []).map(toStep);
    if (this.last) {
      const again = steps.shift();
      if (again === undefined || again.step !== this.last.step || again.closedAt !== this.last.closedAt) {
        this.steps = [];
        return false;
      }
    }
    this.steps = this.steps.concat(steps).slice(-MOST);
    this.layers = answer.layers ?? [];
    this.tensors = answer.tensors ?? [];
    let next = Infinity;
    for (let i = this.steps.length - 1; i >= 0; i -= 1) {
      this.steps[i].remade = this.steps[i].step >= next;
      if (i > 0 && this.steps[i].step <= this.steps[i - 1].step) this.steps[i].wentBack = this.steps[i - 1].step;
      next = Math.min(next, this.steps[i].step);
    }
    return true;
  }
}

const finite = (value) => value !== null && Number.isFinite(value);
const sum = (steps, of) => steps.reduce((total, step) => total + (finite(of(step)) ? of(step) : 0), 0);
const rate = (amount, time) => (time > 0 && amount > 0 ? amount / time : null);

// Throughput over the last `most` steps. Pushed bytes are divided by the time in which gradients came in, updated
// elements by the time in which the device was busy, and pulled bytes by the time of the whole step.
export function throughput(steps, parameters, most = 50) {
  const last = steps.slice(-most);
  // A clock may have been set: an interval that is not positive says nothing, and one that is far too long little.
  const gaps = last.slice(1).map((step, i) => step.closedAt - last[i].closedAt).filter((gap) => gap > 0);
  const gap = gaps.sort((a, b) => a - b)[gaps.length >> 1] ?? null;
  const applied = last.filter((step) => step.outcome === "applied").length;
  return {
    push: rate(sum(last, (step) => step.received), sum(last, (step) => step.receive)),
    update: rate(applied * parameters, sum(last, (step) => step.update)),
    pull: rate(sum(last, (step) => step.sent), sum(last, (step) => step.seconds)),
    steps: gap ? 1 / gap : null,
  };
}

// By rank: at how many steps it was the last, and for how long the others waited for it.
export function lag(steps) {
  const ranks = new Map();
  for (const {lastRank, wait} of steps) {
    const known = ranks.get(lastRank) ?? {last: 0, waited: 0, longest: 0};
    known.last += 1;
    known.waited += wait ?? 0;
    known.longest = Math.max(known.longest, wait ?? 0);
    ranks.set(lastRank, known);
  }
  return ranks;
}

export const isFinite = finite;
