// What is shown of a job and of a comparison, as elements. Text is always set as text, never as HTML.

import { number } from "./charts.js";

const TONES = {
  Complete: "good", Running: "good", Pending: "calm", Recovering: "warn", Suspended: "calm", Failed: "bad",
  Serving: "good", Succeeded: "good", Finished: "good", Starting: "warn", Waiting: "warn", Lost: "bad", Ended: "calm", Stopped: "calm",
  learned: "good", diverged: "bad", "not learned": "bad",
};
const FILLS = { good: "s-good", warn: "s-start", bad: "s-bad", calm: "s-calm" };
const LANES = 40;
const SVG = "http://www.w3.org/2000/svg";

export function h(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((one) => one !== null && one !== undefined && one !== ""));
  return made;
}

export function badge(word) {
  return h("span", { class: `phase ${TONES[word] ?? "calm"}` }, word);
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return `${count >= 100 || at === 0 ? Math.round(count) : count.toFixed(1)} ${units[at]}`;
}

export function seconds(count) {
  if (count === null || count === undefined) return "–";
  if (count < 1) return "0 s";
  if (count < 90) return `${Math.round(count)} s`;
  if (count < 5400) return `${Math.round(count / 60)} min`;
  return count < 172800 ? `${(count / 3600).toFixed(1)} h` : `${Math.round(count / 86400)} days`;
}

export function clock(at) {
  return at ? new Date(at * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" }) : "–";
}

export function table(caption, head, rows, texts = []) {
  const kind = (at) => (texts.includes(at) ? "text" : null);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, head.map((word, at) => h("th", { scope: "col", class: kind(at) }, word)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, at) => h("td", { class: kind(at) }, cell instanceof Node ? cell : String(cell ?? "–"))))))));
}

export function facts(found) {
  const job = found.job;
  const told = job.progress ?? {};
  const unit = job.unit === "round" ? "Round" : "Step";
  const kept = found.checkpoints[0];
  const all = [
    [unit, number(told.step ?? 0), told.total ? `of ${number(told.total)}` : ""],
    ["Loss", job.warnings?.some((word) => /NaN|inf|diverge/i.test(word)) && told.loss === undefined ? "no number" : number(told.loss), ""],
    [`${unit}s/s`, number(told.rate), ""],
    ["Time left", job.active ? seconds(told.eta) : "–", ""],
    ["Running for", seconds(job.seconds), job.active ? "" : "ended"],
    ["Mode", job.mode ?? "sync", [job.transport, job.codecs].filter(Boolean).join(", ")],
    ["Shards", job.shardsReady || String(job.shards?.length ?? 0), ""],
    ["Workers", job.workersReady || String(job.workers?.length ?? 0), ""],
    ["Restarts", number(job.restarts ?? 0), Object.entries(job.causes ?? {}).map(([why, count]) => `${why} ${count}`).join(", ")],
    ["Checkpoint", kept ? `step ${number(kept.step)}` : "none", kept ? `${seconds(kept.age)} old${kept.bytes ? `, ${bytes(kept.bytes)}` : ""}` : ""],
  ];
  return h("dl", { class: "facts" }, all.map(([name, value, note]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, note ? h("small", {}, note) : null))));
}

export function said(job) {
  const found = [];
  if (job.message && ["Failed", "Recovering", "Pending", "Suspended"].includes(job.phase)) found.push([job.phase === "Failed" ? "bad" : "warn", job.message]);
  for (const words of job.problems ?? []) found.push(["bad", words]);
  for (const words of job.warnings ?? []) found.push(["warn", words]);
  if (job.progress?.waiting && job.active) found.push(["warn", `waits: ${job.progress.waiting}`]);
  return found.map(([tone, words]) => h("div", { class: `said ${tone}` }, h("p", {}, words)));
}

export function workers(job) {
  const rows = (job.workers ?? []).map((one) => [
    `worker ${one.index}`, badge(one.state ?? "Pending"), number(one.clock), number(one.behind),
    one.idle === undefined || one.idle === null ? "–" : `${(100 * one.idle).toFixed(0)} %`, number(one.restarts ?? 0), number(one.rewinds ?? 0),
    number(one.passesAgain ?? 0), one.node ?? "", one.problem ?? "",
  ]);
  return rows.length ? table("Workers: steps made, steps behind the first, and the part of their time in which they wait",
    ["worker", "state", "steps", "behind", "waits", "restarts", "rewinds", "passes again", "node", "problem"], rows, [9]) : h("p", { class: "soft" }, "No worker is known yet.");
}

export function stages(job) {
  const rows = (job.stages ?? []).map((one) => [
    one.name, one.workersReady || "–", number(one.step), number(one.delay),
    one.idle === undefined || one.idle === null ? "–" : `${(100 * one.idle).toFixed(0)} %`,
    bytes(one.memoryBytes), bytes(one.peakMemoryBytes), bytes(one.peakDeviceBytes), one.waiting ?? "",
  ]);
  return rows.length ? table("Stages: workers that are there, delay in updates, part of the last steps in which workers wait, and memory of the worker that holds most",
    ["stage", "workers", "step", "delay", "idle", "memory", "peak", "device peak", "waits for"], rows, [0, 8]) : null;
}

