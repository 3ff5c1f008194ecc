// The status page: receives states and shows them. It cannot change anything at the coordinator.

import { matrix, spark, tiles } from "./draw.js";
import { Model, SEVERITY, gone } from "./model.js";
import { bytes, clock, count, duration, element, fill, milliseconds, plural, ranks, rate, setText } from "./text.js";

const ROWS = 32;
const BARS = 24;
const BARRIERS = 6;
const STALE_MS = 3_000;
const find = (id) => document.getElementById(id);
const model = new Model();
const view = { page: 0, sort: null, job: new URLSearchParams(location.search).get("job") || "" };
let [memberAt, linkAt] = [() => undefined, () => ""];
let [source, lastMessage, drawn] = [null, 0, false];

const COLUMNS = [
  ["rank", "right", (m) => (m.rank >= 0 ? `${m.rank}` : "–"), (m) => (m.rank < 0 ? 1e9 : m.rank)],
  ["name", "name", (m) => m.name, null],
  ["host", "name", (m) => m.host, null],
  ["device", "name", (m) => m.device, null],
  ["state", "", (m) => m.state, (m) => SEVERITY[m.state]],
  ["step", "right", (m) => count(m.step), (m) => m.step],
  ["behind for", "right", (m) => (m.lateMs ? duration(m.lateMs) : ""), (m) => -m.lateMs],
  ["ops/s", "right", (m) => rate(m.stepsPerSecond), (m) => m.stepsPerSecond],
  ["in operations", "", null, (m) => m.operationShare],
  ["beats, last minute", "", null, (m) => -m.beat_age_ms],
  ["last beat", "right", (m) => (gone(m) ? "" : duration(m.beat_age_ms)), (m) => -m.beat_age_ms],
  ["last operation", "operation", (m) => m.doing, null],
  ["why", "wrap", (m) => m.reason, null],
];

function connect() {
  if (source) source.close();
  source = new EventSource(`events?job=${encodeURIComponent(view.job)}`);
  source.addEventListener("history", (message) => {
    model.clear();
    model.setHistory(JSON.parse(message.data));
  });
  source.addEventListener("state", (message) => {
    noteNews();
    const state = JSON.parse(message.data);
    if (state) {
      model.update(state);
      drawn = false;
      requestAnimationFrame(draw);
    } else {
      showNoJob();
    }
  });
}

// The coordinator has no such job, yet or any more.
function showNoJob() {
  document.body.classList.add("empty");
  find("summary").className = "summary";
  setText(find("headline"), view.job ? `Nobody has joined the job ${view.job} yet` : "There is no job yet");
  setText(find("subline"), "Workers join with: ferrorpc run --coordinator HOST:PORT -n 4 train.py");
}

function draw() {
  if (drawn || !model.state) return;
  drawn = true;
  const state = model.state;
  const kept = state.durable ? "journal on disk" : "in memory";
  find("about").title = `cluster ${state.cluster_id}`;
  setText(find("about"), `cluster ${state.cluster_id.slice(0, 8)} · epoch ${state.epoch} · ${kept} · ${state.version}`);
  setText(document.querySelector("title"), `${state.job} · ferrorpc`);
  const [level, headline, subline] = model.summary();
  document.body.classList.remove("empty");
  find("summary").className = `summary ${level}`;
  setText(find("headline"), headline);
  setText(find("subline"), subline);
  drawNumbers();
  drawRanks();
  drawBarriers();
  drawGenerations();
  drawSteps();
  drawTraining();
  drawEvents();
  drawLinks();
}

function drawNumbers() {
  const state = model.state;
  const active = model.ranked().filter((m) => m.state === "active");
  const known = active.filter((m) => m.stepsPerSecond !== null);
  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
  const newest = model.newest();
  const within = mean(known.map((m) => m.operationShare));
  const rates = model.links.filter((link) => link.bytesPerSecond !== null);
  const sent = rates.reduce((sum, link) => sum + link.bytesPerSecond, 0);
  const numbers = [
    [`${active.length} / ${model.size()}`, "ranks active"],
    [newest ? `${newest.generation}` : "–", `generation${newest ? ageText(newest) : ""}`],
    [rate(mean(known.map((m) => m.stepsPerSecond))), "operations/s on a rank"],
    [within === null ? "–" : `${Math.round(within * 100)} %`, "of time in operations"],
    [rates.length ? `${bytes(sent)}/s` : "–", "sent between ranks"],
    [count(state.store.keys), `keys in the store, ${bytes(state.store.bytes)}`],
  ];
  fill(find("numbers"), numbers.map(([value, what]) => element("div", "number", element("b", "", value), element("span", "", what))));
}

