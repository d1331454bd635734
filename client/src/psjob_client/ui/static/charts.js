// Curves by uPlot: several over one another, smoothed ones before the raw ones, with words for those who do not see them.

import { h, number, table } from "./dom.js";

export const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5"];
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const PLACES = 3000; // on the axis, of all curves together
const FAINT = 20; // above so many curves the raw ones are not drawn behind the smoothed ones
const NAMED = 12; // above so many only the nearest curve is told
const HEIGHT = 230;

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// How curve `at` is drawn, for a legend too.
export const look = (at) => ({ colour: COLOURS[at % COLOURS.length], dash: DASHES[Math.floor(at / COLOURS.length) % DASHES.length] });

export function swatch(at) {
  const { colour: name, dash } = look(at);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [key, value] of Object.entries({ x1: 0, y1: 4, x2: 22, y2: 4, "stroke-width": 3, "stroke-dasharray": dash.join(" ") || "none", class: `line${name}` })) line.setAttribute(key, value);
  const box = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 22 8", class: "swatch", "aria-hidden": "true" })) box.setAttribute(key, value);
  box.append(line);
  return box;
}

// A number beside an axis, where each is short and shows no more digits than it has.
function tick(value) {
  return value === null || value === undefined ? "" : number(value).replace(/\.?0+e/, "e").replace("e+", "e");
}

// A chart in `place`, drawn anew with other data by `draw`. Curves: [{label, x, y, smooth, look}]; each may have places of its own.
export class Chart {
  constructor(title, axis) {
    this.title = title;
    this.axis = axis;
    this.said = h("p", { class: "read" });
    this.place = h("div", { class: "plot", role: "img" });
    this.points = h("div");
    this.section = h("section", {}, h("h3", {}, title), this.said, this.place, this.points);
    new ResizeObserver(() => this.fit()).observe(this.place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.data && this.make());
  }

  draw(curves, { axis = this.axis, log = false } = {}) {
    const all = curves.filter((curve) => curve.x.length);
    const shape = JSON.stringify([axis, log, all.map((curve) => [curve.label, curve.look, Boolean(curve.smooth), curve.x.length < 2])]);
    this.curves = all;
    this.axis = axis;
    const positive = all.every((curve) => curve.y.every((value) => value > 0));
    this.log = log && positive;
    this.note = log && !positive ? "not logarithmic: some values are 0 or below" : "";
    const raw = all.length <= FAINT ? all : all.filter((curve) => !curve.smooth);
    this.lines = [
      ...raw.map((curve) => ({ curve, values: curve.y, faint: Boolean(curve.smooth) })),
      ...all.filter((curve) => curve.smooth).map((curve) => ({ curve, values: curve.smooth, faint: false })),
    ];
    this.data = joined(this.lines);
    if (this.plot && shape === this.shape) this.plot.setData(this.data);
    else { this.shape = shape; this.make(); }
    this.place.setAttribute("aria-label", described(this.title, all));
    this.read();
    if (!this.points.querySelector("details[open]")) this.points.replaceChildren(points(all));
  }

