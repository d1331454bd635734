// The time line: a lane for the job and each process, in which a colour says one thing: what it did then. How it ended is a mark.

import { clock, h, seconds, svg, table } from "./dom.js";

const LANES = 40;
const WIDE = 1000;
const KINDS = {
  wait: ["Pending", "waits to be started"], start: ["Starting", "starts, or reads a checkpoint"], work: ["Running, Serving", "works"],
  recover: ["Recovering", "a lost process is replaced"], rest: ["Suspended", "suspended"],
};
const KIND = { Pending: "wait", Starting: "start", Running: "work", Serving: "work", Recovering: "recover", Suspended: "rest" };
const ENDS = { Succeeded: "well", Complete: "well", Failed: "fail", Stopped: "stop" };
const MARKS = { well: ["✓", "ended well"], fail: ["✕", "failed or was killed"], stop: ["■", "was asked to end"] };

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
    : names.filter((name) => name === "job" || lanes.get(name).some((span) => span.number > 1 || span.ending === "Failed")).concat(names).filter((name, at, all) => all.indexOf(name) === at).slice(0, LANES);
  const kinds = Object.keys(KINDS).filter((kind) => spans.some((span) => KIND[span.state] === kind));
  const marks = Object.keys(MARKS).filter((mark) => spans.some((span) => ENDS[ending(span)] === mark));
  const scale = ticks(end - begin);
  const at = (time) => (WIDE * (time - begin)) / (end - begin);
  return h("div", {},
    h("div", { class: "lanes", role: "img", "aria-label": `Time line of ${seconds(end - begin)}; the table below has each stretch` },
      shown.flatMap((name) => [h("div", {}, name), lane(lanes.get(name), at, found.until, name)]),
      h("div"), h("div", { class: "scale" }, scale.map((tick) => svgPlace(tick, end - begin)))),
    h("div", { class: "keys" }, kinds.map((kind) => h("span", {}, key(kind), `${KINDS[kind][0]}: ${KINDS[kind][1]}`)),
      marks.map((mark) => h("span", {}, h("b", { class: `mark m-${mark}` }, MARKS[mark][0]), MARKS[mark][1])), h("span", {}, "empty: no process")),
    h("p", { class: "soft small" }, `${clock(begin)} to ${clock(end)}`),
    names.length > shown.length ? h("p", { class: "soft" }, `${names.length - shown.length} more processes are not drawn.`) : null);
}

export function spansTable(found) {
  const rows = (found.timeline ?? []).slice(-300).map((span) => [
    span.lane, span.state, span.number || "–", clock(span.begin), seconds((span.end ?? found.until) - span.begin), span.ending || "", span.note ?? "",
  ]);
  return table("Stretches of the time line", ["of", "state", "start", "began", "took", "ended", "process, and how it ended"], rows);
}

// A job's last phase is an end, not a stretch.
const ending = (span) => span.ending || (ENDS[span.state] ? span.state : "");

function lane(spans, at, until, name) {
  const box = svg("svg", { viewBox: `0 0 ${WIDE} 18`, preserveAspectRatio: "none", "data-lane": name });
  const over = [];
  for (const span of spans) {
    const end = span.end ?? until;
    const words = `${name}${span.number ? `, start ${span.number}` : ""}: ${span.state}, ${seconds(end - span.begin)}${span.note ? `, ${span.note}` : ""}`;
    if (KIND[span.state]) box.append(svg("rect", { x: at(span.begin), y: 2, width: Math.max(2.5, at(end) - at(span.begin) - 1), height: 14, class: `s-${KIND[span.state]}` }, svg("title", {}, words)));
    if (ENDS[ending(span)]) {
      const mark = ENDS[ending(span)];
      over.push(h("b", { class: `mark m-${mark} ${along(at(span.ending ? end : span.begin))}`, title: words, "data-at": at(span.ending ? end : span.begin) }, MARKS[mark][0]));
    }
  }
  const row = h("div", { class: "lane" }, box, over);
  for (const mark of over) mark.style.left = `min(${Number(mark.dataset.at) / 10}%, 100% - .55rem)`;
  return row;
}

const along = (x) => (x > WIDE - 1 ? "last" : "");

function key(kind) {
  return svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("rect", { width: 10, height: 10, class: `s-${kind}` }));
}

function svgPlace(tick, whole) {
  const made = h("span", {}, seconds(tick));
  made.style.left = `${(100 * tick) / whole}%`;
  return made;
}

// Round numbers of seconds, about five of them.
function ticks(whole) {
  const steps = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];
  const step = steps.find((one) => whole / one <= 6) ?? 604800 * Math.ceil(whole / 604800 / 6);
  const found = [];
  for (let at = 0; at <= whole * 0.97; at += step) found.push(at);
  return found;
}
