// Elements and words. Text is always set as text, never as HTML.

export const SVG = "http://www.w3.org/2000/svg";
const NUMBER = /^(–|[<≥]?\s?[-+−]?[\d.,]+(e[-+]?\d+)?( ± \S+)?( ?(%|B|KiB|MiB|GiB|TiB|s|min|h|days))?( \/ [\d.,]+)?|\d+\/\d+)$/;

export function h(tag, given = {}, ...children) {
  return filled(document.createElement(tag), given, children);
}

export function svg(tag, given = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), given, children);
}

function filled(made, given, children) {
  for (const [name, value] of Object.entries(given)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(2).filter((one) => one !== null && one !== undefined && one !== ""));
  return made;
}

// What is the same stays, with its focus and its place of scrolling.
export function swap(place, ...children) {
  const next = place.cloneNode(false);
  next.append(...children.flat(2).filter(Boolean));
  if (!place.isEqualNode(next)) place.replaceChildren(...next.childNodes);
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
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

export const percent = (part) => (part === undefined || part === null ? "–" : `${(100 * part).toFixed(0)} %`);

// A job's name, and what tells its runs apart.
export const short = (job) => (job.id.startsWith(`${job.name}-`) ? job.id.slice(job.name.length + 1).split("-").at(-1) : job.id === job.name ? "" : job.id);

// Labels of jobs, each as short as it may be.
export function labels(jobs) {
  const times = (all) => { const found = new Map(); for (const one of all) found.set(one, (found.get(one) ?? 0) + 1); return found; };
  const names = times(jobs.map((job) => job.name));
  const given = jobs.map((job) => (names.get(job.name) > 1 && short(job) ? `${job.name} ${short(job)}` : job.name));
  const again = times(given);
  return given.map((label, at) => (again.get(label) > 1 ? jobs[at].id : label));
}

// A table that becomes cards where it is narrow; the roles keep it a table for a screen reader. Columns without a word are left out,
// and columns of numbers stand at the right.
export function table(caption, head, rows, { keep = [] } = {}) {
  const text = (cell) => (cell instanceof Node ? cell.textContent : String(cell ?? ""));
  const shown = head.map((_, at) => at).filter((at) => at === 0 || keep.includes(at) || rows.some((row) => !["", "–"].includes(text(row[at]))));
  const kinds = head.map((_, at) => (at > 0 && rows.every((row) => NUMBER.test(text(row[at]) || "–")) ? "num" : null));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { role: "table" }, h("caption", {}, caption),
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, shown.map((at) => h("th", { scope: "col", role: "columnheader", class: kinds[at] }, head[at])))),
      h("tbody", { role: "rowgroup" }, rows.map((row) => h("tr", { role: "row" }, shown.map((at) =>
        h("td", { role: "cell", class: kinds[at], "data-head": head[at], "data-empty": ["", "–"].includes(text(row[at])) }, row[at] instanceof Node ? row[at] : text(row[at]) || "–")))))));
}
