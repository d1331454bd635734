// The page: which jobs are looked at, and what is asked for anew.

import { Chart } from "./charts.js";
import { clock, h, labels, number, short, swap } from "./dom.js";
import { spansTable, timeline } from "./timeline.js";
import * as view from "./views.js";

const LOOK = 2000;
const MANY = 200; // runs over one another, as the server has it
const list = document.getElementById("list");
const main = document.getElementById("main");
const state = document.getElementById("state");
const find = document.getElementById("find");
const picked = document.getElementById("picked");
let token = keptToken(); // of this address with its port, in all tabs
let jobs = null;
let comparisons = [];
let shown = null; // {key, draw(), …} of what main holds
let chosen = new Set(); // "place/id" of runs to be drawn over one another
const drawn = { smoothing: 0.6, axis: "step", log: false, ...kept() };

function kept() {
  try {
    return JSON.parse(localStorage.getItem("psjob-drawn")) ?? {};
  } catch {
    return {};
  }
}

// The token comes behind the # of the address, and goes from there: it is not to be copied with the address of a job.
function takeToken() {
  const found = location.hash.match(/^#token=([\w-]+)$/);
  if (!found) return;
  try {
    localStorage.setItem("psjob-token", found[1]);
  } catch {
    // this tab has it all the same
  }
  token = found[1];
  history.replaceState(null, "", location.pathname);
}

function keptToken() {
  try {
    return localStorage.getItem("psjob-token") ?? "";
  } catch {
    return "";
  }
}

async function ask(path) {
  let answer;
  try {
    answer = await fetch(path, { headers: { Accept: "application/json", Authorization: `Bearer ${token}` } });
  } catch {
    throw new Error("psjob ui is not there any more: start it again, and open the address that it prints");
  }
  if (answer.status === 403) throw new Error("this page's token is no longer valid: open the address that psjob ui has printed");
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.problem ?? `psjob ui answers ${answer.status}`);
  return found;
}

const address = (place, id) => `#/jobs/${place}/${encodeURIComponent(id)}`;
const together = () => `#/runs/${[...chosen].map(encodeURIComponent).join(",")}`;
const asked = (axis = drawn.axis) => `axis=${axis}&smoothing=${drawn.smoothing}`;

// The controls above charts: what they change holds for all charts, and for the next visit.
function controls({ axes = true } = {}) {
  const change = (again) => {
    try {
      localStorage.setItem("psjob-drawn", JSON.stringify(drawn));
    } catch { /* a browser that keeps nothing */ }
    if (again) look(); else shown?.redraw?.();
  };
  const told = h("output", {}, String(drawn.smoothing));
  let wait = null;
  const slider = h("input", { type: "range", id: "smoothing", min: 0, max: 0.99, step: 0.01, value: drawn.smoothing, oninput: () => {
    drawn.smoothing = Number(slider.value);
    told.textContent = slider.value;
    clearTimeout(wait);
    wait = setTimeout(() => change(true), 80);
  } });
  const axis = h("select", { id: "axis", onchange: () => { drawn.axis = axis.value; change(true); } },
    [["step", "steps"], ["time", "time"]].map(([value, word]) => h("option", { value, selected: drawn.axis === value }, word)));
  const log = h("input", { type: "checkbox", id: "log", checked: drawn.log, onchange: () => { drawn.log = log.checked; change(false); } });
  return h("div", { class: "bar", role: "group", "aria-label": "How curves are drawn" },
    h("span", {}, h("label", { for: "smoothing" }, "Smoothing"), slider, told),
    axes ? h("span", {}, h("label", { for: "axis" }, "Against"), axis) : null,
    h("span", {}, log, h("label", { for: "log" }, "Logarithmic")),
    h("span", { class: "soft small" }, "Drag across a chart to zoom, double-click for all of it."));
}

function rows() {
  const word = find.value.trim().toLowerCase();
  const parts = [];
  jobs.places.forEach((place, at) => {
    const found = place.jobs.filter((job) => !word || `${job.name} ${job.id} ${job.phase} ${job.mode}`.toLowerCase().includes(word));
    parts.push(h("h2", {}, `${place.title}: ${place.jobs.length} ${place.jobs.length === 1 ? "job" : "jobs"}`));
    if (place.problem) parts.push(h("p", { class: "bad" }, place.problem));
    else if (!place.jobs.length) parts.push(h("p", { class: "soft" }, "No job yet: psjob run job.yaml starts one."));
    parts.push(h("ul", {}, found.map((job) => item(at, job))));
  });
  if (comparisons.length) {
    parts.push(h("h2", {}, "Comparisons"));
    parts.push(h("ul", {}, comparisons.map((one) => h("li", {}, link(`#/comparisons/${encodeURIComponent(one.name)}`, one.name, "", null, clock(one.time))))));
  }
  const focused = document.activeElement?.closest?.("#list") ? document.activeElement.id : "";
  swap(list, ...parts);
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  for (const box of list.querySelectorAll("input")) box.checked = chosen.has(box.value);
  rowsPicked();
}

