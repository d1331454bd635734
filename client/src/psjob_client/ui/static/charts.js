// Curves by uPlot: coloured by the page's own colours, with words for those who do not see them.

const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5"];
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

// A number beside an axis, where each is short and shows no more digits than it has.
function tick(value) {
  return number(value).replace(/\.?0+e/, "e").replace("e+", "e");
}

// A chart in `place` that is drawn anew with other data by `draw`. Curves: [{label, x, y}]; each may have places of its own.
export class Chart {
  constructor(place, title, axis) {
    this.place = place;
    this.title = title;
    this.axis = axis;
    this.plot = null;
    this.labels = "";
    this.data = null;
    place.setAttribute("role", "img");
    new ResizeObserver(() => this.fit()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.again());
  }

  draw(curves) {
    this.curves = curves;
    this.data = joined(curves);
    const labels = curves.map((curve) => curve.label).join("\n");
    if (this.plot && labels === this.labels) this.plot.setData(this.data);
    else this.make(labels);
    this.place.setAttribute("aria-label", described(this.title, curves));
  }

  again() {
    if (this.data) this.make(this.labels);
  }

  make(labels) {
    this.plot?.destroy();
    this.labels = labels;
    const ink = { stroke: () => colour("--soft"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { stroke: () => colour("--line") } };
    const series = this.curves.map((curve, at) => ({
      label: curve.label, stroke: colour(COLOURS[at % COLOURS.length]), width: 1.6, spanGaps: true,
      dash: DASHES[Math.floor(at / COLOURS.length) % DASHES.length], value: (_, value) => number(value), points: { show: curve.x.length < 2 },
    }));
    this.plot = new uPlot({
      width: Math.max(200, this.place.clientWidth), height: 220, cursor: { drag: { x: true, y: false } },
      legend: { show: true, live: true },
      scales: { x: { time: false } },
      axes: [{ ...ink, label: this.axis, labelSize: 18, size: 34 }, { ...ink, size: beside, values: (_, ticks) => ticks.map(tick) }],
      series: [{ label: this.axis, value: (_, value) => number(value) }, ...series],
    }, this.data, this.place);
  }

  fit() {
    const width = Math.max(200, this.place.clientWidth);
    if (this.plot && Math.abs(this.plot.width - width) > 1) this.plot.setSize({ width, height: 220 });
  }
}

// Pixels that the longest of these words needs beside the axis.
function beside(_, words) {
  return 18 + 8 * Math.max(4, ...(words ?? []).map((word) => word.length));
}

// uPlot takes one list of places for all curves.
function joined(curves) {
  if (curves.length === 1) return [curves[0].x, curves[0].y];
  const places = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const rank = new Map(places.map((x, at) => [x, at]));
  return [places, ...curves.map((curve) => {
    const values = new Array(places.length).fill(null);
    curve.x.forEach((x, at) => { values[rank.get(x)] = curve.y[at]; });
    return values;
  })];
}

function described(title, curves) {
  const parts = curves.filter((curve) => curve.y.length).map((curve) =>
    `${curve.label} from ${number(curve.y[0])} to ${number(curve.y.at(-1))}, least ${number(Math.min(...curve.y))}, largest ${number(Math.max(...curve.y))}`);
  return parts.length ? `${title}: ${parts.join("; ")}` : `${title}: no number yet`;
}
