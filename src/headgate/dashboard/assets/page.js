// The dashboard: reads one frame a second and draws it. Text from the server is only ever assigned to textContent.
// URLs are relative to the page, so that it works behind a proxy that adds a prefix.

const LEAST_S = 60; // shortest time span of the charts
const MOST_S = 240; // longest
const SILENT_MS = 6000; // without data, after which the stream is reopened
const PHASES = ["queued", "prefill", "transfer", "decode", "moving"];
const KEY = "headgate.key";

const $ = (id) => document.getElementById(id);

// ------------------------------------------------------------------------------------------------ small helpers

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function svg(tag, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const count = (value) => number.format(value);
const rate = (value) => (value === null || value === undefined ? "–" : value < 10 ? value.toFixed(1) : count(value));
const share = (value) => (value === null ? "–" : `${Math.round(100 * value)} %`);

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.01) return `${(1000 * value).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(1000 * value)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const left = Math.round(value % 60);
  return `${Math.floor(value / 60)} min${left ? ` ${left} s` : ""}`;
}

/** A duration in whole seconds, minutes or hours. */
function whole(value) {
  const unit = value < 60 ? ["s", 1] : value < 3600 ? ["min", 60] : ["h", 3600];
  return `${Math.max(1, Math.floor(value / unit[1]))} ${unit[0]}`;
}

/** Give `parent` one child per item. A child is reused as long as its key exists, so that it keeps the focus. */
function keyed(parent, items, key, create, update) {
  const kept = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let before = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let child = kept.get(name);
    kept.delete(name);
    if (!child) {
      child = create(item);
      child.dataset.key = name;
    }
    if (child === before) before = before.nextElementSibling;
    else parent.insertBefore(child, before);
    update(child, item);
  }
  for (const child of kept.values()) child.remove();
}

/** A bar of `[tone, share]` pieces. */
function drawBar(bar, pieces) {
  keyed(
    bar,
    pieces.map(([tone, width], index) => ({ tone, width, index })),
    (piece) => piece.index,
    () => make("span"),
    (span, piece) => {
      span.dataset.tone = piece.tone;
      span.style.width = `${(100 * piece.width).toFixed(2)}%`;
    },
  );
}

function note(text, bad = false) {
  const shown = make("div", { class: bad ? "note bad" : "note" }, text);
  $("notes").append(shown);
  setTimeout(() => shown.remove(), bad ? 9000 : 5000);
}

// ---------------------------------------------------------------------------------------------------------- HTTP

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function refusal(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not JSON in our error format: show the status
  }
  return new Refused(response.status, message);
}

async function ask(method, path, body) {
  const options = { method, headers: headers() };
  if (body !== undefined) {
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const response = await fetch(path, options);
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** The data of each event of a stream; `touch` is called whenever bytes arrive. */
async function* events(response, touch = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    touch();
    const whole = (rest + value).split("\n\n");
    rest = whole.pop();
    for (const event of whole) {
      const lines = event.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

async function sure(question, yes) {
  const dialog = $("sure");
  write($("sure-question"), question);
  write($("sure-yes"), yes);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

/** Run the action of a button: the button is disabled meanwhile, and an error is shown. */
async function act(button, work) {
  button.dataset.busy = "1";
  button.disabled = true;
  try {
    await work();
  } catch (error) {
    note(error.message, true);
  } finally {
    delete button.dataset.busy;
    button.disabled = false;
    if (frame) drawControls(frame);
  }
}

// ----------------------------------------------------------------------------------------------------- the stream

let frame = null; // the latest frame
let points = []; // of the charts
let stream = null; // AbortController of the event stream
let keyGiven = () => {}; // resolves the promise that waits for a key
const pasts = new Map(); // request id -> its observed phases, each with its start time

async function watch() {
  let wait_s = 1;
  for (;;) {
    try {
      await follow(() => { wait_s = 1; });
      lost("the server closed the stream", wait_s);
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        lost(error.message, null);
        askForKey();
        await new Promise((resolve) => { keyGiven = resolve; });
        continue;
      }
      lost(error instanceof Refused ? error.message : "disconnected", wait_s);
    }
    await new Promise((wake) => setTimeout(wake, 1000 * wait_s));
    wait_s = Math.min(2 * wait_s, 8);
  }
}

async function follow(onFrame) {
  stream = new AbortController();
  let watchdog = null;
  const touch = () => {
    clearTimeout(watchdog);
    watchdog = setTimeout(() => stream.abort(), SILENT_MS);
  };
  touch();
  try {
    const response = await fetch("dashboard/events", { headers: headers(), signal: stream.signal });
    if (!response.ok) throw await refusal(response);
    for await (const data of events(response, touch)) {
      show(JSON.parse(data));
      onFrame();
    }
  } finally {
    clearTimeout(watchdog);
    stream.abort();
  }
}

function lost(reason, wait_s) {
  document.body.classList.add("stale");
  $("link").dataset.link = "lost";
  write($("link"), wait_s === null ? reason : `${reason}; trying again in ${wait_s} s`);
}

function show(next) {
  frame = next;
  document.body.classList.remove("stale");
  $("link").dataset.link = "live";
  write($("link"), "live");
  if (next.history) points = next.history;
  else if (next.now) points.push(next.now);
  const newest = points.length ? points[points.length - 1][AT] : 0;
  while (points.length && points[0][AT] < newest - MOST_S) points.shift();
  drawHead(next);
  drawControls(next);
  drawFleet(next);
  drawLines();
  drawRequests(next);
  refreshDetails();
}

function drawHead(next) {
  const viewer = next.admin ? "admin" : next.tenant || "no key";
  write($("what"), [next.model || "no model", `${next.kind} ${next.version}`, viewer].join(" · "));
  $("state").dataset.state = next.state;
  write($("state"), next.state);
  drawTitle();
}

function drawTitle() {
  const shown = document.body.classList.contains("one") ? details : frame?.state;
  document.title = [shown, "Headgate"].filter(Boolean).join(" · ");
}

// --------------------------------------------------------------------------------------------------- the controls

function drawControls(next) {
  for (const id of ["mode", "pause", "resume"]) {
    if ($(id).dataset.busy) continue;
    $(id).disabled = !next.admin;
    $(id).title = next.admin ? "" : "requires the admin key";
  }
  if (!$("stop").dataset.busy) $("stop").disabled = answering === null;
  write($("key"), sessionStorage.getItem(KEY) ? "Key set" : "Key");
}

$("pause").addEventListener("click", () =>
  act($("pause"), async () => {
    const mode = $("mode").value;
    const many = frame ? frame.total : 0;
    const question = `Pause and abort ${many} request${many === 1 ? "" : "s"}? Their clients get partial answers.`;
    if (mode === "abort" && many && !(await sure(question, "Pause"))) return;
    const { result } = await ask("POST", "v1/pause", { mode, new_requests: mode === "abort" ? "reject" : "queue" });
    note(`${result.state}: ${result.aborted ?? 0} requests aborted`);
  }));

$("resume").addEventListener("click", () =>
  act($("resume"), async () => note((await ask("POST", "v1/resume", {})).result.state)));

async function askForKey() {
  const dialog = $("key-dialog");
  if (dialog.open) return;
  dialog.returnValue = "cancel";
  $("key-value").value = "";
  dialog.showModal();
  await new Promise((done) => dialog.addEventListener("close", done, { once: true }));
  const key = $("key-value").value.trim();
  $("key-value").value = "";
  if (dialog.returnValue === "use" && key) sessionStorage.setItem(KEY, key);
  else if (dialog.returnValue === "forget") sessionStorage.removeItem(KEY);
  else return;
  pasts.clear();
  settled = false;
  stream?.abort();
  keyGiven();
}

$("key").addEventListener("click", askForKey);

// ------------------------------------------------------------------------------------------------------ the fleet

const FIGURES = ["running", "waiting", "tokens/s", "weights"];
const BLOCKS = ["held", "leased", "cached", "free"];

function drawFleet(next) {
  keyed($("fleet"), next.cards, (card) => card.id, makeCard, fillCard);
}

function makeCard(card) {
  const drain = make("button", { type: "button", class: "card-drain" }, "Drain");
  drain.addEventListener("click", () => act(drain, () => drainWorker(card.id)));
  return make("li", { class: "card" },
    make("div", { class: "card-head" },
      make("div", {}, make("div", { class: "card-name" }), make("div", { class: "card-detail quiet" })),
      make("span", { class: "pill" })),
    make("dl", { class: "figures" },
      ...FIGURES.map((name) => make("div", {}, make("dt", {}, name), make("dd", {})))),
    make("div", { class: "bar", role: "img" }),
    make("div", { class: "card-foot" },
      make("ul", { class: "legend" }, ...BLOCKS.map((name) => make("li", { "data-tone": name }))),
      drain));
}

function fillCard(element, card) {
  write(element.querySelector(".card-name"), card.name);
  write(element.querySelector(".card-detail"), [card.role, card.detail].filter(Boolean).join(" · "));
  const pill = element.querySelector(".pill");
  pill.dataset.state = card.state;
  write(pill, card.state);
  const figures = [count(card.running), count(card.waiting), rate(card.tokens_s), card.version === null ? "–" : `v${card.version}`];
  element.querySelectorAll("dd").forEach((cell, index) => write(cell, figures[index]));
  const blocks = [card.held - card.leased, card.leased, card.cached, card.total - card.held - card.cached];
  drawBar(element.querySelector(".bar"), BLOCKS.slice(0, 3).map((name, i) => [name, card.total ? blocks[i] / card.total : 0]));
  const labels = BLOCKS.map((name, i) => `${name} ${count(Math.max(0, blocks[i]))}`);
  element.querySelector(".bar").setAttribute("aria-label", `KV blocks: ${labels.join(", ")}`);
  element.querySelectorAll(".legend li").forEach((item, i) => write(item, labels[i]));
  const drain = element.querySelector(".card-drain");
  drain.hidden = frame.kind !== "router" || !frame.admin || card.state === "draining";
}

async function drainWorker(url) {
  if (!(await sure(`Drain ${url}? It gets no more requests, finishes those it has, and leaves the fleet.`, "Drain"))) return;
  const answer = await ask("DELETE", `v1/workers?url=${encodeURIComponent(url)}`);
  note(answer.drained ? `${url} has left the fleet` : `${url} still has ${answer.in_flight} requests`);
}

// ----------------------------------------------------------------------------------------------------- the charts

// Indices of the fields of a Point; see frame.py.
const AT = 0, TOKENS = 1, REQUESTS = 2, RUNNING = 3, WAITING = 4, TTFT50 = 5, TTFT99 = 6, ITL50 = 7, ITL99 = 8, HITS = 9;
const RETRIES = 10, RESUMES = 11, ABORTS = 12;

const sum = (values) => values.reduce((a, b) => a + b, 0);
const aborts = (point) => sum(Object.values(point[ABORTS]));
const of = (index) => (point) => point[index];

const LINES = [
  { title: "Tokens/s", series: [of(TOKENS)], show: rate },
  { title: "Requests/s", series: [of(REQUESTS)], show: rate },
  { title: "First token", names: ["p50", "p99"], series: [of(TTFT50), of(TTFT99)], show: seconds },
  { title: "Between tokens", names: ["p50", "p99"], series: [of(ITL50), of(ITL99)], show: seconds },
  { title: "Sequences", names: ["running", "waiting"], series: [of(RUNNING), of(WAITING)], show: count },
  { title: "Prefix cache hits", series: [of(HITS)], show: share, top: 1 },
  { title: "Moves", names: ["retries", "resumes"], series: [of(RETRIES), of(RESUMES)], show: count, bars: true },
  { title: "Aborts", series: [aborts], show: count, bars: true, foot: abortCauses },
];
const WIDTH = 240, HEIGHT = 56;

function abortCauses() {
  const causes = new Map();
  for (const point of points) for (const [cause, n] of Object.entries(point[ABORTS])) causes.set(cause, (causes.get(cause) ?? 0) + n);
  return [...causes].sort((a, b) => b[1] - a[1]).map(([cause, n]) => `${cause.replaceAll("_", " ")} ${n}`).join(", ");
}

for (const line of LINES) {
  line.paths = line.series.map((_, index) => svg("path", { class: index ? "second" : "first" }));
  line.area = svg("path", { class: "area" });
  line.cursor = svg("path", { class: "cursor" });
  line.svg = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  line.svg.append(svg("path", { class: "axis", d: `M0 ${HEIGHT}H${WIDTH}` }), line.area, ...line.paths, line.cursor);
  line.svg.addEventListener("pointermove", (event) => pointAt(line, event));
  line.svg.addEventListener("pointerleave", () => { line.at = null; drawLine(line); });
  line.value = make("span", { class: "line-value" });
  line.left = make("span");
  line.right = make("span");
  $("lines").append(make("div", { class: "line" },
    make("div", { class: "line-head" }, make("span", { class: "line-title" }, line.title), line.value),
    line.svg,
    make("div", { class: "line-foot" }, line.left, line.right)));
}

function drawLines() {
  for (const line of LINES) drawLine(line);
}

/** The time at the right edge of the charts, and their span in seconds. */
function extent() {
  if (!points.length) return [0, LEAST_S];
  const end = points[points.length - 1][AT];
  return [end, Math.max(LEAST_S, end - points[0][AT])];
}

function drawLine(line) {
  const [end, span] = extent();
  const values = points.flatMap((point) => line.series.map((get) => get(point) ?? 0));
  const top = line.top ?? (Math.max(...values, 0) || 1);
  const x = (point) => WIDTH * (1 - (end - point[AT]) / span);
  const y = (value) => HEIGHT - 2 - (HEIGHT - 5) * Math.min(value / top, 1);
  const drawn = line.series.map((get, index) => (line.bars ? spikes(get, x, y, index) : curve(get, x, y)));
  drawn.forEach((path, index) => line.paths[index].setAttribute("d", path));
  line.area.setAttribute("d", line.bars || drawn.length > 1 ? "" : filled(drawn[0]));
  const shown = line.at === null || line.at === undefined ? points[points.length - 1] : nearest(line.at);
  line.cursor.setAttribute("d", line.at && shown ? `M${x(shown).toFixed(1)} 0V${HEIGHT}` : "");
  writeValues(line, shown);
  write(line.left, line.foot ? line.foot() : line.at && shown ? `${Math.round(end - shown[AT])} s ago` : `${seconds(span)} ago`);
  write(line.right, values.length ? `max ${line.show(Math.max(...values, 0))}` : "");
}

function writeValues(line, point) {
  const values = line.series.map((get) => (point ? line.show(get(point)) : "–"));
  const total = line.bars && !line.at ? line.series.map((get) => line.show(sum(points.map(get)))) : values;
  const parts = total.map((text, index) => {
    const name = line.names ? make("small", {}, ` ${line.names[index]}`) : "";
    return make("span", { class: index ? "second" : "" }, text, name, index + 1 < total.length ? " " : "");
  });
  line.value.replaceChildren(...parts);
  line.svg.setAttribute("aria-label", `${line.title}: ${line.value.textContent}`);
}

/** A line with gaps where there was no data or no viewer. */
function curve(get, x, y) {
  let path = "";
  let before = null;
  for (const point of points) {
    const value = get(point);
    if (value === null || value === undefined) {
      before = null;
      continue;
    }
    const joined = before !== null && point[AT] - before < 4;
    path += `${joined ? "L" : "M"}${x(point).toFixed(1)} ${y(value).toFixed(1)}`;
    before = point[AT];
  }
  return path;
}

/** The area below each piece of a curve. */
function filled(path) {
  return path.split("M").slice(1).map((piece) => {
    const x = piece.slice(0, piece.indexOf(" "));
    return `M${x} ${HEIGHT}L${piece}V${HEIGHT}Z`;
  }).join("");
}

function spikes(get, x, y, index) {
  return points.filter(get).map((point) => `M${(x(point) + index).toFixed(1)} ${HEIGHT}V${y(get(point)).toFixed(1)}`).join("");
}

function pointAt(line, event) {
  const box = line.svg.getBoundingClientRect();
  const [end, span] = extent();
  line.at = end - span * (1 - (event.clientX - box.left) / box.width);
  drawLine(line);
}

function nearest(at) {
  return points.reduce((best, point) => (Math.abs(point[AT] - at) < Math.abs(best[AT] - at) ? point : best), points[0]);
}

// ------------------------------------------------------------------------------------------------------- requests

// Indices of the fields of a RequestView; see frame.py.
const ID = 0, TENANT = 1, KIND = 2, PHASE = 3, AGE = 4, DONE_TOKENS = 5, WORKER = 6, MOVES = 7, FIRST_TOKEN = 8;

$("phases").append(...PHASES.map((phase) => make("li", { "data-tone": phase }, phase)));

function drawRequests(next) {
  const now = performance.now() / 1000;
  remember(next.requests, now);
  const oldest = Math.max(10, ...next.requests.map((request) => request[AGE]));
  keyed($("rows"), next.requests, (request) => request[ID], makeRow, (row, request) => fillRow(row, request, now, oldest));
  const more = next.total - next.requests.length;
  write($("total"), next.total ? `${count(next.total)}${more > 0 ? `, the oldest ${next.requests.length} shown` : ""}` : "");
  $("none").hidden = next.requests.length > 0;
  write($("none"), next.sees_requests ? "No requests in flight." : "Requests are shown only with a key.");
  $("scale").hidden = !next.requests.length;
  write($("scale").firstElementChild, `${seconds(oldest)} ago`);
  drawEnded(next);
}

function remember(requests, now) {
  const live = new Set(requests.map((request) => request[ID]));
  for (const id of pasts.keys()) if (!live.has(id)) pasts.delete(id);
  for (const request of requests) {
    const began = now - request[AGE];
    const past = pasts.get(request[ID]);
    if (!past || past[0].at < began - 2) pasts.set(request[ID], [{ phase: request[PHASE], at: began }]);
    else if (past[past.length - 1].phase !== request[PHASE]) past.push({ phase: request[PHASE], at: now });
    if (request[FIRST_TOKEN] !== null) correct(pasts.get(request[ID]), began + request[FIRST_TOKEN]);
  }
}

/** Let decode begin at the first token, which came between two frames. */
function correct(past, at) {
  const decode = past.findIndex((piece) => piece.phase === "decode");
  if (decode < 0) return;
  const before = decode ? past.slice(0, decode).filter((piece) => piece.at < at) : [{ phase: "prefill", at: past[0].at }];
  past.splice(0, decode + 1, ...before, { phase: "decode", at });
}

function makeRow(request) {
  const id = request[ID];
  const abort = make("button", { type: "button", class: "row-abort danger", "aria-label": `Abort ${id}` }, "Abort");
  abort.addEventListener("click", () => act(abort, () => abortRequest(id)));
  return make("li", { class: "row" },
    make("button", { type: "button", class: "row-id mono", title: id, onclick: () => openDetails(id) }, id),
    make("div", { class: "bar", role: "img" }),
    make("span", { class: "number row-age" }),
    make("span", { class: "number row-tokens" }),
    make("span", { class: "row-worker" }),
    abort);
}

function fillRow(row, request, now, oldest) {
  const past = pasts.get(request[ID]);
  const ends = [...past.slice(1).map((piece) => piece.at), now];
  drawBar(row.querySelector(".bar"), past.map((piece, index) => [piece.phase, (ends[index] - piece.at) / oldest]));
  const moved = request[MOVES] ? `, moved ${request[MOVES]}×` : "";
  row.querySelector(".bar").setAttribute("aria-label", `${request[PHASE]}${moved}`);
  row.querySelector(".bar").title = `${request[PHASE]}${moved}`;
  write(row.querySelector(".row-age"), seconds(request[AGE]));
  write(row.querySelector(".row-tokens"), `${count(request[DONE_TOKENS])} tok`);
  write(row.querySelector(".row-worker"), [workerName(request[WORKER]), request[TENANT]].filter(Boolean).join(" · "));
  row.classList.toggle("open", details === request[ID]);
}

function workerName(id) {
  if (id === null) return "";
  return frame?.cards.find((card) => card.id === id)?.name ?? id;
}

async function abortRequest(id) {
  const { result } = await ask("POST", "v1/abort_requests", { req_ids: [id] });
  const [ended] = result.aborted;
  note(ended ? `${id} aborted after ${ended.output_token_count} tokens` : `${id} had already finished`);
}

// --------------------------------------------------------------------------------------------------- ended requests

// Indices of the fields of an EndedView; see frame.py.
const ENDED_ID = 0, ENDED_TENANT = 1, ENDED_KIND = 2, AGO = 3, TOOK = 4, END = 5, ENDED_TOKENS = 6, ENDED_MOVES = 7;
const LEAST_ENDED = 3; // number of ended requests shown beside many in flight

function drawEnded(next) {
  const shown = next.ended.slice(0, Math.max(LEAST_ENDED, next.ended.length - next.requests.length));
  $("latest").hidden = !shown.length;
  keyed($("ended"), shown, (request) => `${request[ENDED_TENANT]}/${request[ENDED_ID]}`, makeEnded, fillEnded);
  $("example").hidden = !next.sees_requests || shown.length > 0 || next.requests.length > 0;
  write($("example-command"), exampleCommand(next));
}

function makeEnded(request) {
  const id = request[ENDED_ID];
  return make("li", { class: "ended" },
    make("button", { type: "button", class: "row-id mono", title: id, onclick: () => openDetails(id) }, id),
    make("span", { class: "ended-end" }),
    make("span", { class: "number ended-tokens" }),
    make("span", { class: "number ended-took" }),
    make("span", { class: "number ended-ago quiet" }));
}

function fillEnded(row, request) {
  const moved = request[ENDED_MOVES] ? `moved ${request[ENDED_MOVES]}×` : "";
  const remarks = [request[ENDED_KIND], request[END].replaceAll("_", " "), moved, request[ENDED_TENANT]];
  write(row.querySelector(".ended-end"), remarks.filter(Boolean).join(" · "));
  write(row.querySelector(".ended-tokens"), request[ENDED_TOKENS] === null ? "" : `${count(request[ENDED_TOKENS])} tok`);
  write(row.querySelector(".ended-took"), seconds(request[TOOK]));
  write(row.querySelector(".ended-ago"), `${whole(request[AGO])} ago`);
  row.classList.toggle("open", details === request[ENDED_ID]);
}

function exampleCommand(next) {
  const key = sessionStorage.getItem(KEY) ? " -H 'Authorization: Bearer KEY'" : "";
  const body = JSON.stringify({ messages: [{ role: "user", content: "What is the capital of Japan?" }], max_tokens: 100, stream: true });
  const url = new URL("v1/chat/completions", location.href).href;
  return `curl -N ${url} -H 'Content-Type: application/json'${key} \\\n  -d '${body}'`;
}

$("example-copy").hidden = !navigator.clipboard; // browsers have it on loopback and with TLS only
$("example-copy").addEventListener("click", () =>
  act($("example-copy"), async () => {
    await navigator.clipboard.writeText($("example-command").textContent);
    note("copied");
  }));

// ------------------------------------------------------------------------------------------ timeline of a request

let details = null; // id of the request whose timeline is open
let settled = false; // that request has ended: its timeline no longer changes

function openDetails(id) {
  if (details !== id) clearDetails();
  details = id;
  settled = false;
  $("details").hidden = false;
  write($("details-title"), id);
  $("details-link").href = `#request=${encodeURIComponent(id)}`;
  refreshDetails();
  $("details").scrollIntoView({ block: "nearest" });
}

