// What is shown of a job, of several runs and of a comparison, as elements.

import { swatch } from "./charts.js";
import { bytes, clock, h, number, percent, seconds, svg, table } from "./dom.js";

const TONES = {
  Complete: "good", Running: "work", Pending: "calm", Recovering: "warn", Suspended: "calm", Failed: "bad",
  Serving: "work", Succeeded: "good", Finished: "good", Starting: "warn", Waiting: "warn", Lost: "bad", Ended: "calm", Stopped: "calm",
  learned: "good", diverged: "bad", "not learned": "bad",
};

export function badge(word) {
  return h("span", { class: `phase ${TONES[word] ?? "calm"}` }, word);
}

export function facts(found) {
  const job = found.job;
  const told = job.progress ?? {};
  const unit = job.unit === "round" ? "Round" : "Step";
  const kept = found.checkpoints[0];
  const all = [
    [unit, number(told.step ?? 0), told.total ? `of ${number(told.total)}` : ""],
    ["Loss", job.warnings?.some((word) => /NaN|inf|diverge/i.test(word)) && told.loss === undefined ? "no number" : number(told.loss), ""],
    [`${unit}s a second`, number(told.rate), ""],
    job.active ? ["Time left", seconds(told.eta), ""] : null,
    [job.active ? "Running for" : "Took", seconds(job.seconds), ""],
    ["Mode", job.mode ?? "sync", [job.transport && `by ${job.transport}`, job.codecs].filter(Boolean).join(", ")],
    ["Shards", job.shardsReady || String(job.shards?.length ?? 0), ""],
    ["Workers", job.workersReady || String(job.workers?.length ?? 0), ""],
    ["Restarts", number(job.restarts ?? 0), Object.entries(job.causes ?? {}).map(([why, count]) => `${why} ${count}`).join(", ")],
    ["Checkpoint", kept ? `${unit.toLowerCase()} ${number(kept.step)}` : "none", kept ? `${job.active ? `${seconds(kept.age)} old` : ""}${kept.bytes ? `${job.active ? ", " : ""}${bytes(kept.bytes)}` : ""}` : ""],
  ];
  return h("dl", { class: "facts" }, all.filter(Boolean).map(([name, value, note]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, note ? h("small", {}, note) : null))));
}

export function said(job) {
  const found = [];
  if (job.message && ["Failed", "Recovering", "Pending", "Suspended"].includes(job.phase)) found.push([job.phase === "Failed" ? "bad" : "warn", job.message]);
  for (const words of job.problems ?? []) found.push(["bad", words]);
  for (const words of job.warnings ?? []) found.push(["warn", words]);
  if (job.progress?.waiting && job.active) found.push(["warn", `waits: ${job.progress.waiting}`]);
  return found.map(([tone, words]) => note(tone, words));
}

// The parts of a step, in the order in which they are drawn; each has a colour of its own.
const PARTS = {
  compute: "compute", copyOut: "copy out", wire: "wire", others: "others", update: "update", copyBack: "copy back", psjob: "psjob",
};
export const PART = "stepParts."; // before the name of a part, of the series that are its curves
export const partCurves = (series) => Object.entries(PARTS).flatMap(([name, label], look) => series.filter((one) => one.name === PART + name).map((one) => ({ ...one, label, look })));