function ageText(generation) {
  if (generation.lasted_ms !== null) return `, lasted ${duration(generation.lasted_ms)}`;
  if (generation.end_reason) return ", over";
  return generation.age_ms === null ? "" : `, ${duration(generation.age_ms)} old`;
}

function drawRanks() {
  const members = model.present();
  memberAt = tiles(find("tiles"), members);
  const states = [...new Set(members.map((m) => m.state))].sort((a, b) => SEVERITY[b] - SEVERITY[a]);
  fill(find("legend"), states.map((state) => {
    const mark = element("i", `badge ${state}`);
    return element("li", "", mark, `${members.filter((m) => m.state === state).length} ${state}`);
  }));
  const filled = { device: (m) => m.device, "behind for": (m) => m.lateMs, why: (m) => m.reason };
  const columns = COLUMNS.filter(([name]) => !filled[name] || members.some(filled[name]));
  const shown = sorted(members, columns);
  const pages = Math.max(1, Math.ceil(shown.length / ROWS));
  view.page = Math.min(view.page, pages - 1);
  drawPager(shown.length, pages, model.members.length - members.length);
  fill(document.querySelector("#ranks thead"), [element("tr", "", ...columns.map(([name, kind, , key]) => {
    const head = element("th", `${kind}${view.sort === name ? " sorted" : ""}`, name);
    if (key) head.dataset.sort = name;
    return head;
  }))]);
  const body = document.querySelector("#ranks tbody");
  const rows = shown.slice(view.page * ROWS, (view.page + 1) * ROWS);
  while (body.children.length > rows.length) body.lastChild.remove();
  while (body.children.length < rows.length) body.append(element("tr", ""));
  rows.forEach((member, i) => drawRow(body.children[i], member, columns));
}

// If not all members fit on one page, those with problems come first.
function sorted(members, columns) {
  const chosen = columns.find(([name]) => name === view.sort);
  const key = chosen ? chosen[3] : members.length > ROWS ? (m) => SEVERITY[m.state] * 1e9 - m.lateMs : null;
  return key ? [...members].sort((a, b) => (key(a) ?? 1e18) - (key(b) ?? 1e18)) : members;
}

function drawRow(row, member, columns) {
  const names = columns.map(([name]) => name).join();
  if (row.dataset.columns !== names) {
    row.dataset.columns = names;
    row.replaceChildren(...columns.map(([, kind]) => element("td", kind)));
  }
  columns.forEach(([name, , text], i) => {
    const cell = row.children[i];
    if (name === "state") {
      if (!cell.firstChild) cell.append(element("span", ""));
      cell.firstChild.className = `badge ${member.state}`;
      setText(cell.firstChild, member.state);
    } else if (name === "beats, last minute") {
      if (!cell.firstChild) cell.append(element("canvas", "spark"));
      spark(cell.firstChild, model.sparks.get(member.name) || []);
    } else if (name === "in operations") {
      if (!cell.firstChild) cell.append(element("div", "bar", element("i", "within")));
      cell.firstChild.firstChild.style.width = `${Math.round((member.operationShare || 0) * 100)}%`;
      cell.title = member.operationShare === null ? "" : `${Math.round(member.operationShare * 100)} %`;
    } else {
      setText(cell, text(member));
      if (cell.className === "name") cell.title = text(member); // which may be cut off
    }
  });
}

function drawPager(total, pages, earlier) {
  const pager = find("pager");
  if (pages === 1) return fill(pager, [plural(total, "member") + (earlier ? `, and ${count(earlier)} of earlier generations` : "")]);
  if (!pager.querySelector("button")) {
    const turn = (by) => () => { view.page = Math.max(0, view.page + by); drawn = false; draw(); };
    const [back, on] = [element("button", "", "‹"), element("button", "", "›")];
    back.addEventListener("click", turn(-1));
    on.addEventListener("click", turn(1));
    pager.replaceChildren(back, element("span", ""), on);
  }
  const [back, where, on] = pager.children;
  setText(where, `${view.page * ROWS + 1}-${Math.min(total, (view.page + 1) * ROWS)} of ${count(total)}`);
  back.disabled = view.page === 0;
  on.disabled = view.page === pages - 1;
}

