// Line charts over steps, as inline SVG. Each line has a dash pattern and each mark a shape of its own, for colour is
// never the only sign; what a chart shows stands in its description too.

import {draw, make, setText} from "./elements.js";
import {count, NONE, number} from "./format.js";
import {isFinite} from "./history.js";

export const MARGIN = {
  left: 66,
  right: 10,
  top: 20,
  bottom: 22
};
const HEIGHT = 190;

// Steps to pixels. After a rewind a step's number comes again, at the same place.
export function stepScale(steps, width) {
  const numbers = steps.map((step) => step.step);
  const first = Math.min(...numbers);
  const last = Math.max(...numbers, first + 1);
  const room = width - MARGIN.left - MARGIN.right;
  return {
    first,
    last,
    at: (step) => MARGIN.left + ((step - first) / (last - first)) * room,
    // The index of the step nearest to a pixel; of a number that came twice the later one.
    nearest(pixel) {
      const wanted = first + ((pixel - MARGIN.left) / room) * (last - first);
      let best = 0;
      for (let i = 1; i < steps.length; i += 1) {
        if (Math.abs(steps[i].step - wanted) <= Math.abs(steps[best].step - wanted)) best = i;
      }
      return best;
    },
  };
}

function niceSteps(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough) ?? rough;
  const ticks = [];
  for (let tick = Math.ceil(low / size) * size; tick <= high + size * 1e-6; tick += size)
    ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

// At least two, on whatever range.
function ticksOf(isLog, low, high) {
  const choices = isLog ? [decades(low, high), oneTwoFives(low, high), niceSteps(low, high, 3).filter((t) => t > 0)] :
                          [niceSteps(low, high, 4), niceSteps(low, high, 8)];
  return choices.find((ticks) => ticks.length > 1) ?? [low, high].map((end) => Number(end.toPrecision(2)));
}

function oneTwoFives(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1)
    ticks.push(...[1, 2, 5].map((factor) => factor * 10 ** power));
  return ticks.filter((tick) => tick >= low && tick <= high);
}

function decades(low, high) {
  const ticks = [];
  const apart = Math.ceil((Math.log10(high) - Math.log10(low)) / 4) || 1;
  for (let power = Math.ceil(Math.log10(low) - 1e-9); 10 ** power <= high * 1.0001; power += apart)
    ticks.push(10 ** power);
  return ticks;
}

// Values to pixels; by their logarithm where they lie far apart.
function valueScale(values, {always = []}) {
  const known = values.concat(always).filter(isFinite);
  if (!known.length) return null;
  let low = Math.min(...known);
  let high = Math.max(...known);
  const positive = known.filter((value) => value > 0);
  // A zero now and then, as the norm of a step without gradients, is left out there.
  const isLog = low >= 0 && positive.length > 0.9 * known.length && high / Math.min(...positive) > 30;
  if (isLog) low = Math.min(...positive);
  if (isLog) {
    low /= 1.2;
    high *= 1.2;
  } else {
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    low = low >= 0 && low - room < (high - low) * 0.5 ? Math.max(0, Math.min(low, low - room)) : low - room;
    high += room;
  }
  const place =
    isLog ? (value) => Math.log(value / low) / Math.log(high / low) : (value) => (value - low) / (high - low);
  const inside = HEIGHT - MARGIN.top - MARGIN.bottom;
  return {
    isLog,
    ticks: ticksOf(isLog, low, high),
    at: (value) => MARGIN.top + inside * (1 - place(value)),
  };
}

// Where a value is missing the line breaks, unless it is only known now and then.
function path(points, {sparse}) {
  let text = "";
  let pen = false;
  let before = -Infinity;
  for (const [step, x, y] of points) {
    if (y === null) {
      pen = pen && sparse;
      continue;
    }
    const goesBack = step <= before;
    text += pen && !goesBack ? `L${x.toFixed(1)} ${y.toFixed(1)}` : `M${x.toFixed(1)} ${y.toFixed(1)}h0`;
    pen = true;
    before = step;
  }
  return text;
}

// Marks: predicted, a hollow triangle at the top; real, a full diamond; nonfinite, a cross.
export const SHAPES = {
  predicted: "M-5 -4h10l-5 8z",
  real: "M0 -6l5 6l-5 6l-5 -6z",
  nonfinite: "M-4 -4l8 8M-4 4l8 -8",
};