export function step(job) {
  const told = job.progress?.stepParts ?? {};
  const all = Object.entries(PARTS).map(([name, word]) => [name, word, told[name] ?? 0]);
  const whole = all.reduce((sum, [, , value]) => sum + value, 0);
  if (!whole) return null;
  const time = (value) => (whole < 10 ? `${number(Number((1000 * value).toPrecision(3)))} ms` : `${number(Number(value.toPrecision(3)))} s`);
  const words = all.map(([, word, value]) => `${word} ${time(value)}`).join(", ");
  let at = 0;
  const rects = all.map(([name, word, value]) => {
    const wide = (1000 * value) / whole;
    at += wide;
    return svg("rect", { x: at - wide, y: 0, width: wide, height: 18, class: `p-${name}`, "data-part": name }, svg("title", {}, `${word}: ${time(value)}, ${percent(value / whole)}`));
  });
  return h("section", {}, h("h3", {}, `Where a ${job.unit ?? "step"} of ${time(whole)} goes`),
    svg("svg", { viewBox: "0 0 1000 18", preserveAspectRatio: "none", class: "parts", role: "img", "aria-label": `A ${job.unit ?? "step"} takes ${time(whole)}: ${words}` }, rects),
    h("div", { class: "keys" }, all.map(([name, word, value]) => h("span", {}, svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("rect", { width: 10, height: 10, class: `p-${name}` })), `${word} ${time(value)}`))),
    job.progress.stepAdvice ? note("warn", job.progress.stepAdvice) : null);
}

export const note = (tone, words) => h("div", { class: `said ${tone}` }, h("p", {}, words));

