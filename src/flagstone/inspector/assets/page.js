// The page of `flagstone inspect`. It asks the server beside it, and nothing else.

import { count, drawHistory, drawTimeline, drawTree, h, size, some, sources, table, time } from "./picture.js";

const $ = (id) => document.getElementById(id);
const former = new Map();
let current = null, shown = null, history = null, sizes = null, live = null, wanted = null, busy = false, search = null;

async function ask(name, fields = {}) {
  const answer = await fetch(`api/${name}?${new URLSearchParams(fields)}`);
  const document = await answer.json();
  if (!answer.ok) throw new Error(document.error);
  return document;
}

function problem(error) {
  $("problem").textContent = error === null ? "" : error.message;
  $("problem").hidden = error === null;
}

const dollars = (amount) => `${amount > 0 && amount < 0.01 ? "under $0.01" : `$${amount.toFixed(2)}`} a month`;

async function guarded(work) {
  try { const found = await work(); problem(null); return found; } catch (error) { problem(error); return null; }
}

function show(state) {
  shown = state;
  $("name").textContent = document.title = state.database;
  $("where").textContent = state.store;
  $("h-tree").textContent = state.former ? `Tree at manifest ${count(state.manifest)}, ${time(state.written_ms)}` : "Tree";
  $("trees").parentElement.classList.toggle("former", state.former);
  $("now").disabled = !state.former;
  $("trees").replaceChildren();
  for (const tree of state.trees) {
    const box = h("div", { class: "picture" });
    $("trees").append(...(tree.prefix ? [h("h3", {}, "Segment ", h("code", {}, tree.prefix.label))] : []), box);
    if (!tree.lanes.length) box.append(h("p", { class: "dim" }, "no SSTs yet"));
    else drawTree(box, tree, (bar) => browse({ start: bar.first.id }));
    if (tree.hidden_lanes) box.append(h("p", { class: "dim" }, `${count(tree.hidden_lanes)} older lanes are not drawn`));
  }
  if (state.hidden_trees) $("trees").append(h("p", { class: "dim" }, `${count(state.hidden_trees)} more segments`));
  figures();
  drawTimeline($("timeline"), state, history);
  jobs(state);
  checkpoints(state);
  scrubbed();
}

function figures() {
  const rate = live?.rates.at(-1), state = shown;
  const pairs = [
    ["manifest", count(state.manifest)],
    ["sequence number flushed", count(state.last_seq)],
    ["last flush", time(state.last_flush_ms)],
    ["writer, compactor epoch", `${state.writer_epoch}, ${state.compactor_epoch}`],
    ["L0", `${some(state.l0, "SST")}, ${size(state.l0_bytes)}`],
    ["sorted runs", `${count(state.runs)}, ${size(state.run_bytes)}`],
    ["WAL", rate ? `${size(rate.wal_bytes)}/s, ${rate.wal_files.toFixed(1)} files/s` : "…"],
    ["compacted", rate ? `${size(rate.compacted_bytes)}/s` : "…"],
    ["stored", sizes ? `${size(sizes.stored_bytes)}, ${dollars(sizes.dollars_a_month)}` : "…"],
    ["writes at this rate", rate ? `${dollars(rate.dollars_a_month)}` : "…"],
  ];
  $("figures").replaceChildren(...pairs.map(([name, value]) => h("div", { class: "figure" }, h("span", { class: "dim" }, name), h("b", {}, value))));
}

function jobs(state) {
  if (state.jobs === null) { $("jobs").replaceChildren(h("p", { class: "dim" }, "Jobs are shown for the current manifest only.")); return; }
  $("jobs").replaceChildren(table(["begun", "state", "sources", "into", "#read", "#written", "worker"], state.jobs.map((job) => [
    time(job.begun_ms), job.status, sources(job), job.destination === null ? "dropped" : `run ${job.destination}`,
    job.read_bytes === null ? "" : size(job.read_bytes), `${size(job.written_bytes)}, ${some(job.written, "SST")}`, job.worker ?? ""]), "no compaction jobs"));
}