function item(at, job) {
  const key = `${at}/${job.id}`;
  const told = [`${job.unit} ${number(job.step)}${job.total && job.total !== job.step ? ` of ${number(job.total)}` : ""}`, job.mode, job.loss === null || job.loss === undefined ? "" : `loss ${number(job.loss)}`,
    ({Diverged: "diverged", WorkersDiffer: "workers differ"})[job.reason] || "", job.warnings ? `${job.warnings} warning${job.warnings > 1 ? "s" : ""}` : ""];
  return h("li", { class: "run" },
    h("input", { type: "checkbox", id: `pick-${key}`, value: key, "aria-label": `Draw ${job.id} over others`, onchange: (event) => pick(key, event.target.checked) }),
    link(address(at, job.id), job.name, short(job), view.badge(job.phase), h("span", {}, clock(job.created)), told.filter(Boolean).join(" · ")));
}

function link(href, name, more, mark, ...small) {
  return h("a", { id: `to-${href}`, href, "aria-current": decodeURI(location.hash) === decodeURI(href) ? "page" : null },
    h("span", { class: "name" }, name), " ", more ? h("span", { class: "more" }, more) : null, " ", mark, small.map((one) => h("div", { class: "small" }, one)));
}

function pick(key, on) {
  if (on) chosen.add(key); else chosen.delete(key);
  if (shown instanceof RunsPage) location.hash = chosen.size ? together() : "";
  rowsPicked();
}

function rowsPicked() {
  const all = [...list.querySelectorAll("input")].map((box) => box.value).slice(0, MANY);
  const choose = (keys) => { chosen = new Set(keys); for (const box of list.querySelectorAll("input")) box.checked = chosen.has(box.value); pick("", false); };
  swap(picked, chosen.size ? h("a", { class: "button", href: together() }, `Draw ${chosen.size} over one another`) : h("span", { class: "soft small" }, "Tick runs to draw them over one another."), " ",
    all.length > 1 && all.some((key) => !chosen.has(key)) ? h("button", { id: "all", type: "button" }, find.value ? "Tick all found" : "Tick all") : "", " ",
    chosen.size ? h("button", { id: "none", type: "button" }, "None") : "");
  const all_ = document.getElementById("all"), none = document.getElementById("none");
  if (all_) all_.onclick = () => choose(all);
  if (none) none.onclick = () => choose([]);
}

async function refreshList() {
  [jobs, { comparisons }] = await Promise.all([ask("api/jobs"), ask("api/comparisons")]);
  if (!location.hash) {
    const newest = jobs.places.flatMap((place, at) => place.jobs.map((job) => ({ at, job }))).sort((a, b) => (b.job.created ?? 0) - (a.job.created ?? 0))[0];
    if (newest) history.replaceState(null, "", address(newest.at, newest.job.id));
  }
  rows();
}

// A grid of charts, one a title, that come as soon as there are numbers.
class Charts {
  constructor() {
    this.all = new Map();
    this.grid = h("div", { class: "charts" });
  }

  draw(found) {
    for (const { key, title, axis, curves } of found) {
      if (!this.all.has(key)) {
        this.all.set(key, new Chart(title, axis));
        this.grid.append(this.all.get(key).section);
      }
      this.all.get(key).draw(curves, { axis, log: drawn.log });
    }
    for (const [key, chart] of this.all) chart.section.hidden = !found.some((one) => one.key === key);
  }
}

const titled = (name, unit) => (name === "rate" ? `${unit}s a second` : name.replaceAll("_", " "));
const axisWord = (unit) => (drawn.axis === "time" ? "seconds since the first report" : unit);