export function hyperparameters(settings) {
  const all = Object.entries(settings ?? {});
  if (!all.length) return h("p", { class: "soft" }, "Its manifest was not kept.");
  return h("dl", { class: "settings" }, all.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

export function workers(job) {
  const rows = (job.workers ?? []).map((one) => [
    `worker ${one.index}`, badge(one.state ?? "Pending"), number(one.clock), number(one.behind), percent(one.idle), number(one.restarts ?? 0),
    number(one.rewinds ?? 0), number(one.passesAgain ?? 0), one.node ?? "", one.problem ?? "",
  ]);
  return rows.length ? table("Steps made, steps behind the first worker, and the part of its time in which a worker waits",
    ["worker", "state", "steps", "behind", "waits", "restarts", "rewinds", "passes again", "node", "problem"], rows, { keep: [1, 2] }) : h("p", { class: "soft" }, "No worker is known yet.");
}

export function stages(job) {
  const rows = (job.stages ?? []).map((one) => [
    one.name, one.workersReady || "–", number(one.step), number(one.staleness), percent(one.idleFraction),
    bytes(one.memoryBytes), bytes(one.peakMemoryBytes), bytes(one.peakDeviceBytes), one.waiting ?? "",
  ]);
  return rows.length ? table("Stages: workers that are there, staleness in updates, part of the last steps in which workers wait, and memory of the worker that holds most",
    ["stage", "workers", "step", "staleness", "waits", "memory", "peak memory", "peak on the device", "waits for"], rows, { keep: [1] }) : null;
}

export function shards(job) {
  const late = (one) => (one ? `${number(one.mean ?? 0)} / ${number(one.max ?? 0)}` : "–");
  const rows = (job.shards ?? []).map((one) => [
    `shard ${one.index}`, badge(one.state ?? "Pending"), number(one.attempt ?? 0), number(one.applied), number(one.dropped), number(one.updatesLost), number(one.crashes),
    late(one.staleness), late(one.gap), bytes(one.memoryBytes),
    one.transfer ? `${one.transfer.doing} ${bytes(one.transfer.done ?? 0)} of ${bytes(one.transfer.total ?? 0)}` : "–", one.problem ?? "",
  ]);
  return rows.length ? table("Pushes, how late they were (mean / largest), memory, and the checkpoint that is read or written",
    ["shard", "state", "attempt", "pushes", "dropped", "updates lost", "crashes", "staleness", "gap", "memory", "checkpoint", "problem"], rows, { keep: [1, 2] })
    : h("p", { class: "soft" }, "No shard is known yet.");
}

export function events(found) {
  if (!found.events.length) return h("p", { class: "soft" }, "This job has no events.");
  const rows = [...found.events].reverse().map((one) => h("li", {}, h("time", {}, clock(one.time)),
    h("b", { class: one.type === "Warning" ? "bad" : "calm" }, one.reason || "–"), h("span", {}, (one.message ?? "") + (one.count > 1 ? ` (${one.count} times)` : ""))));
  return h("div", {}, h("ol", { class: "events", tabindex: "0", "aria-label": "What happened, the newest first" }, rows),
    found.moreEvents ? h("p", { class: "soft" }, `${found.moreEvents} older ones: psjob events ${found.job.id}`) : null);
}

// The settings of several runs: those in which they differ, and those that all have.
export function differing(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  const differ = names.filter((name) => runs.some((run) => run.settings[name] !== runs[0].settings[name]));
  return [differ, names.filter((name) => !differ.includes(name))];
}

export function runs(found, labels, hidden, hide) {
  const [all, same] = differing(found);
  const differ = all.filter((name) => name !== "training.mode"); // has a column of its own
  const metrics = [...new Set(found.flatMap((run) => run.series.map((one) => one.name)))].filter((name) => name !== "rate" && !name.startsWith(PART)).slice(0, 4);
  const last = (run, name) => run.series.find((one) => one.name === name)?.last;
  const rows = found.map((run, at) => [
    h("label", { class: "pick" }, h("input", { type: "checkbox", checked: !hidden.has(`${run.place}/${run.id}`), onchange: (event) => hide(`${run.place}/${run.id}`, !event.target.checked) }), swatch(at), labels[at]),
    h("a", { href: `#/jobs/${run.place}/${encodeURIComponent(run.id)}` }, clock(run.created)),
    run.problem ? h("span", { class: "bad" }, run.problem) : badge(run.phase), run.mode ?? "", number(run.step), ...metrics.map((name) => number(last(run, name))), ...differ.map((name) => run.settings[name] ?? "–"),
  ]);
  return [
    table("Runs, their last numbers, and the hyperparameters in which they differ", ["run", "started", "state", "mode", "step", ...metrics, ...differ.map((name) => name.replaceAll(".", ".\u200b"))], rows, { keep: [1, 2, 3] }),
    all.length || found.length < 2 ? null : h("p", { class: "soft" }, "The manifests of these runs have the same hyperparameters."),
    same.length ? h("details", {}, h("summary", {}, `${same.length} hyperparameters that are the same in all`), hyperparameters(Object.fromEntries(same.map((name) => [name, found[0].settings[name]])))) : null,
  ];
}

export function comparison(found) {
  const best = new Set(found.best.map((place) => place.join()));
  const rows = found.rows.map((row, side) => row.map((cell, at) => (at === 0 ? h("span", { class: "side" }, swatch(side), cell) : at === 1 && cell !== "–" ? badge(cell) : best.has([side, at].join()) ? h("b", { class: "good", title: "the best" }, cell) : cell)));
  const words = found.sides.flatMap((side) => [...(side.result === "Complete" ? [] : [["bad", `${side.title}: ${side.result}`]]), ...side.warnings.map((one) => ["warn", `${side.title}: ${one}`])]);
  return [
    h("div", { class: "head" }, h("h2", {}, `Comparison: ${found.name}`)),
    found.judged ? h("p", { class: "judged" }, found.judged) : null,
    ...words.map(([tone, text]) => note(tone, text)),
    h("section", {}, h("h3", {}, "Result"), table("One line a side", found.head, rows, { keep: [1] }),
      h("details", {}, h("summary", {}, "What the columns mean"), h("dl", { class: "meant" }, found.explained.map((one) => h("div", {}, h("dt", {}, one.name), h("dd", {}, one.words)))))),
  ];
}

export function made(found) {
  return h("section", {}, h("h3", {}, "How it was made"),
    h("dl", { class: "meant" }, Object.entries(found.about).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("dl", { class: "meant" }, found.sides.map((side) => h("div", {}, h("dt", {}, side.title), h("dd", {}, h("code", {}, side.command))))),
    h("details", {}, h("summary", {}, "Manifest"), h("pre", { class: "manifest", tabindex: "0", "aria-label": "Manifest" }, found.manifest)));
}