function checkpoints(state) {
  const rows = state.checkpoints.map((each) => [each.name ?? "", each.id, h("button", { type: "button", class: "link", click: () => scrub(each.manifest) }, count(each.manifest)),
    time(each.created_ms), time(each.expires_ms)]);
  $("checkpoints").replaceChildren(table(["name", "id", "manifest", "made", "expires"], rows.reverse(), "no checkpoints"));
  if (state.lenders.length) {
    $("checkpoints").append(h("h3", {}, "This database is a clone: it uses SSTs of"),
      table(["database", "#SSTs", "kept there by checkpoint"], state.lenders.map((each) => [each.path, count(each.ssts), each.checkpoint ?? "none"]), ""));
  }
}

function showSizes() {
  const line = (name, weight) => [name, count(weight.count), size(weight.bytes)];
  $("sizes").replaceChildren(
    h("p", {}, `${size(sizes.stored_bytes)} are stored: ${dollars(sizes.dollars_a_month)} at list prices (${sizes.price_list}).`,
      sizes.space_amplification ? ` Space amplification ${sizes.space_amplification.toFixed(2)}×.` : ""),
    table(["", "#objects", "#size"], [line("live SSTs", sizes.live), line("borrowed SSTs", sizes.borrowed), line("SSTs only in checkpoints", sizes.pinned),
      line("garbage, or work in progress", sizes.unreferenced), line("WAL to replay", sizes.wal_to_replay), line("WAL flushed", sizes.wal_flushed)], ""),
    h("h3", {}, "By folder"), table(["folder", "#objects", "#size"], sizes.folders.map(([name, objects, bytes]) => [name, count(objects), size(bytes)]), "no objects"));
}

// The scrubber. One request at a time; the newest wish wins, so that dragging never queues requests.
function scrubbed() {
  if (!history || !shown) return;
  $("scrubbed").textContent = `manifest ${count(shown.manifest)} of ${count(history.count)} stored` + (shown.former ? `, written ${time(shown.written_ms)}` : ", now");
  drawHistory($("history"), history, shown.former ? shown.manifest : null);
}

function back() {
  wanted = null;
  if (current) show(current);
  if (history) $("scrubber").value = history.last;
}

async function scrub(id) {
  $("scrubber").value = id;
  wanted = id;
  if (busy) return;
  busy = true;
  try {
    while (wanted !== null && wanted !== shown?.asked) {
      const id = wanted;
      const found = former.get(id) ?? await guarded(() => ask("state", { manifest: id }));
      if (found === null) { wanted = null; break; }
      former.set(id, found);
      if (former.size > 100) former.delete(former.keys().next().value);
      found.asked = id;
      if (wanted !== null) show(found);
    }
  } finally { busy = false; }
}

async function loadHistory() {
  history = await guarded(() => ask("history")) ?? history;
  if (!history) return;
  const slider = $("scrubber");
  slider.min = history.first;
  slider.max = history.last;
  if (wanted === null) slider.value = history.last;
  scrubbed();
  if (shown) drawTimeline($("timeline"), shown, history);
}

async function loadState() {
  const found = await guarded(() => ask("state"));
  if (found === null) return;
  current = found;
  if (wanted === null) show(found);
}

async function loadSizes() {
  sizes = await guarded(() => ask("sizes")) ?? sizes;
  if (sizes) { showSizes(); if (shown) figures(); }
}

// Keys.
const UNMERGED = "merge operands; open the key to see them";
const best = (value) => value === null ? "" : value.columns ? value.columns.map(([name, part]) => `${name}: ${part}`).join(", ")
  : (value.text ?? `0x${value.hex}`) + (value.cut ? "…" : "");
const keyLink = (key) => h("button", { type: "button", class: "link", click: () => openKey(key.id) }, key.label === "" ? "(empty)" : key.label);