class JobPage {
  constructor(place, id) {
    this.path = `api/jobs/${place}/${encodeURIComponent(id)}`;
    this.id = id;
    this.charts = new Charts();
    this.process = "";
    this.parts = Object.fromEntries(["head", "said", "facts", "step", "none", "settings", "timeline", "spans", "stages", "workers", "shards", "events"].map((name) => [name, h("div")]));
    this.select = h("select", { id: "process", onchange: () => { this.process = this.select.value; this.log(); } });
    this.text = h("pre", { class: "log", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "What the processes print" });
    this.more = h("p", { class: "soft" });
    this.manifest = h("pre", { class: "manifest", tabindex: "0", "aria-label": "Manifest" });
    const { head, said, facts, step, none, settings, timeline: line, spans, stages, workers, shards, events } = this.parts;
    main.replaceChildren(head, said, facts, step,
      h("div", { class: "beside" }, h("div", {}, controls(), none, this.charts.grid),
        h("aside", { "aria-label": "Hyperparameters and manifest" }, h("section", {}, h("h3", {}, "Hyperparameters"), settings, h("details", {}, h("summary", {}, "Manifest"), this.manifest)))),
      h("section", {}, h("h3", {}, "Time line"), line, h("details", {}, h("summary", {}, "As a table"), spans)),
      stages, h("section", {}, h("h3", {}, "Workers"), workers), h("section", {}, h("h3", {}, "Shards"), shards), h("section", {}, h("h3", {}, "Events"), events),
      h("section", {}, h("h3", {}, "Logs"), h("div", { class: "bar" }, h("label", { for: "process" }, "Process"), this.select), this.text, this.more));
  }

  async look() {
    // The curves of a run that is over stay as they are.
    const query = asked();
    const same = this.over && this.query === query;
    const [found, curves] = await Promise.all([ask(this.path), same ? this.found[0] : ask(`${this.path}/curves?${query}`)]);
    if (shown !== this) return;
    this.query = query;
    this.draw(found, curves);
    await this.log();
    this.over = !found.job.active;
  }

  draw(found, curves) {
    const { job } = found;
    const { head, said, facts, settings, timeline: line, spans, stages, workers, shards, events } = this.parts;
    swap(head, h("div", { class: "head" }, h("h2", {}, job.name), short(job) ? h("span", { class: "more" }, short(job)) : "", view.badge(job.phase), job.reason && job.reason !== job.phase ? h("span", { class: "soft" }, job.reason) : ""),
      h("p", { class: "soft" }, `${clock(job.created)} · ${job.id} · ${job.place} · ${job.fresh ? "live" : job.limited || "as it was left"}`));
    swap(said, ...view.said(job));
    swap(facts, view.facts(found));
    swap(this.parts.step, view.step(job) ?? "");
    swap(settings, view.hyperparameters(found.settings));
    this.found = [curves, job];
    this.redraw();
    swap(line, timeline(found));
    swap(spans, spansTable(found));
    const table = view.stages(job);
    swap(stages, table ? h("section", {}, h("h3", {}, "Stages"), table) : "");
    swap(workers, view.workers(job));
    swap(shards, view.shards(job));
    swap(events, view.events(found));
    this.manifest.textContent = found.manifest || "It was not kept.";
    const names = ["", ...[...(job.workers ?? []), ...(job.shards ?? [])].map((one) => one.name).filter(Boolean)];
    if (names.join() !== this.names) {
      this.names = names.join();
      this.select.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === this.process }, name || "all processes")));
    }
    document.title = `${job.phase}: ${job.name} ${short(job)} – psjob`;
  }

  redraw() {
    const [{ series }, { unit = "step" }] = this.found;
    const parts = view.partCurves(series);
    this.charts.draw([
      ...series.filter((one) => !one.name.startsWith(view.PART)).map((one) => ({ key: one.name, title: titled(one.name, unit), axis: axisWord(unit), curves: [{ ...one, label: titled(one.name, unit), look: 0 }] })),
      ...(parts.length ? [{ key: view.PART, title: `seconds of a ${unit}`, axis: axisWord(unit), curves: parts }] : []),
    ]);
    swap(this.parts.none, series.length ? "" : h("p", { class: "soft" }, "No number yet: a script reports with ps.report(loss=…)."));
  }

  async log() {
    const found = await ask(`${this.path}/log?process=${encodeURIComponent(this.process)}`);
    const text = found.lines.map((line) => (this.process ? line.text : `${line.process} | ${line.text}`)).join("\n");
    if (this.text.textContent === text) return;
    const bottom = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 30;
    this.text.textContent = text || "Nothing is printed yet.";
    if (bottom) this.text.scrollTop = this.text.scrollHeight;
    this.more.textContent = found.lines.length >= found.most ? `The last ${found.most} lines: psjob logs ${this.id} prints all.` : "";
  }
}

class RunsPage {
  constructor() {
    this.charts = new Charts();
    this.hidden = new Set();
    this.head = h("div");
    this.table = h("div");
    main.replaceChildren(this.head, controls(), this.charts.grid, h("section", {}, h("h3", {}, "Runs"), this.table));
  }