  make() {
    this.plot?.destroy();
    const ink = { stroke: () => colour("--soft"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { stroke: () => colour("--line") } };
    const series = this.lines.map(({ curve, faint }) => {
      const { colour: name, dash } = look(curve.look);
      return { label: curve.label, stroke: colour(name) + (faint ? "59" : ""), width: faint ? 1 : 1.8, spanGaps: true, dash: faint ? [] : dash, points: { show: curve.x.length < 2 } };
    });
    this.plot = new uPlot({
      width: Math.max(200, this.place.clientWidth), height: HEIGHT,
      cursor: { drag: { x: true, y: false }, sync: { key: this.axis }, focus: { prox: this.curves.length > 1 ? 24 : -1 } },
      focus: { alpha: 0.3 }, legend: { show: false },
      scales: { x: { time: false }, y: { distr: this.log ? 3 : 1 } },
      axes: [{ ...ink, label: this.axis, labelSize: 18, size: 34, values: (_, ticks) => ticks.map(tick) }, { ...ink, size: beside, values: (_, ticks) => ticks.map(tick) }],
      series: [{}, ...series],
      hooks: { setCursor: [(plot) => this.read(plot.cursor.idx)], setSeries: [(plot, at) => { this.near = at; this.read(plot.cursor.idx); }] },
    }, this.data, this.place);
  }

  // What stands above the curves: under the pointer, or else at their end.
  read(at) {
    const last = at === null || at === undefined;
    const words = [];
    const many = this.curves.length > NAMED;
    const near = this.near ? this.lines[this.near - 1]?.curve : null;
    for (const curve of this.curves) {
      if (many && curve !== near) continue;
      const value = (values, line) => (last ? values.at(-1) : this.data[1 + this.lines.indexOf(line)][at]);
      const of = (faint) => this.lines.find((line) => line.curve === curve && line.faint === faint);
      const plain = of(Boolean(curve.smooth)), soft = curve.smooth ? of(false) : null;
      const raw = plain ? number(value(curve.y, plain)) : "";
      const smoothed = soft && (this.curves.length === 1 || !raw) ? `${raw ? " · smoothed " : "smoothed "}${number(value(curve.smooth, soft))}` : "";
      words.push(h("span", { class: curve === near ? "near" : null }, this.curves.length > 1 || many ? [swatch(curve.look), curve.label, " "] : null, h("b", {}, raw), smoothed));
    }
    const place = last ? (this.curves.length === 1 ? `at ${number(this.curves[0].x.at(-1))}` : "last") : `at ${number(this.data[0][at])}`;
    if (many && !words.length) words.push(h("span", {}, `${this.curves.length} curves: point at one to read it`));
    this.said.replaceChildren(h("span", { class: "soft" }, place), ...words, this.note ? h("span", { class: "soft" }, this.note) : "");
  }

  fit() {
    const width = Math.max(200, this.place.clientWidth);
    if (this.plot && Math.abs(this.plot.width - width) > 1) this.plot.setSize({ width, height: HEIGHT });
  }
}

// Pixels that the longest of these words needs beside the axis.
function beside(_, words) {
  return 18 + 8 * Math.max(4, ...(words ?? []).map((word) => word.length));
}

// uPlot takes one list of places for all curves: between its own points a curve has the values of its straight lines.
function joined(lines) {
  if (!lines.length) return [[]];
  if (lines.every((line) => line.curve === lines[0].curve)) return [lines[0].curve.x, ...lines.map((line) => line.values)];
  let places = [...new Set(lines.flatMap((line) => line.curve.x))].sort((a, b) => a - b);
  const each = Math.ceil(places.length / PLACES);
  if (each > 1) places = places.filter((_, at) => at % each === 0 || at === places.length - 1);
  return [places, ...lines.map((line) => straight(line.curve.x, line.values, places))];
}

function straight(x, y, places) {
  let at = 0;
  return places.map((place) => {
    if (place < x[0] || place > x.at(-1)) return null;
    while (at < x.length - 1 && x[at + 1] <= place) at += 1;
    if (x[at] === place || at === x.length - 1) return y[at];
    return y[at] + ((y[at + 1] - y[at]) * (place - x[at])) / (x[at + 1] - x[at]);
  });
}

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

function described(title, curves) {
  const parts = curves.slice(0, NAMED).map((curve) =>
    `${curve.label} from ${number(curve.y[0])} to ${number(curve.y.at(-1))}, least ${number(least(curve.y))}, largest ${number(most(curve.y))}`);
  const more = curves.length > NAMED ? `; and ${curves.length - NAMED} more curves` : "";
  return parts.length ? `${title}: ${parts.join("; ")}${more}` : `${title}: no number yet`;
}

function points(curves) {
  const few = Math.max(2, Math.ceil(12 / Math.max(1, curves.length / 4)));
  const details = h("details", {}, h("summary", {}, "As a table"));
  // Most are never opened.
  details.addEventListener("toggle", () => {
    if (!details.open || details.children.length > 1) return;
    const rows = curves.flatMap((curve) => {
      const each = Math.max(1, Math.ceil(curve.y.length / few));
      return curve.x.map((x, at) => [curve.label, number(x), number(curve.y[at])]).filter((_, at) => at % each === 0 || at === curve.y.length - 1);
    });
    details.append(table("Some of its points", ["curve", "at", "value"], rows));
  });
  return details;
}
