// RMS_t by layer and step. Cells are drawn on a canvas, a pixel's column showing the largest of its steps, so that no
// spike is lost between pixels; what reached the threshold is counted in words beside the layer and listed below it.

import {drawRule, drawStepAxis, legendMark, MARGIN, moveCursor, SHAPES, stepScale} from "./charts.js";
import {draw, fillTable, make, makeTable, setText} from "./elements.js";
import {count, NONE, number, plural} from "./format.js";
import {isFinite} from "./history.js";

const LABELS = 150;  // pixels
const NARROW = 76;   // likewise, on a phone
const TOP = 18;
const SHADES = 24;

const largest = (values) => values.reduce((most, value) => (isFinite(value) && value > most ? value : most), -Infinity);

// Two ramps of the stylesheet: below the threshold, and from it to twice that.
function shades(element) {
  const style = getComputedStyle(element);
  const color = (name) => style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));
  const mix = (a, b, part) => `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * part)).join(" ")})`;
  const ramp = (from, to) => Array.from({length: SHADES}, (_, i) => mix(color(from), color(to), i / (SHADES - 1)));
  return {calm: ramp("--heat-low", "--heat-high"), over: ramp("--heat-over", "--heat-far")};
}

// The end of a name says most; from a dot on where it can be.
function shorten(name, room) {
  if (name.length <= room) return name;
  const end = name.slice(1 - room);
  const dot = end.indexOf(".");
  return `…${dot >= 0 && dot < end.length - 3 ? end.slice(dot + 1) : end}`;
}

export class Heatmap {
  constructor(section, cursor) {
    this.cursor = cursor;
    this.steps = [];
    this.layers = [];
    this.canvas = make("canvas", {"aria-hidden": "true"});
    this.svg = draw("svg", {class: "chart over", tabindex: 0, role: "img"});
    this.readout = make("p", {class: "readout"});
    this.threshold = make("span");
    this.scaleBar = make("canvas", {width: 120, height: 10, "aria-hidden": "true"});
    this.table = makeTable("RMS by layer", [
      {name: "Layer"}, ...["Last", "Largest", "At step", "Events"].map((name) => ({name, number: true}))
    ]);
    section.append(
      make("h3", {}, "RMS of the gradient against its second moment, by layer"),
      make(
        "p", {class: "note"},
        "Where v lags behind g², RMS_t rises. At the threshold, and far above the layer's own past, it is an event: " +
          "a loss spike may follow within 8 steps."),
      make(
        "ul", {class: "legend"}, make("li", {}, "0 ", this.scaleBar, " twice the threshold of ", this.threshold),
        make("li", {}, legendMark("predicted"), " an event")),
      make("div", {class: "heat"}, this.canvas, this.svg),
      this.readout,
      make("details", {}, make("summary", {}, "RMS by layer as a table"), this.table.element),
    );
    this.listen();
  }