function clearDetails() {
  for (const id of ["details-bar", "details-events", "details-facts", "details-log-rows"]) $(id).replaceChildren();
  for (const id of ["details-bar", "details-log", "details-state", "details-abort"]) $(id).hidden = true;
}

$("details-close").addEventListener("click", () => {
  details = null;
  $("details").hidden = true;
});

$("details-abort").addEventListener("click", () => act($("details-abort"), () => abortRequest(details)));

/** The page of one request: `#request=ID`. */
function readHash() {
  const name = new URLSearchParams(location.hash.slice(1)).get("request");
  document.body.classList.toggle("one", Boolean(name));
  if (name) openDetails(name);
  drawTitle();
}

addEventListener("hashchange", readHash);

async function refreshDetails() {
  const id = details;
  if (id === null || settled) return;
  try {
    const record = await ask("GET", `v1/requests/${encodeURIComponent(id)}`);
    if (details === id) drawDetails(record);
  } catch (error) {
    if (details !== id || !(error instanceof Refused)) return; // when the connection is back, the next frame asks again
    settled = true;
    clearDetails();
    $("details-events").replaceChildren(make("li", { "data-tone": "none" }, error.message));
  }
}

function drawDetails(record) {
  settled = record.status === "finished";
  drawDetailsState(record);
  $("details-bar").hidden = $("details-log").hidden = false;
  const timeline = timelineOf(record);
  const whole = Math.max(timeline.end, 0.001);
  drawBar($("details-bar"), timeline.spans.map(([phase, from, to]) => [phase, (to - from) / whole]));
  $("details-bar").setAttribute("aria-label", timeline.spans.map(([phase, from, to]) => `${phase} ${seconds(to - from)}`).join(", "));
  $("details-events").replaceChildren(...timeline.steps.map(([name, time, tone, place]) =>
    make("li", { "data-tone": tone ?? "none" }, name, ...[time, place].filter(Boolean).map((text) => make("span", { class: "quiet" }, text)))));
  $("details-facts").replaceChildren(...facts(record).map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
}

function drawDetailsState(record) {
  const [state, text] = record.usage ? ["ended", record.usage.finish_reason] : ["running", record.request.phase];
  $("details-state").hidden = false;
  $("details-state").dataset.state = state;
  write($("details-state"), text);
  if (!$("details-abort").dataset.busy) $("details-abort").hidden = settled;
  $("details-log-rows").replaceChildren(...record.events.map((event) =>
    make("tr", {}, ...[seconds(event.at_s), event.event.replaceAll("_", " "), String(event.choice ?? "")].map((text) => make("td", {}, text)))));
}

/** The steps of a request in order, each with its duration: accepted → queued → prefill → transfer → decode → moved → finished. */
function timelineOf(record) {
  const happened = (name) => record.events.find((event) => event.event === name)?.at_s;
  const { spans, steps, end } = record.stages?.length ? routerTimeline(record) : serverTimeline(record, happened);
  if (happened("end_asked") !== undefined) steps.push(["abort requested", `at ${seconds(happened("end_asked"))}`]);
  if (record.usage) steps.push([`finished: ${record.usage.finish_reason}, ${record.usage.cause.replaceAll("_", " ")}`, seconds(end)]);
  return { spans, steps: [["accepted", ""], ...steps], end };
}

/** From the record of a server. */
function serverTimeline(record, happened) {
  const end = record.usage?.elapsed_s ?? record.request?.age_s ?? 0;
  const running = happened("running");
  const token = happened("first_token");
  const seen = pasts.get(record.request_id) ?? [];
  const fetched = seen.some((piece) => piece.phase === "transfer") || record.request?.phase === "loading";
  const spans = [["queued", 0, running ?? end]];
  if (running !== undefined) spans.push([fetched ? "transfer" : "prefill", running, token ?? end]);
  if (token !== undefined) spans.push(["decode", token, end]);
  return { spans, steps: spans.map(([phase, from, to]) => [phase, seconds(to - from), phase]), end };
}

/** From the record of a router, which has one stage per worker. Real stages overlap: a transfer begins before its prompt
    is computed. Here each stage begins where the previous one ends. */
function routerTimeline(record) {
  const age = frame?.requests.find((request) => request[ID] === record.request_id)?.[AGE] ?? 0;
  const last = Math.max(...record.stages.map((stage) => stage.ended_s ?? Math.max(age, stage.first_token_s ?? stage.began_s)));
  const many = new Set(record.stages.map((stage) => stage.worker)).size > 1;
  const spans = [];
  const steps = [];
  let end = 0;
  const push = (phase, to, remark, name = phase) => {
    if (!(to > end)) return;
    spans.push([phase, end, to]);
    steps.push([name, seconds(to - end), phase, remark]);
    end = to;
  };
  const at = (stage) => (many ? `at ${workerName(stage.worker)}` : "");
  let fetched = false; // its KV is fetched from a prefill worker
  let left = null; // why the previous worker no longer has it
  for (const stage of record.stages) {
    if (left === null) push("queued", stage.began_s);
    else push("moving", Math.max(stage.began_s, end + 1e-6), left, "moved");
    left = stage.left;
    const answers = record.stages.find((each) => each.part === "answer" && each.began_s >= stage.began_s);
    if (stage.part === "prompt") {
      push("prefill", Math.min(stage.ended_s ?? last, answers?.first_token_s ?? last), at(stage));
      fetched = true;
      continue;
    }
    const until = stage.ended_s ?? last;
    push(fetched ? "transfer" : "prefill", Math.min(stage.first_token_s ?? (left ? end : until), until), at(stage));
    push("decode", until, at(stage));
    fetched = false;
  }
  if (left !== null) steps.push(["moved", "", "moving", left]);
  return { spans, steps, end };
}

function facts(record) {
  const usage = record.usage;
  if (usage) {
    const all = (name) => count(sum(usage.choices.map((choice) => choice[name])));
    return present([["kind", usage.kind], ["tenant", usage.tenant], ["arrived", new Date(1000 * usage.arrived).toLocaleString()],
      ["prompt", all("prompt_tokens")], ["cached", all("cached_tokens")], ["output", all("output_tokens")],
      ["first token", seconds(usage.first_token_s)], ["tokens/s", rate(speed(usage))], ["worker", workerName(record.worker ?? null)],
      ["choices", usage.choices.length > 1 ? usage.choices.map((each) => each.finish_reason).join(", ") : ""],
      ...Object.entries(usage.tags), ["trace", usage.traceparent]]);
  }
  const request = record.request;
  const blocks = sum(request.choices.map((choice) => choice.blocks));
  return present([["kind", request.kind], ["tenant", request.tenant], ["output", count(request.output_tokens)], ["blocks", count(blocks)],
    ["choices", request.choices.length > 1 ? request.choices.length : ""], ["worker", workerName(record.worker ?? request.worker ?? null)],
    ...Object.entries(request.tags)]);
}

const present = (pairs) => pairs.filter(([, value]) => value !== "" && value !== undefined);

/** Tokens per second after the first token; null for a single token. */
function speed(usage) {
  const tokens = sum(usage.choices.map((choice) => choice.output_tokens)) - usage.choices.length;
  const took = usage.elapsed_s - (usage.first_token_s ?? usage.elapsed_s);
  return tokens > 0 && took > 0 ? tokens / took : null;
}

// ----------------------------------------------------------------------------------------------------------- chat

let conversation = [];
let answering = null; // request id of the current answer

$("words").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    $("say").requestSubmit();
  }
});

