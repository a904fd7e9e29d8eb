// Draws SVG. Every text from the database becomes a text node; no markup is ever parsed.

const SVG = "http://www.w3.org/2000/svg";
const tip = document.getElementById("tip");

export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function size(bytes) {
  let amount = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (amount < 1024 || unit === "TiB") return unit === "B" ? `${Math.round(amount)} B` : `${amount.toFixed(1)} ${unit}`;
    amount /= 1024;
  }
}

export function time(ms) {
  if (ms === null || ms === undefined) return "never";
  const moment = new Date(ms);
  return Number.isNaN(moment.getTime()) ? String(ms) : moment.toISOString().slice(0, 19).replace("T", " ") + "Z";
}

export const count = (number) => number.toLocaleString("en-US");
export const some = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
export const sources = (job) => [[job.l0, "L0 SST"], [job.runs.length, "run"]].filter(([number]) => number).map(([number, noun]) => some(number, noun)).join(", ");

function explained(element, text, pick) {
  const show = (event) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = element.getBoundingClientRect();
    const x = event.clientX ?? box.left;
    tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 4))}px`;
    const below = box.bottom + 8;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? Math.max(4, box.top - tip.offsetHeight - 8) : below}px`;
  };
  const hide = () => { tip.hidden = true; };
  element.setAttribute("tabindex", "0");
  element.setAttribute("role", pick ? "button" : "img");
  element.setAttribute("aria-label", text);
  element.addEventListener("pointermove", show);
  element.addEventListener("focus", () => show({}));
  element.addEventListener("pointerleave", hide);
  element.addEventListener("blur", hide);
  if (pick) {
    element.addEventListener("click", pick);
    element.addEventListener("keydown", (event) => { if (event.key === "Enter") pick(); });
  }
  return element;
}

function frame(container, height, label) {
  const width = Math.max(container.clientWidth, 240);
  const picture = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": label });
  container.replaceChildren(picture);
  return [picture, width];
}

// Text is cut to what fits: about seven pixels a letter.
const fit = (text, pixels) => {
  const letters = Math.max(Math.floor(pixels / 7), 1);
  return text.length <= letters ? text : `${text.slice(0, letters - 1)}…`;
};

export function drawTree(container, tree, pick) {
  const lane = 24, label = container.clientWidth < 500 ? 62 : 150;
  const [picture, width] = frame(container, tree.lanes.length * lane + 26, "SSTs by key");
  const room = width - label - 8;
  const at = (x) => label + x * room;
  const bottom = tree.lanes.length * lane;
  const fits = Math.max(2, Math.min(tree.ticks.length, Math.floor(room / 130)));
  tree.ticks.forEach((tick, index) => {
    const last = tree.ticks.length - 1;
    if (last > 0 && index !== last && index % Math.ceil(last / (fits - 1 || 1)) !== 0) return;
    const anchor = tick.x < 0.05 ? "start" : tick.x > 0.95 ? "end" : "middle";
    picture.append(s("line", { class: "grid", x1: at(tick.x), x2: at(tick.x), y1: 0, y2: bottom + 4 }));
    picture.append(s("text", { class: "dim", x: at(tick.x), y: bottom + 18, "text-anchor": anchor }, fit(tick.key.label, room / fits)));
  });
  tree.lanes.forEach((each, row) => {
    const y = row * lane;
    picture.append(s("text", { x: 0, y: y + 16 }, fit(label < 100 ? each.name : `${each.name} · ${size(each.bytes)}`, label)));
    for (const bar of each.bars) {
      const left = at(bar.x0), wide = Math.max(at(bar.x1) - left, 4);
      const kind = bar.borrowed ? "borrowed" : each.kind;
      const many = bar.count > 1 ? `${count(bar.count)} SSTs from ` : "";
      const text = `${many}${bar.id}\n${each.name}, ${size(bar.bytes)}, made ${time(bar.made_ms)}` +
        `${bar.borrowed ? "\nborrowed" : ""}${bar.part ? "\na part of its SST" : ""}${each.busy ? "\nin a compaction" : ""}` +
        `\n${bar.first.label} … ${bar.last.label}`;
      const box = s("rect", { class: `bar ${kind}${each.busy ? " busy" : ""}`, x: Math.min(left, width - 12), y: y + 3, width: wide, height: lane - 7, rx: 2 });
      picture.append(explained(box, text, () => pick(bar)));
    }
  });
}