async function browse(fields, more = false) {
  search = { limit: "50", ...(more ? search : {}), ...fields };
  const found = await guarded(() => ask("rows", search));
  if (found === null) return;
  $("hint").hidden = true;
  const rows = found.rows.map((row) => [keyLink(row.key), row.value === null ? UNMERGED : best(row.value), row.value === null ? "" : size(row.value.bytes), count(row.seq), row.expires_ms === null ? "" : time(row.expires_ms)]);
  const page = table(["key", "value", "#size", "#seq", "expires"], rows, "no rows");
  if (more) $("rows").append(page); else $("rows").replaceChildren(page);
  search.start = found.next ?? "";
  $("more").hidden = found.next === null;
}

function forms(value) {
  if (value === null) return [h("p", { class: "dim" }, "deleted")];
  const parts = [h("p", { class: "dim" }, `${count(value.bytes)} bytes${value.cut ? ", the beginning is shown" : ""}`)];
  if (value.columns) parts.push(h("h3", {}, "Columns"), table(["column", "value"], value.columns, "no columns"));
  if (value.json !== null) parts.push(h("h3", {}, "JSON"), h("pre", {}, value.json));
  else if (value.text !== null && !value.columns) parts.push(h("h3", {}, "Text"), h("pre", {}, value.text));
  return [...parts, h("h3", {}, "Hexadecimal"), h("pre", {}, value.hex.replace(/(..)(?=.)/g, "$1 "))];
}

async function openKey(id) {
  const found = await guarded(() => ask("key", { id }));
  if (found === null) return;
  const { key, row } = found;
  $("key").replaceChildren(
    h("h3", {}, "Key ", h("code", {}, key.label)),
    table(["form", "key"], [...(key.text === null ? [] : [["text", key.text]]), ...(key.tuple ? [["tuple", key.tuple.map(([kind, part]) => `${part} (${kind})`).join(", ")]] : []), ["hexadecimal", key.hex]], ""),
    ...(found.problem ? [h("p", {}, found.problem)] : []),
    ...(row ? [h("h3", {}, "Value now"), ...forms(row.value)] : found.problem ? [] : [h("p", {}, "The database has no value for this key now.")]),
    h("h3", {}, "Versions that are stored"),
    table(["#sequence number", "kind", "made", "expires", "#size", "value"], found.versions.map((each) => [count(each.seq), each.kind, each.created_ms === null ? "" : time(each.created_ms),
      each.expires_ms === null ? "" : time(each.expires_ms), each.value ? size(each.value.bytes) : "", best(each.value)]), "none"),
    ...(found.more_versions ? [h("p", { class: "dim" }, "There are more versions.")] : []),
    h("h3", {}, "In checkpoints"),
    table(["checkpoint", "made", "#manifest", "#sequence number", "value"], found.checkpoints.map((each) => [each.name ?? each.id, time(each.created_ms), count(each.manifest),
      each.row ? count(each.row.seq) : "", each.problem ?? (each.row ? best(each.row.value) : "no value")]), "no checkpoints"));
  $("key").focus();
}

// Live.
function follow() {
  const events = new EventSource("events");
  events.addEventListener("live", (event) => {
    live = JSON.parse(event.data);
    $("live").classList.add("on");
    $("live-text").textContent = `live, ${time(live.now_ms).slice(11)}`;
    if (current === null || live.manifest !== current.manifest) { loadState(); loadHistory(); } else if (shown) figures();
  });
  events.addEventListener("problem", (event) => problem(new Error(JSON.parse(event.data).error)));
  events.onerror = () => { $("live").classList.remove("on"); $("live-text").textContent = "not connected"; };
}

let resized = 0;
addEventListener("resize", () => { cancelAnimationFrame(resized); resized = requestAnimationFrame(() => { if (shown) show(shown); }); });
$("scrubber").addEventListener("input", () => { const id = Number($("scrubber").value); if (id === history?.last) back(); else scrub(id); });
$("now").addEventListener("click", back);
$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  $("key").replaceChildren();
  browse({ prefix: $("prefix").value, form: $("form").value, system: $("system").checked ? "1" : "" });
});
$("more").addEventListener("click", () => browse({}, true));

await loadState();
follow();
loadHistory();
loadSizes();
setInterval(() => { if (!document.hidden) loadSizes(); }, 60000);