const legendLine = (index) =>
  draw("svg", {width: 26, height: 10, "aria-hidden": "true"}, draw("path", {d: "M1 5h24", class: `line line${index}`}));
export const legendMark = (kind) => draw(
  "svg", {width: 14, height: 14, viewBox: "-7 -7 14 14", "aria-hidden": "true"},
  draw("path", {d: SHAPES[kind], class: `mark ${kind}`}));

// options: {title, note, lines: [{name, of(step), format, sparse}], marks(step): [{kind, value}], markNames: {kind:
// name}, levels(): [{name, value}], always: values that must be inside}. `cursor(index)` is told which step the reader
// points at.
export class LineChart {
  constructor(section, options, cursor) {
    this.options = options;
    this.cursor = cursor;
    this.steps = [];
    this.svg = draw("svg", {class: "chart", tabindex: 0, role: "img", height: HEIGHT});
    this.readout = make("p", {class: "readout"});
    this.legend = make("ul", {class: "legend"});
    this.markCounts = {};
    options.lines.forEach((line, i) => this.legend.append(make("li", {}, legendLine(i), ` ${line.name}`)));
    for (const [kind, name] of Object.entries(options.markNames ?? {})) {
      this.markCounts[kind] = make("span");
      this.legend.append(make("li", {}, legendMark(kind), ` ${name} `, this.markCounts[kind]));
    }
    // Beside the chart, where marks and levels may be anywhere.
    this.logScale = make("li", {hidden: ""}, "log scale");
    this.legend.append(this.logScale);
    section.append(
      make("h3", {}, options.title), make("p", {class: "note"}, options.note), this.legend, this.svg, this.readout);
    this.listen();
  }

  listen() {
    this.svg.addEventListener("pointermove", (event) => {
      if (this.scale) this.cursor(this.scale.nearest(event.clientX - this.svg.getBoundingClientRect().left));
    });
    this.svg.addEventListener("pointerleave", () => this.cursor(null));
    this.svg.addEventListener("keydown", (event) => moveCursor(event, this.at, this.steps.length, this.cursor));
  }

  update(steps) {
    this.steps = steps;
    const width = Math.max(200, this.svg.clientWidth || this.svg.parentElement.clientWidth);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const values = this.options.lines.flatMap((line) => steps.map(line.of));
    const levels = (this.options.levels?.() ?? []).filter((level) => isFinite(level.value));
    const y = steps.length ?
      valueScale(values, {always: levels.map((level) => level.value).concat(this.options.always ?? [])}) :
      null;
    this.scale = y ? stepScale(steps, width) : null;
    this.logScale.hidden = !y?.isLog;
    this.svg.replaceChildren(draw("title", {}, this.options.title), draw("desc", {}, this.describe()));
    if (!y) {
      this.svg.append(draw("text", {x: MARGIN.left, y: HEIGHT / 2, class: "tick"}, "No such figures yet."));
      return this.point(null);
    }
    this.drawAxes(y, width);
    levels.forEach((level) => this.drawLevel(level, y, width));
    this.options.lines.forEach((line, i) => this.drawLine(line, i, y));
    this.drawMarks(y);
    this.rule = draw("path", {class: "cursor", d: ""});
    this.svg.append(this.rule);
    this.point(this.at ?? null);
  }

  drawAxes(y, width) {
    for (const tick of y.ticks) {
      const at = y.at(tick).toFixed(1);
      this.svg.append(draw("path", {class: "grid", d: `M${MARGIN.left} ${at}H${width - MARGIN.right}`}));
      this.svg.append(draw(
        "text", {class: "tick end", x: MARGIN.left - 6, y: at, dy: "0.32em"},
        (this.options.lines[0].tick ?? this.options.lines[0].format ?? number)(tick)));
    }
    drawStepAxis(this.svg, this.scale, HEIGHT);
  }

  drawLevel({name, value}, y, width) {
    const at = y.at(value).toFixed(1);
    this.svg.append(draw("path", {class: "level", d: `M${MARGIN.left} ${at}H${width - MARGIN.right}`}));
    this.svg.append(draw("text", {class: "tick end", x: width - MARGIN.right, y: at, dy: "-0.4em"}, name));
  }

