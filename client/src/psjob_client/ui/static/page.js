// The page: which job is looked at, and what is asked for anew.

import { Chart } from "./charts.js";
import * as view from "./views.js";

const { h } = view;
const LOOK = 2000;
const list = document.getElementById("list");
const main = document.getElementById("main");
const state = document.getElementById("state");
const find = document.getElementById("find");
let jobs = null;
let comparisons = [];
let shown = null; // {key, draw(), …} of what main holds

async function ask(path) {
  let answer;
  try {
    answer = await fetch(path, { headers: { Accept: "application/json" } });
  } catch {
    throw new Error("psjob ui is not there any more: start it again, and open the address that it prints");
  }
  if (answer.status === 403) throw new Error("this page's token is no longer valid: open the address that psjob ui has printed");
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.problem ?? `psjob ui answers ${answer.status}`);
  return found;
}

const address = (place, id) => `#/jobs/${place}/${encodeURIComponent(id)}`;

function rows() {
  const word = find.value.trim().toLowerCase();
  const parts = [];
  jobs.places.forEach((place, at) => {
    const kept = place.jobs.filter((job) => !word || `${job.name} ${job.id} ${job.phase} ${job.mode}`.toLowerCase().includes(word));
    parts.push(h("h2", {}, `${place.title}: ${place.jobs.length} ${place.jobs.length === 1 ? "job" : "jobs"}`));
    if (place.problem) parts.push(h("p", { class: "bad" }, place.problem));
    else if (!place.jobs.length) parts.push(h("p", { class: "soft" }, "No job yet: psjob run job.yaml starts one."));
    parts.push(h("ul", {}, kept.map((job) => h("li", {}, link(address(at, job.id), job.name, view.badge(job.phase),
      `${job.id} · ${job.mode} · step ${job.step}${job.total ? ` of ${job.total}` : ""}${job.reason === "Diverged" ? " · diverged" : ""}${job.warnings ? ` · ${job.warnings} warning${job.warnings > 1 ? "s" : ""}` : ""}`)))));
  });
  if (comparisons.length) {
    parts.push(h("h2", {}, "Comparisons"));
    parts.push(h("ul", {}, comparisons.map((one) => h("li", {}, link(`#/comparisons/${encodeURIComponent(one.name)}`, one.name, null, view.clock(one.time))))));
  }
  const focused = document.activeElement?.getAttribute?.("href");
  list.replaceChildren(...parts);
  if (focused) [...list.querySelectorAll("a")].find((one) => one.getAttribute("href") === focused)?.focus({ preventScroll: true });
}

function link(href, name, mark, small) {
  return h("a", { href, "aria-current": decodeURI(location.hash) === decodeURI(href) ? "page" : null },
    h("span", { class: "name" }, name), " ", mark, h("div", { class: "small" }, small));
}

async function refreshList() {
  [jobs, { comparisons }] = await Promise.all([ask("api/jobs"), ask("api/comparisons")]);
  if (!location.hash) {
    const newest = jobs.places.flatMap((place, at) => place.jobs.map((job) => ({ at, job }))).sort((a, b) => (b.job.created ?? 0) - (a.job.created ?? 0))[0];
    if (newest) history.replaceState(null, "", address(newest.at, newest.job.id));
  }
  rows();
}

class JobPage {
  constructor(place, id) {
    this.path = `api/jobs/${place}/${encodeURIComponent(id)}`;
    this.id = id;
    this.charts = new Map();
    this.process = "";
    this.following = true;
    this.parts = Object.fromEntries(["head", "said", "facts", "timeline", "spans", "stages", "workers", "shards", "events"].map((name) => [name, h("div")]));
    this.grid = h("div", { class: "charts" });
    this.select = h("select", { id: "process", onchange: () => { this.process = this.select.value; this.log(); } });
    this.text = h("pre", { class: "log", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "What the processes print" });
    this.more = h("p", { class: "soft" });
    this.manifest = h("pre", { class: "manifest", tabindex: "0", "aria-label": "Manifest" });
    const { head, said, facts, timeline, spans, stages, workers, shards, events } = this.parts;
    main.replaceChildren(head, said, facts, this.grid,
      h("section", {}, h("h3", {}, "Time line"), timeline, h("details", {}, h("summary", {}, "As a table"), spans)),
      stages, h("section", {}, h("h3", {}, "Workers"), workers), h("section", {}, h("h3", {}, "Shards"), shards), h("section", {}, h("h3", {}, "Events"), events),
      h("section", {}, h("h3", {}, "Logs"), h("div", { class: "bar" }, h("label", { for: "process" }, "Process"), this.select), this.text, this.more),
      h("section", {}, h("details", {}, h("summary", {}, "Manifest"), this.manifest)));
  }