  async look() {
    if (!chosen.size) { main.replaceChildren(h("p", { class: "soft" }, "Choose runs in the list.")); return; }
    const { runs } = await ask(`api/runs?${[...chosen].map((key) => `run=${encodeURIComponent(key)}`).join("&")}&${asked()}`);
    if (shown !== this) return;
    this.runs = runs;
    this.labels = labels(runs);
    this.redraw();
    this.over = runs.every((run) => run.over);
    document.title = `${runs.length} runs – psjob`;
  }

  redraw() {
    const { runs } = this;
    swap(this.head, h("div", { class: "head" }, h("h2", {}, runs.length === 1 ? "One run" : `${runs.length} runs over one another`)));
    const names = [...new Set(runs.flatMap((run) => run.series.map((one) => one.name)))].filter((name) => !name.startsWith(view.PART));
    const units = new Set(runs.map((run) => run.unit).filter(Boolean));
    const unit = units.size === 1 ? [...units][0] : "step";
    this.charts.draw(names.map((name) => ({ key: name, title: titled(name, unit), axis: axisWord(unit), curves: runs.flatMap((run, at) => {
      const one = this.hidden.has(`${run.place}/${run.id}`) ? null : run.series.find((found) => found.name === name);
      return one ? [{ ...one, label: this.labels[at], look: at }] : [];
    }) })));
    swap(this.table, view.runs(runs, this.labels, this.hidden, (key, off) => { if (off) this.hidden.add(key); else this.hidden.delete(key); this.redraw(); }));
  }
}

class ComparisonPage {
  constructor(name) {
    this.name = name;
    this.charts = new Charts();
  }

  async look() {
    if (this.over && this.smoothed === drawn.smoothing) return;
    this.smoothed = drawn.smoothing;
    this.found = await ask(`api/comparisons/${encodeURIComponent(this.name)}?${asked()}`);
    if (shown !== this) return;
    if (!this.over) main.replaceChildren(...view.comparison(this.found).filter(Boolean), controls({ axes: false }), this.charts.grid, view.made(this.found));
    this.over = true;
    this.redraw();
    document.title = `${this.found.name} – psjob`;
  }

  redraw() {
    this.charts.draw(this.found.charts.map((one) => {
      const title = `${one.name.replaceAll("_", " ")} against ${one.axis === "time" ? "time" : "steps"}`;
      return { key: title, title, axis: one.label, curves: one.sides.map((side, at) => ({ ...side, label: side.title, look: at })) };
    }));
  }
}

function chosenPage() {
  const [, kind, first, ...rest] = location.hash.split("/");
  if (kind === "jobs" && rest.length) return new JobPage(first, decodeURIComponent(rest.join("/")));
  if (kind === "runs" && first) {
    chosen = new Set([first, ...rest].join("/").split(",").map(decodeURIComponent));
    return new RunsPage();
  }
  return kind === "comparisons" && first ? new ComparisonPage(decodeURIComponent(first)) : null;
}

async function open() {
  shown = chosenPage();
  if (!shown) main.replaceChildren(h("p", { class: "soft" }, "Choose a job."));
  if (jobs) rows();
  await look();
}

// One look of a page at a time; what is wanted meanwhile is looked at after it.
async function look(wanted = true) {
  const page = shown;
  if (page?.busy) {
    page.again ||= wanted;
    return;
  }
  if (page) page.busy = true;
  try {
    await page?.look();
    if (page === shown) tell("");
    state.textContent = page?.over ? "" : "Looks again every 2 seconds.";
  } catch (error) {
    if (page === shown) tell(error.message);
  }
  if (!page) return;
  page.busy = false;
  if (page.again && page === shown) {
    page.again = false;
    await look();
  }
}

// The same sentence is not put there anew: a screen reader would say it every two seconds.
function tell(words) {
  const before = main.querySelector(":scope > .problem");
  if (before?.textContent === words) return;
  before?.remove();
  if (!words) return;
  state.textContent = "";
  main.prepend(h("div", { class: "said bad problem", role: "alert" }, h("p", {}, words)));
}

async function turn() {
  try {
    await refreshList();
    if (!shown && chosenPage()) await open();
    else if (shown) await look(false);
  } catch (error) {
    tell(error.message);
  }
  setTimeout(turn, document.hidden ? 5 * LOOK : LOOK);
}

find.addEventListener("input", () => jobs && rows());
takeToken();
if (location.hash) open();
addEventListener("hashchange", () => { takeToken(); open(); main.focus({ preventScroll: true }); });
turn();