  // What the run went back from is drawn faintly.
  drawLine(line, index, y) {
    const draws = (value) => isFinite(value) && !(y.isLog && value <= 0);
    const points = (wanted) => this.steps.map((step) => {
      const value = line.of(step);
      return [step.step, this.scale.at(step.step), step.remade === wanted && draws(value) ? y.at(value) : null];
    });
    if (this.steps.some((step) => step.remade)) {
      this.svg.append(draw("path", {class: `line line${index} remade`, d: path(points(true), line)}));
    }
    this.svg.append(draw("path", {class: `line line${index}`, d: path(points(false), line)}));
  }

  drawMarks(y) {
    const counts = {};
    for (const step of this.options.marks ? this.steps : []) {
      for (const {kind, value} of this.options.marks(step)) {
        counts[kind] = (counts[kind] ?? 0) + 1;
        const x = this.scale.at(step.step).toFixed(1);
        const at = isFinite(value) ? y.at(value) : MARGIN.top - 6;
        const text = `step ${step.step}: ${this.options.markNames[kind]}`;
        this.svg.append(draw(
          "path", {class: `mark ${kind}`, d: SHAPES[kind], transform: `translate(${x} ${at.toFixed(1)})`},
          draw("title", {}, text)));
      }
    }
    for (const [kind, element] of Object.entries(this.markCounts)) setText(element, `(${count(counts[kind] ?? 0)})`);
  }

  describe() {
    if (!this.steps.length) return "No steps yet.";
    const range = `Steps ${this.steps[0].step} to ${this.steps.at(-1).step}. `;
    const backs = this.steps.filter((step) => step.wentBack !== null)
                    .map((step) => `The run went back from step ${step.wentBack} to ${step.step - 1}. `);
    const lines = this.options.lines.map((line) => {
      const known = this.steps.map(line.of).filter(isFinite);
      const format = line.format ?? number;
      if (!known.length) return `${line.name}: no figures.`;
      return `${line.name}: last ${format(known.at(-1))}, smallest ${format(Math.min(...known))}, largest ${
        format(Math.max(...known))}.`;
    });
    const marks = Object.entries(this.options.markNames ?? {}).map(([kind, name]) => {
      const at = this.steps.filter((step) => this.options.marks(step).some((mark) => mark.kind === kind))
                   .map((step) => step.step);
      return `${name}: ${at.length ? `at steps ${at.slice(-20).join(", ")}` : "none"}.`;
    });
    return range + backs.join("") + lines.concat(marks).join(" ");
  }

  // Shows a step's figures; null: the last one's.
  point(index) {
    this.at = index;
    const step = this.steps[index ?? this.steps.length - 1];
    drawRule(this, index === null ? null : step, MARGIN.top - 8, HEIGHT);
    setText(this.readout, step ? this.tell(step) : NONE);
  }

  tell(step) {
    const figures = this.options.lines.map((line) => `${line.name} ${(line.format ?? number)(line.of(step))}`);
    const marks = (this.options.marks?.(step) ?? []).map((mark) => this.options.markNames[mark.kind]);
    const outcome = step.outcome === "applied" ? [] : [step.outcome];
    return `Step ${step.step}${step.remade ? " (made anew since)" : ""}: ${figures.concat(outcome, marks).join(", ")}`;
  }
}

export function drawStepAxis(svg, scale, height) {
  const room = scale.at(scale.last) - scale.at(scale.first);
  for (const tick of niceSteps(scale.first, scale.last, Math.max(2, Math.min(8, room / 80))).filter(Number.isInteger)) {
    svg.append(draw("text", {class: "tick middle", x: scale.at(tick).toFixed(1), y: height - 6}, count(tick)));
  }
}

// The upright line at the step that is read; at none it is gone.
export function drawRule({rule, scale}, step, top, height) {
  rule?.setAttribute(
    "d", step && scale ? `M${scale.at(step.step).toFixed(1)} ${top}V${height - MARGIN.bottom}` : "");
}

// Left and right go a step, with shift ten; Home and End to the ends; Escape back to the last.
export function moveCursor(event, at, length, cursor) {
  const far = event.shiftKey ? 10 : 1;
  const from = at ?? length - 1;
  const to = {ArrowLeft: from - far, ArrowRight: from + far, Home: 0, End: length - 1, Escape: null}[event.key];
  if (to === undefined || !length) return;
  event.preventDefault();
  cursor(to === null ? null : Math.max(0, Math.min(length - 1, to)));
}