export function shards(job) {
  const late = (one) => (one ? `${number(one.mean ?? 0)} / ${number(one.max ?? 0)}` : "–");
  const rows = (job.shards ?? []).map((one) => [
    `shard ${one.index}`, badge(one.state ?? "Pending"), number(one.attempt ?? 0), number(one.applied), number(one.dropped), number(one.updatesLost), number(one.crashes),
    late(one.lag), late(one.gap), bytes(one.memoryBytes),
    one.transfer ? `${one.transfer.doing} ${bytes(one.transfer.done ?? 0)} of ${bytes(one.transfer.total ?? 0)}` : "–", one.problem ?? "",
  ]);
  return rows.length ? table("Shards: pushes, how late they were (mean / largest), memory, and the checkpoint that is read or written",
    ["shard", "state", "attempt", "pushes", "dropped", "updates lost", "crashes", "lag", "gap", "memory", "checkpoint", "problem"], rows, [11])
    : h("p", { class: "soft" }, "No shard is known yet.");
}

export function events(found) {
  const rows = [...found.events].reverse().map((one) => [
    clock(one.time), h("span", { class: one.type === "Warning" ? "bad" : "calm" }, one.reason || "–"), (one.message ?? "") + (one.count > 1 ? ` (${one.count} times)` : ""),
  ]);
  if (!rows.length) return h("p", { class: "soft" }, "Nothing is told of this job.");
  return h("div", {}, table("What happened, the newest first", ["time", "what", "in words"], rows, [2]),
    found.moreEvents ? h("p", { class: "soft" }, `${found.moreEvents} older ones: psjob events ${found.job.id}`) : null);
}

export function timeline(found) {
  const spans = found.timeline ?? [];
  if (!spans.length) return h("p", { class: "soft" }, "No time line is known of this job.");
  const begin = Math.min(...spans.map((span) => span.begin));
  const end = Math.max(begin + 1, ...spans.map((span) => span.end ?? found.until));
  const lanes = new Map();
  for (const span of spans) lanes.set(span.lane, [...(lanes.get(span.lane) ?? []), span]);
  // Lanes in which something went wrong come before those that just ran, where there are too many.
  const names = [...lanes.keys()];
  const shown = names.length <= LANES ? names
    : names.filter((name) => name === "job" || lanes.get(name).some((span) => span.number > 1 || span.state === "Failed")).concat(names).filter((name, at, all) => all.indexOf(name) === at).slice(0, LANES);
  const cells = shown.flatMap((name) => [h("div", {}, name), lane(lanes.get(name), begin, end, found.until, name)]);
  const states = [...new Set(spans.map((span) => span.state))];
  return h("div", {}, h("div", { class: "lanes", role: "img", "aria-label": `Time line of ${seconds(end - begin)}; the table below has each stretch` }, cells),
    h("div", { class: "keys" }, states.map((state) => h("span", {}, key(state), state)), h("span", {}, `${clock(begin)} to ${clock(end)}`)),
    names.length > shown.length ? h("p", { class: "soft" }, `${names.length - shown.length} more processes are not drawn.`) : null);
}

export function spansTable(found) {
  const rows = (found.timeline ?? []).slice(-300).map((span) => [
    span.lane, span.state, span.number || "–", clock(span.begin), seconds((span.end ?? found.until) - span.begin), span.note ?? "",
  ]);
  return table("Stretches of the time line", ["of", "state", "start", "began", "took", "process, and how it ended"], rows, [5]);
}

function lane(spans, begin, end, until, name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 1000 16");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.dataset.lane = name;
  for (const span of spans) {
    const from = (1000 * (span.begin - begin)) / (end - begin);
    const to = (1000 * ((span.end ?? until) - begin)) / (end - begin);
    svg.append(stretch(from, Math.max(2.5, to - from - 1), 16, span.state, `${name}${span.number ? `, start ${span.number}` : ""}: ${span.state}, ${seconds((span.end ?? until) - span.begin)} ${span.note ?? ""}`));
  }
  return svg;
}

function key(state) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 10 10");
  svg.setAttribute("aria-hidden", "true");
  svg.append(stretch(0, 10, 10, state, state));
  return svg;
}

function stretch(x, width, height, state, words) {
  const box = document.createElementNS(SVG, "rect");
  for (const [name, value] of Object.entries({ x, y: 0, width, height, class: state === "Running" ? "s-run" : FILLS[TONES[state]] ?? "s-calm" })) box.setAttribute(name, value);
  const title = document.createElementNS(SVG, "title");
  title.textContent = words;
  box.append(title);
  return box;
}

export function points(curves) {
  const rows = curves.flatMap((curve) => {
    const each = Math.max(1, Math.ceil(curve.y.length / 12));
    return curve.x.map((x, at) => [curve.label, number(x), number(curve.y[at])]).filter((_, at) => at % each === 0 || at === curve.y.length - 1);
  });
  return h("details", {}, h("summary", {}, "As a table"), table("Some of its points", ["curve", "at", "value"], rows));
}

export function comparison(found) {
  const rows = found.rows.map((row) => row.map((cell, at) => (at === 1 && cell !== "–" ? badge(cell) : cell)));
  const words = found.sides.flatMap((side) => [...(side.result === "Complete" ? [] : [["bad", `${side.title}: ${side.result}`]]), ...side.warnings.map((one) => ["warn", `${side.title}: ${one}`])]);
  return [
    h("div", { class: "head" }, h("h2", {}, `Comparison: ${found.name}`)),
    h("p", { class: "soft" }, Object.entries(found.about).map(([name, value]) => `${name}: ${value}`).join(" · ")),
    ...words.map(([tone, text]) => h("div", { class: `said ${tone}` }, h("p", {}, text))),
    h("section", {}, h("h3", {}, "Result"), table("One line a side", found.head, rows),
      h("details", {}, h("summary", {}, "What the columns mean"), h("dl", {}, found.explained.map((one) => [h("dt", {}, one.name), h("dd", {}, one.words)])))),
  ];
}