  async look() {
    const [found, curves] = await Promise.all([ask(this.path), ask(`${this.path}/curves`)]);
    if (shown !== this) return;
    this.draw(found, curves);
    await this.log();
    this.over = !found.job.active;
  }

  draw(found, curves) {
    const { job } = found;
    const { head, said, facts, timeline, spans, stages, workers, shards, events } = this.parts;
    head.replaceChildren(h("div", { class: "head" }, h("h2", {}, job.name), view.badge(job.phase), job.reason ? h("span", { class: "soft" }, job.reason) : null),
      h("p", { class: "soft" }, `${job.id} · ${job.place} · ${job.fresh ? "live" : job.limited || "as it was left"}`));
    said.replaceChildren(...view.said(job));
    facts.replaceChildren(view.facts(found));
    this.curves(curves, job.unit ?? "step");
    timeline.replaceChildren(view.timeline(found));
    spans.replaceChildren(view.spansTable(found));
    const table = view.stages(job);
    stages.replaceChildren(...(table ? [h("section", {}, h("h3", {}, "Stages"), table)] : []));
    workers.replaceChildren(view.workers(job));
    shards.replaceChildren(view.shards(job));
    events.replaceChildren(view.events(found));
    this.manifest.textContent = job.manifest ? JSON.stringify(job.manifest, null, 2) : "It was not kept.";
    const names = ["", ...[...(job.workers ?? []), ...(job.shards ?? [])].map((one) => one.name).filter(Boolean)];
    if (names.join() !== this.names) {
      this.names = names.join();
      this.select.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === this.process }, name || "all processes")));
    }
    document.title = `${job.phase}: ${job.name} – psjob`;
  }

  curves(found, unit) {
    for (const one of found.series) {
      const title = one.name === "rate" ? `${unit}s a second` : one.name;
      if (!this.charts.has(one.name)) {
        const place = h("div", { class: "plot" });
        const table = h("div");
        this.grid.append(h("section", {}, h("h3", {}, title), place, table));
        this.charts.set(one.name, { chart: new Chart(place, title, unit), table });
      }
      const { chart, table } = this.charts.get(one.name);
      // A restart goes back some steps: a later value of the same step takes the place of the one before.
      const last = new Map(one.steps.map((step, at) => [step, one.values[at]]));
      const x = [...last.keys()].sort((a, b) => a - b);
      const curve = [{ label: title, x, y: x.map((step) => last.get(step)) }];
      chart.draw(curve);
      if (!table.querySelector("details[open]")) table.replaceChildren(view.points(curve));
    }
    if (!found.series.length) this.grid.replaceChildren(h("p", { class: "soft" }, "No number yet: a script reports with ps.report(loss=…)."));
    else this.grid.querySelector(":scope > p")?.remove();
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

class ComparisonPage {
  constructor(name) {
    this.name = name;
  }

  async look() {
    if (this.over) return;
    const found = await ask(`api/comparisons/${encodeURIComponent(this.name)}`);
    if (shown !== this) return;
    const grid = h("div", { class: "charts" });
    main.replaceChildren(...view.comparison(found), grid, h("section", {}, h("h3", {}, "Commands"), ...found.sides.map((side) => h("p", {}, h("code", {}, side.command)))));
    for (const metric of found.curves) {
      for (const [axis, key] of [["step of a worker", "steps"], [`time (${found.unit})`, "times"]]) {
        const place = h("div", { class: "plot" });
        const section = h("section", {}, h("h3", {}, `${metric.name} by ${axis}`), place);
        grid.append(section);
        const curves = metric.sides.filter((side) => side.values.length).map((side) => ({ label: side.title, x: side[key], y: side.values }));
        new Chart(place, `${metric.name} by ${axis}`, axis).draw(curves);
        section.append(view.points(curves));
      }
    }
    document.title = `${found.name} – psjob`;
    this.over = true;
  }
}

function chosen() {
  const [, kind, first, ...rest] = location.hash.split("/");
  if (kind === "jobs" && rest.length) return new JobPage(first, decodeURIComponent(rest.join("/")));
  return kind === "comparisons" && first ? new ComparisonPage(decodeURIComponent(first)) : null;
}

async function open() {
  shown = chosen();
  if (!shown) main.replaceChildren(h("p", { class: "soft" }, "Choose a job."));
  if (jobs) rows();
  await look();
}

async function look() {
  const page = shown;
  try {
    await page?.look();
    tell("");
    state.textContent = page?.over ? "" : "Looks again every 2 seconds.";
  } catch (error) {
    if (page === shown) tell(error.message);
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
    if (!shown && chosen()) await open();
    else if (shown) await look();
  } catch (error) {
    tell(error.message);
  }
  setTimeout(turn, document.hidden ? 5 * LOOK : LOOK);
}

find.addEventListener("input", () => jobs && rows());
addEventListener("hashchange", () => { open(); main.focus({ preventScroll: true }); });
turn();