// A bar of parts: [class, share of the whole width].
function barOf(...parts) {
  const bar = element("div", "bar", ...parts.map(([kind]) => element("i", kind)));
  parts.forEach(([, share], i) => { bar.children[i].style.width = `${100 * Math.max(0, share)}%`; });
  return bar;
}

function rankRow(rank, bar, text) {
  return element("div", "row", element("span", "", `rank ${rank}`), bar, element("span", "", text));
}

function drawBarriers() {
  const open = model.state.barriers.slice(0, BARRIERS).map((barrier) => {
    const all = barrier.arrived.length + barrier.missing.length;
    const bar = barOf(["there", barrier.arrived.length / Math.max(1, all)], ["away", barrier.missing.length / Math.max(1, all)]);
    const waits = barrier.missing.length ? `missing: rank ${ranks(barrier.missing)}` : "";
    const last = barrier.arrived_after_ms.length ? `, the last came ${duration(Math.max(...barrier.arrived_after_ms))} after the first` : "";
    return element("div", "item",
      element("p", "", element("strong", "", `${barrier.name} #${barrier.ordinal}`), ` open for ${duration(barrier.age_ms)} · ${waits}`),
      bar, element("p", "quiet", `${barrier.arrived.length} of ${all} arrived${last}`));
  });
  const more = model.state.barriers.length - open.length;
  if (more > 0) open.push(element("p", "none", `and ${count(more)} that opened later`));
  fill(find("barriers"), open.length ? open : [element("p", "none", "No named barrier is open.")]);
  const lasts = model.state.stragglers.map((straggler) => {
    const most = Math.max(1, ...model.state.stragglers.map((other) => other.waited_ms));
    const bar = barOf(["away", Math.max(0.01, straggler.waited_ms / most)]);
    return rankRow(straggler.rank, bar, `${plural(straggler.barriers, "barrier")}, waited for ${duration(straggler.waited_ms)}`);
  });
  fill(find("stragglers"), lasts.length ? lasts : [element("p", "none", "None of the script's was released in this generation.")]);
}

function drawGenerations() {
  const lines = model.state.generations;
  fill(find("timeline"), lines.map((line) => {
    const long = line.lasted_ms ?? line.age_ms ?? 0;
    const span = element("span", line.broken ? "broken" : line.end_reason ? "ended" : "", `${line.generation}`);
    span.style.flexGrow = `${1 + Math.log1p(long / 1000)}`;
    return span;
  }));
  fill(find("generations"), [...lines].reverse().map((line) => {
    const since = line.age_ms === null ? "before this coordinator started" : `since ${clock(line.age_ms)}`;
    const lasted = line.lasted_ms === null ? "" : `, lasted ${duration(line.lasted_ms)}`;
    const item = element("li", "", element("strong", "", `${line.generation}`), ` · ${plural(line.size, "rank")} · ${since}${lasted} · ${line.reason}`);
    if (line.end_reason) item.append(element("span", line.broken ? "end broken" : "end", `ended: ${line.end_reason}`));
    return item;
  }));
}

// The others wait for the rank with the longest time between operations.
function drawSteps() {
  const known = model.byOwnTime();
  const most = Math.max(1e-9, ...known.map((m) => m.stepMs));
  const rows = known.slice(0, BARS).map((m) => {
    const bar = barOf(["own", m.ownMs / most], ["within", (m.stepMs - m.ownMs) / most]);
    return rankRow(m.rank, bar, `${milliseconds(m.ownMs)} + ${milliseconds(m.stepMs - m.ownMs)} ms`);
  });
  if (known.length > BARS) rows.push(element("p", "none", `and ${plural(known.length - BARS, "rank")} that need less between operations`));
  fill(find("steps"), rows.length ? rows : [element("p", "none", "No operation ended lately.")]);
}

// Where the time of training steps goes. The others wait for the rank that computes longest.
function drawTraining() {
  const known = model.byComputeTime();
  find("training-card").hidden = known.length === 0;
  const most = Math.max(1e-9, ...known.map(({ training }) => training.computeMs + training.exposedMs));
  const rows = known.slice(0, BARS).map(({ rank, training: { steps, computeMs, exposedMs, hiddenMs } }) => {
    const bar = barOf(["own", (computeMs - hiddenMs) / most], ["within", hiddenMs / most], ["away", exposedMs / most]);
    bar.title = `${plural(steps, "step")}; ${milliseconds(hiddenMs)} ms of communication while it computes`;
    return rankRow(rank, bar, `${milliseconds(computeMs)} + ${milliseconds(exposedMs)} ms`);
  });
  if (known.length > BARS) rows.push(element("p", "none", `and ${plural(known.length - BARS, "rank")} that compute less`));
  fill(find("training"), rows);
}