$("forget").addEventListener("click", () => {
  conversation = [];
  $("talk").replaceChildren(make("p", { class: "empty" }, "Send a message. Stop keeps the partial answer."));
});

$("stop").addEventListener("click", () =>
  act($("stop"), async () => { if (answering) await ask("POST", "v1/abort_requests", { req_ids: [answering] }); }));

$("say").addEventListener("submit", async (event) => {
  event.preventDefault();
  const words = $("words").value.trim();
  if (!words || answering) return;
  $("words").value = "";
  if (!conversation.length) $("talk").replaceChildren();
  conversation.push({ role: "user", content: words });
  say("user", words);
  await answer();
});

function say(role, text) {
  const words = make("span", {}, text);
  const remark = make("span", { class: "said-note" });
  $("talk").append(make("div", { class: `said ${role}` }, words, remark));
  $("talk").scrollTop = $("talk").scrollHeight;
  return { words, remark };
}

async function answer() {
  const { words, remark } = say("assistant", "");
  const began = performance.now();
  answering = `page-${crypto.getRandomValues(new Uint32Array(2)).join("")}`;
  $("send").disabled = true;
  $("stop").disabled = false;
  let text = "";
  try {
    for await (const chunk of chunks(answering)) {
      text += chunk.text;
      words.textContent = text;
      if (chunk.ended) write(remark, remarkOn(chunk, began));
      $("talk").scrollTop = $("talk").scrollHeight;
    }
  } catch (error) {
    remark.className = "said-note bad";
    write(remark, error.message);
  }
  if (text) conversation.push({ role: "assistant", content: text });
  else conversation.pop(); // drop a question without an answer
  answering = null;
  $("send").disabled = false;
  $("stop").disabled = true;
}

function remarkOn(chunk, began) {
  const took = seconds((performance.now() - began) / 1000);
  return chunk.ended === "abort" ? `stopped after ${took}; partial answer` : `${chunk.ended} after ${took}`;
}

async function* chunks(id) {
  const body = {
    messages: conversation,
    stream: true,
    request_id: id,
    max_tokens: Number($("most").value) || 256,
    temperature: $("warmth").value === "" ? undefined : Number($("warmth").value), // undefined: as the model recommends
  };
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!response.ok) throw await refusal(response);
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0];
    if (choice) yield { text: choice.delta?.content ?? "", ended: choice.finish_reason };
  }
}

readHash();
watch();