  listen() {
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.row = Math.floor((event.clientY - box.top - TOP) / this.rowHeight);
      if (this.scale) this.cursor(this.scale.nearest(event.clientX - box.left - this.left));
    });
    this.svg.addEventListener("pointerleave", () => {
      this.row = null;
      this.cursor(null);
    });
    this.svg.addEventListener("keydown", (event) => moveCursor(event, this.at, this.steps.length, this.cursor));
  }

  update(steps, layers, threshold) {
    Object.assign(this, {steps, layers, limit: threshold});
    setText(this.threshold, number(threshold));
    const width = Math.max(200, this.canvas.parentElement.clientWidth);
    // The plot begins further right than the other charts' where layers' names have room.
    this.left = (width > 560 ? LABELS : NARROW) - MARGIN.left;
    this.rowHeight = Math.max(3, Math.min(16, Math.floor(320 / Math.max(1, layers.length))));
    this.height = TOP + this.rowHeight * layers.length + MARGIN.bottom;
    const inner = stepScale(steps.length ? steps : [{step: 0}], width - this.left);
    this.scale = steps.length ? inner : null;
    this.svg.setAttribute("height", this.height);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.paint(width);
    this.drawOver();
    this.fillTable();
    this.point(this.at ?? null);
  }

  paint(width) {
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const context = this.canvas.getContext("2d");
    const {calm, over} = shades(this.canvas);
    this.paintScale(calm, over);
    if (!this.scale) return;
    context.scale(ratio, ratio);
    const shade = (value) => {
      const part = value / this.limit;
      const ramp = part < 1 ? calm : over;
      return ramp[Math.min(SHADES - 1, Math.floor((part < 1 ? part : part - 1) * SHADES))];
    };
    const kept = this.steps.filter((step) => !step.remade);
    const one = Math.max(
      1, (this.scale.at(this.scale.last) - this.scale.at(this.scale.first)) / (this.scale.last - this.scale.first));
    this.layers.forEach((_, layer) => {
      const columns = new Map();
      for (const step of kept) {
        const value = step.rms[layer];
        const column = Math.floor(this.left + this.scale.at(step.step));
        if (isFinite(value) && !(columns.get(column) >= value)) columns.set(column, value);
      }
      for (const [column, value] of columns) {
        context.fillStyle = shade(value);
        context.fillRect(
          column, TOP + layer * this.rowHeight, Math.ceil(one), this.rowHeight - (this.rowHeight > 6 ? 1 : 0));
      }
    });
  }

  paintScale(calm, over) {
    const context = this.scaleBar.getContext("2d");
    const all = calm.concat(over);
    all.forEach((color, i) => {
      context.fillStyle = color;
      context.fillRect((i * 120) / all.length, 0, 120 / all.length + 1, 10);
    });
  }

  reached(layer) {
    const name = this.layers[layer];
    return this.steps.filter((step) => step.spikes.some((spike) => spike.kind === "rms" && spike.layer === name))
      .length;
  }

  drawOver() {
    this.svg.replaceChildren(draw("title", {}, "RMS by layer and step"), draw("desc", {}, this.describe()));
    if (!this.scale)
      return this.svg.append(draw("text", {class: "tick", x: MARGIN.left, y: TOP + 10}, "No steps yet."));
    const plot = draw("g", {transform: `translate(${this.left} 0)`});
    drawStepAxis(plot, this.scale, this.height);
    for (const step of this.steps.filter((each) => each.spikes.some((spike) => spike.kind === "rms"))) {
      plot.append(draw(
        "path", {
          class: "mark predicted",
          d: SHAPES.predicted,
          transform: `translate(${this.scale.at(step.step).toFixed(1)} 9)`
        },
        draw("title", {}, `step ${step.step}`)));
    }
    this.rule = draw("path", {class: "cursor", d: ""});
    plot.append(this.rule);
    this.svg.append(plot);
    const apart = Math.ceil(11 / this.rowHeight);
    const room = Math.floor((this.left + MARGIN.left - 8) / 6.4);
    this.layers.forEach((name, layer) => {
      if (layer % apart) return;
      const shown = shorten(name, room);
      this.svg.append(draw(
        "text",
        {class: "tick end", x: this.left + MARGIN.left - 6, y: TOP + (layer + 0.5) * this.rowHeight, dy: "0.32em"},
        shown));
    });
  }

  describe() {
    if (!this.steps.length) return "No steps yet.";
    const over = this.layers.map((name, layer) => [name, this.reached(layer)]).filter(([, times]) => times);
    const which = over.slice(0, 20).map(([name, times]) => `${name}: ${plural(times, "step")}`).join(", ");
    return `${plural(this.layers.length, "layer")}, steps ${this.steps[0].step} to ${this.steps.at(-1).step}. ${
      over.length ? `Events: ${which}.` : "No event."}`;
  }

  fillTable() {
    const last = this.steps.at(-1);
    const rows = this.layers.map((name, layer) => {
      const most = largest(this.steps.map((step) => step.rms[layer]));
      const where = this.steps.findLast?.((step) => step.rms[layer] === most) ?? null;
      return [
        name, number(isFinite(last?.rms[layer]) ? last.rms[layer] : null), number(isFinite(most) ? most : null),
        where ? count(where.step) : NONE, count(this.reached(layer))
      ];
    });
    fillTable(this.table, rows);
  }

  point(index) {
    this.at = index;
    const step = this.steps[index ?? this.steps.length - 1];
    drawRule(this, index === null ? null : step, TOP, this.height);
    setText(this.readout, step ? this.tell(step) : NONE);
  }

  tell(step) {
    const known = step.rms.map((value, layer) => [value, layer]).filter(([value]) => isFinite(value));
    if (!known.length)
      return (
        `Step ${step.step}: no RMS: the rule has no second moment, all tensors are smaller than spikes.rms_min_elements, ` +
        "or nothing was updated"
      );
    if (this.layers[this.row] !== undefined)
      return `Step ${step.step}: ${this.layers[this.row]} ${number(step.rms[this.row])}`;
    const [value, layer] = known.reduce((most, each) => (each[0] > most[0] ? each : most));
    return `Step ${step.step}: largest ${number(value)}, of ${this.layers[layer]}`;
  }
}