function drawEvents() {
  fill(find("events"), [...model.state.occurrences].reverse().map((happened) => {
    const badge = { generation: "active", back: "active", broken: "dead", barrier: "stalled", rendezvous: "stalled", ended: "left" };
    const mark = element("span", "", element("span", `badge ${badge[happened.kind] || happened.kind}`, happened.kind));
    return element("li", "", element("time", "", clock(happened.age_ms)), mark, element("span", "", happened.text));
  }));
  if (!model.state.occurrences.length) fill(find("events"), [element("li", "none", "Nothing yet.")]);
}

function drawLinks() {
  const size = model.size();
  find("links").hidden = size < 2;
  const kinds = [...new Set(model.links.map((link) => link.kind))].sort();
  const busiest = model.links.reduce((best, link) => ((link.bytesPerSecond || 0) > (best?.bytesPerSecond || 0) ? link : best), null);
  setText(find("link-scale"), kinds.length ? `row sends to column · ${kinds.join(", ")}` : "");
  setText(find("link-hint"), busiest && busiest.bytesPerSecond
    ? `Busiest: rank ${busiest.from} → rank ${busiest.to}, ${bytes(busiest.bytesPerSecond)}/s by ${busiest.kind}.`
    : "Nothing was sent between ranks in the last seconds.");
  if (size >= 2) linkAt = matrix(find("links"), size, model.links);
}

async function refreshJobs() {
  try {
    const answer = await fetch("api/v1/jobs");
    const jobs = await answer.json();
    if (!view.job && jobs.length) selectJob(jobs[0].job);
    if (source?.readyState === EventSource.CLOSED) connect(); // refused; only lost connections are restored by the browser
    if (!view.job) {
      noteNews();
      showNoJob();
    }
    const select = find("job");
    fill(select, jobs.map((job) => {
      const option = element("option", "", `${job.job} (${job.members})`);
      option.setAttribute("value", job.job);
      return option;
    }));
    select.value = view.job;
  } catch {
    // updateConnection shows that the coordinator does not answer.
  }
  setTimeout(refreshJobs, view.job ? 5000 : 1000);
}

function selectJob(job) {
  view.job = job;
  view.page = 0;
  connect();
}

function noteNews() {
  lastMessage = Date.now();
  updateConnection();
}

function updateConnection() {
  const silent = Date.now() - lastMessage;
  const live = lastMessage > 0 && silent < STALE_MS;
  document.body.classList.toggle("stale", lastMessage > 0 && !live);
  find("connection").className = `connection ${live ? "live" : ""}`;
  setText(find("connection"), live ? "live" : lastMessage ? `no news for ${duration(silent)}` : "connecting");
}

function showTip(event, text) {
  const tip = find("tip");
  tip.hidden = !text;
  tip.textContent = text;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 280)}px`;
  tip.style.top = `${event.clientY + 14}px`;
}

function tipText(member) {
  const rank = member.rank >= 0 ? `rank ${member.rank}` : "no rank";
  const about = [member.host, member.device, member.doing, member.reason].filter(Boolean).join(" · ");
  return `${rank}: ${member.name}, ${member.state}${about ? `\n${about}` : ""}`;
}

find("job").addEventListener("change", (event) => selectJob(event.target.value));
find("tiles").addEventListener("mousemove", (event) => {
  const member = memberAt(event.offsetX, event.offsetY);
  showTip(event, member ? tipText(member) : "");
});
find("links").addEventListener("mousemove", (event) => showTip(event, linkAt(event.offsetX, event.offsetY)));
for (const id of ["tiles", "links"]) find(id).addEventListener("mouseleave", (event) => showTip(event, ""));
document.querySelector("#ranks thead").addEventListener("click", (event) => {
  const name = event.target.dataset.sort;
  if (!name) return;
  view.sort = view.sort === name ? null : name;
  drawn = false;
  draw();
});
addEventListener("resize", () => { drawn = false; draw(); });
setText(find("headline"), "Waiting for the coordinator");
setText(find("subline"), "");
updateConnection();
setInterval(updateConnection, 500);
if (view.job) connect();
refreshJobs();