export function drawHistory(container, history, shown) {
  const tall = 70;
  const [picture, width] = frame(container, tall + 18, "L0 SSTs and sorted runs by manifest");
  const span = Math.max(history.last - history.first, 1);
  const x = (id) => 4 + ((id - history.first) / span) * (width - 8);
  const most = Math.max(1, ...history.samples.map((each) => Math.max(each.l0, each.runs)));
  const y = (amount) => tall - (amount / most) * (tall - 8);
  for (const [kind, name] of [["l0", "L0 SSTs"], ["runs", "sorted runs"]]) {
    const points = history.samples.map((each) => `${x(each.id).toFixed(1)},${y(each[kind]).toFixed(1)}`).join(" ");
    picture.append(s("polyline", { class: kind === "l0" ? "line-l0" : "line-run", points }, s("title", {}, name)));
  }
  picture.append(s("line", { class: "grid", x1: 0, x2: width, y1: tall, y2: tall }));
  picture.append(s("text", { class: "dim", x: 0, y: 10 }, count(most)));
  if (history.points.length) {
    picture.append(s("text", { class: "dim", x: 0, y: tall + 14 }, `${count(history.first)}, ${time(history.points[0][1])}`));
    picture.append(s("text", { class: "dim", x: width, y: tall + 14, "text-anchor": "end" }, width < 500 ? count(history.last) : `${count(history.last)}, ${time(history.points.at(-1)[1])}`));
  }
  if (shown !== null) picture.append(s("line", { class: "cursor", x1: x(shown), x2: x(shown), y1: 0, y2: tall }));
}

export function drawTimeline(container, state, history) {
  const made = state.trees.flatMap((tree) => tree.lanes.flatMap((lane) => lane.bars.map((bar) => ({ ...bar, kind: lane.kind, lane: lane.name }))));
  const jobs = state.jobs ?? [], points = history?.points ?? [];
  const times = [...made.map((bar) => bar.made_ms), ...jobs.flatMap((job) => [job.begun_ms, job.seen_ms]), ...points.map((point) => point[1])];
  if (!times.length) { container.replaceChildren(h("p", { class: "dim" }, "nothing yet")); return; }
  const narrow = container.clientWidth < 500, label = narrow ? 62 : 110, row = 24;
  const [picture, width] = frame(container, 4 * row + 20, "When SSTs and manifests were written");
  const first = Math.min(...times), last = Math.max(...times);
  const x = (ms) => label + 10 + ((ms - first) / Math.max(last - first, 1)) * (width - label - 22);
  ["L0 SSTs", narrow ? "run SSTs" : "SSTs of runs", narrow ? "jobs" : "compactions", "manifests"].forEach((name, at) => {
    picture.append(s("text", { x: 0, y: at * row + 16 }, name), s("line", { class: "grid", x1: label, x2: width, y1: at * row + row - 1, y2: at * row + row - 1 }));
  });
  const largest = Math.max(1, ...made.map((bar) => bar.bytes));
  for (const bar of made) {
    const dot = s("circle", { class: `bar ${bar.kind}`, cx: x(bar.made_ms), cy: (bar.kind === "l0" ? 0 : row) + 12, r: 3 + 6 * Math.sqrt(bar.bytes / largest) });
    picture.append(explained(dot, `${bar.lane}: ${size(bar.bytes)}\n${time(bar.made_ms)}\n${bar.id}`));
  }
  for (const job of jobs) {
    const left = x(job.begun_ms), right = x(job.active ? last : job.seen_ms);
    const box = s("rect", { class: `bar job${job.active ? " active" : ""}`, x: left, y: 2 * row + 5, width: Math.max(right - left, 5), height: 14, rx: 2 });
    picture.append(explained(box, `${job.status}: ${sources(job)}\nbegun ${time(job.begun_ms)}\n${job.read_bytes === null ? "" : `read ${size(job.read_bytes)}, `}written ${size(job.written_bytes)}`));
  }
  const bins = new Map();
  points.forEach(([id, ms], index) => {
    const bin = Math.round(x(ms) / 3);
    bins.set(bin, (bins.get(bin) ?? 0) + (index ? id - points[index - 1][0] : 1));
  });
  const most = Math.max(1, ...bins.values());
  for (const [bin, amount] of bins) {
    const tall = Math.max(2, (amount / most) * (row - 4));
    picture.append(s("rect", { class: "mark", x: bin * 3 - 1, y: 4 * row - 1 - tall, width: 2, height: tall }));
  }
  picture.append(s("text", { class: "dim", x: label, y: 4 * row + 16 }, narrow ? time(first).slice(5, 16) : time(first)));
  picture.append(s("text", { class: "dim", x: width, y: 4 * row + 16, "text-anchor": "end" }, narrow ? time(last).slice(5, 16) : time(last)));
}

export function table(heads, rows, empty) {
  if (!rows.length) return h("p", { class: "dim" }, empty);
  const numbers = new Set(heads.flatMap((head, at) => (head.startsWith("#") ? [at] : [])));
  const cell = (content, at) => h("td", { class: numbers.has(at) ? "number" : content instanceof Node ? null : "mono" }, content ?? "");
  return h("div", { class: "wide" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head, at) => h("th", { class: numbers.has(at) ? "number" : null, scope: "col" }, head.replace(/^#/, ""))))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell))))));
}
