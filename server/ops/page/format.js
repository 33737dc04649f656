// Figures as people read them.

export const NONE = "–";

// Protobuf's JSON has 64-bit numbers, and those that are not finite, as strings; null: there is none.
export const parse = (value) => (value === undefined || value === null ? null : Number(value));

export function number(value) {
  if (value === null || value === undefined) return NONE;
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "not a number" : value > 0 ? "infinite" : "−infinite";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e").replace("e-", "e−");
  return String(Number(value.toPrecision(4)));
}

export const count = (value) =>
  (value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-US"));

function scaled(value, base, units) {
  let unit = 0;
  while (Math.abs(value) >= base * 0.9995 && unit + 1 < units.length) {
    value /= base;
    unit += 1;
  }
  const text = value >= 100 || unit === 0 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
  return `${text} ${units[unit]}`.trim();
}

export const bytes = (value) => (value === null ? NONE : scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]));
export const short = (value) => (value === null ? NONE : scaled(value, 1000, ["", "K", "M", "G", "T"]));
export const byteRate = (value) => (value === null ? NONE : `${bytes(value)}/s`);

export function seconds(value) {
  if (value === null || !Number.isFinite(value)) return NONE;
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${number(value * 1e6)} µs`;
  if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} days`;
}

// The daemon's time of day, in the reader's time zone.
export const clock = (unix_s) => (unix_s > 0 ? new Date(unix_s * 1000).toLocaleTimeString("en-GB") : NONE);

export const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
