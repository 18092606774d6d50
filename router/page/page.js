"use strict";
/* The status page: polls /v1/stats once a second while it is seen, and talks to /v1/chat/completions.
 * Text from the model reaches the document as text nodes only. */

const POLL_MS = 1000, SLOW_MS = 3000, EMPTY = "\u2013";
const byId = id => document.getElementById(id);
const key = { value: sessionStorage.getItem("ds4-key") || "", asked: false };

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(child => child != null));
  return node;
}

function headers(more) {
  return Object.assign(key.value ? { authorization: "Bearer " + key.value } : {}, more);
}

/* ---- numbers as people read them ---- */

function short(n, digits = 3) {
  if (n == null) return EMPTY;
  if (n >= 1e6) return (n / 1e6).toPrecision(digits) + "M";
  if (n >= 1e4) return (n / 1e3).toPrecision(digits) + "k";
  return n >= 100 || Number.isInteger(n) ? String(Math.round(n)) : n.toPrecision(2);
}
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) { n /= 1024; at++; }
  return (at === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)) + " " + units[at];
}
function span(seconds) {
  if (seconds == null) return EMPTY;
  if (seconds < 1) return "now";
  if (seconds < 90) return Math.round(seconds) + " s";
  if (seconds < 5400) return Math.round(seconds / 60) + " min";
  if (seconds < 129600) return Math.round(seconds / 3600) + " h";
  return Math.round(seconds / 86400) + " d";
}
const ago = seconds => seconds == null ? EMPTY : seconds < 1 ? "now" : span(seconds) + " ago";
const percent = ratio => ratio == null ? EMPTY : Math.round(100 * ratio) + " %";
function millis(seconds) {
  if (seconds == null) return EMPTY;
  return seconds < 0.01 ? (1e3 * seconds).toFixed(1) : String(Math.round(1e3 * seconds));
}
const plural = (n, word) => n + " " + word + (n === 1 ? "" : "s");

/* ---- the rig ---- */

/* A list whose rows stay the same nodes, so that the page does not flicker under a reader. */
function keep(list, n, make) {
  while (list.children.length > n) list.lastChild.remove();
  while (list.children.length < n) list.append(make());
  return [...list.children];
}
function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
function tone(node, value) {
  if (node.dataset.tone !== value) node.dataset.tone = value;
}
function pairs(list, rows) {
  keep(list, rows.length, () => el("div", {}, el("dt"), el("dd"))).forEach((row, i) => {
    const [name, value, unit, mark] = rows[i], dd = row.lastChild;
    set(row.firstChild, name);
    if (dd.textContent !== value + (unit ? " " + unit : ""))
      dd.replaceChildren(value, ...(unit ? [" ", el("small", {}, unit)] : []));
    dd.className = mark || "";
  });
}
function bar(node, shares) {
  keep(node, shares.length, () => el("i")).forEach((part, i) => {
    part.style.width = 100 * Math.max(0, Math.min(1, shares[i])) + "%";
  });
}

const STATES = {
  ready: ["Ready", "good"], degraded: ["Degraded", "warn"], recovering: ["Recovering", "bad"],
  draining: ["Draining", "warn"], failed: ["Failed", "bad"], starting: ["Waiting for stages", "warn"],
  loading: ["Loading", "warn"], forming: ["Forming", "warn"],
};
const STAGES = { ready: "good", down: "bad", failed: "bad" };

function showState(s) {
  const [text, mark] = STATES[s.state] || [s.state, "warn"];
  const loading = s.state === "loading" && s.load_fraction > 0;
  set(byId("state").lastChild, loading ? "Loading " + percent(s.load_fraction) : text);
  tone(byId("state"), mark);
  set(byId("model"), s.model);
  document.title = (mark === "good" ? "" : text + " \u00b7 ") + "ds4 " + s.model;
  const notice = byId("notice");
  notice.hidden = s.reasons.length === 0;
  notice.className = "notice" + (s.ready || mark === "warn" ? " calm" : "");
  set(notice, s.reasons.join(" \u00b7 "));
}

function showNow(s) {
  const line = s.history.generated_tokens_per_second, peak = Math.max(1, ...line);
  const rate = s.generated_tokens_per_second;
  set(byId("out"), rate < 0.05 ? "0" : rate >= 100 ? String(Math.round(rate)) : rate.toFixed(1));
  set(byId("peak"), "peak " + short(Math.max(0, ...line)));
  if (line.length > 1) {
    const wide = Math.max(30, line.length) - 1, x = i => 240 - (line.length - 1 - i) * 240 / wide;
    set(byId("since"), span(wide + 1) + " ago");
    const y = v => 54 - 50 * v / peak;
    const points = line.map((v, i) => x(i).toFixed(1) + " " + y(v).toFixed(1)).join("L");
    document.querySelector("#spark .line").setAttribute("d", "M" + points);
    document.querySelector("#spark .area").setAttribute("d",
      "M" + x(0).toFixed(1) + " 56L" + points + "L240 56Z");
  }
  const running = s.decoding + s.prefilling + s.parked;
  pairs(byId("facts"), [
    ["Reading prompts", short(s.prefilled_tokens_per_second < 0.05 ? 0 : s.prefilled_tokens_per_second), "tokens/s"],
    ["Running", running + " of " + s.max_running, s.prefilling ? s.prefilling + " in prefill" : s.parked ? s.parked + " parked" : ""],
    ["Waiting", String(s.queued), s.queued ? "oldest " + span(s.oldest_queued_seconds) : ""],
    ["Bubble", percent(s.bubble_ratio), s.bubble_ratio == null ? "idle" : "of stage time"],
    ["Newest token", ago(s.last_token_age_seconds), ""],
    ["Canary", s.canary_age_seconds == null ? "not yet" : "right", s.canary_age_seconds == null ? "" : ago(s.canary_age_seconds)],
  ]);
}

function makeStage() {
  return el("li", { class: "stage" },
    el("h3", {}, el("i"), el("b"), el("span")),
    el("p", { class: "where" }),
    el("p", { class: "step" }),
    el("div", { class: "bar" }),
    el("p", { class: "small" }, el("span"), el("span")),
    el("div", { class: "bar" }),
    el("p", { class: "small" }, el("span"), el("span")),
    el("p", { class: "small card" }));
}

/* "71 °C · memory 80 °C · 148 W", and what slows the card down. */
function cardText(card) {
  if (!card) return "";
  return [card.core_celsius != null && Math.round(card.core_celsius) + " \u00b0C",
    card.memory_celsius != null && "memory " + Math.round(card.memory_celsius) + " \u00b0C",
    card.watts != null && Math.round(card.watts) + " W",
    card.slowed_by_heat && "slowed by heat", card.slowed_by_power_brake && "slowed by its power brake"]
    .filter(Boolean).join(" \u00b7 ");
}

function showStage(node, g, most) {
  const [head, where, step, busyBar, busyText, memoryBar, memoryText, card] = node.children;
  const slowed = g.card && (g.card.slowed_by_heat || g.card.slowed_by_power_brake);
  const mark = slowed && STAGES[g.state] === "good" ? "warn" : STAGES[g.state] || "warn", other = Math.max(0, g.resident_bytes - g.weights_bytes - g.cache_bytes);
  const gone = g.state === "down", total = g.weights_bytes + g.cache_bytes + other;
  tone(node, mark);
  set(head.children[1], "Stage " + g.stage);
  set(head.children[2], gone ? "down" + (g.heartbeat_age_seconds == null ? "" : " \u00b7 heard " + ago(g.heartbeat_age_seconds))
    : g.state === "loading" && g.load_fraction != null ? "loading " + percent(g.load_fraction)
    : g.state + (g.restarts ? " \u00b7 " + plural(g.restarts, "restart") : ""));
  set(where, g.last_layer < g.first_layer ? "not seen yet"
    : "layers " + g.first_layer + "\u2013" + g.last_layer + " \u00b7 " + (g.device || g.backend));
  where.title = [g.device, g.host].filter(Boolean).join(" on ");
  const time = g.decode_step_seconds != null ? g.decode_step_seconds : g.prefill_step_seconds;
  const text = gone ? EMPTY : millis(time);
  if (step.dataset.text !== text + time) {
    step.dataset.text = text + time;
    step.replaceChildren(text, el("small", {}, gone || time == null ? " ms a step"
      : g.decode_step_seconds != null ? " ms a step" : " ms a prompt step"));
  }
  bar(busyBar, gone ? [0] : [g.busy_ratio || 0, (g.wait_receive_ratio || 0) + (g.wait_token_ratio || 0) + (g.wait_send_ratio || 0)]);
  set(busyText.children[0], gone ? "" : g.busy_ratio == null ? "idle" : percent(g.busy_ratio) + " computing");
  set(busyText.children[1], !gone && g.sent_bytes_per_second > 0 ? bytes(g.sent_bytes_per_second) + "/s on" : "");
  bar(memoryBar, most > 0 && !gone ? [g.weights_bytes / most, g.cache_bytes / most, other / most] : [0]);
  set(memoryText.children[0], gone ? "" : bytes(g.weights_bytes) + " weights \u00b7 " + bytes(g.cache_bytes) + " cache");
  set(memoryText.children[1], gone ? "" : bytes(total));
  set(card, cardText(g.card));
}

function showPipeline(s) {
  const most = Math.max(1, ...s.stages.map(g => Math.max(g.resident_bytes, g.weights_bytes + g.cache_bytes)));
  const nodes = keep(byId("stages"), s.stages.length, makeStage);
  s.stages.forEach((g, i) => showStage(nodes[i], g, most));
  keep(byId("strip"), s.stages.length, () => el("i")).forEach((part, i) => {
    const g = s.stages[i];
    part.style.flexGrow = Math.max(1, g.last_layer - g.first_layer + 1);
    tone(part, STAGES[g.state] || "warn");
  });
  set(byId("pipeline-note"), plural(s.stages.length, "stage") + " \u00b7 " +
    plural(Math.max(...s.stages.map(g => g.layers)), "layer") + " \u00b7 context " + short(s.context_tokens));
}

function showCache(s) {
  const c = s.cache, total = c.total || 1, tokens = n => short(n * c.block_tokens);
  bar(byId("cache-bar"), [c.live / total, c.promised / total, c.cached / total]);
  set(byId("cache-note"), c.total ? percent((c.live + c.promised) / total) + " in use of " + tokens(c.total) + " tokens" : "no cache yet");
  pairs(byId("cache-legend"), [
    ["In use", tokens(c.live), ""], ["Promised", tokens(c.promised), ""],
    ["Kept", tokens(c.cached), ""], ["Free", tokens(c.free), ""],
  ]);
}

function showTotals(s) {
  const t = s.totals, hit = t.prompt_tokens > 0 ? t.cached_tokens / t.prompt_tokens : null;
  set(byId("uptime"), "up " + span(s.uptime_seconds));
  pairs(byId("totals"), [
    ["Answered", short(t.completed), ""],
    ["Failed", short(t.failed + t.timeout), "", t.failed + t.timeout > 0 ? "bad" : ""],
    ["Cancelled", short(t.cancelled), ""],
    ["Refused", short(t.refused), "", t.refused > 0 ? "warn" : ""],
    ["Tokens out", short(t.generated_tokens), ""],
    ["Prompt from cache", percent(hit), ""],
    ["Tool calls", short(t.tool_calls), ""],
    ["Effort lowered", short(t.effort_downgrades), "", t.effort_downgrades > 0 ? "warn" : ""],
    ["Loops caught", short(t.tripwires), ""],
    ["Markup repaired", short(t.parser_recoveries), ""],
  ]);
}

function showEvents(s) {
  const list = byId("events"), n = s.events.length;
  if (n === 0) {
    list.replaceChildren(el("li", { class: "empty" }, "Nothing yet."));
    return;
  }
  if (list.firstChild && list.firstChild.className === "empty") list.replaceChildren();
  keep(list, n, () => el("li", {}, el("time"), el("span"))).forEach((row, i) => {
    set(row.firstChild, ago(s.events[i].age_seconds));
    set(row.lastChild, s.events[i].text);
    row.lastChild.className = s.events[i].bad ? "bad" : "";
  });
}

function show(s) {
  byId("key").hidden = true;
  byId("main").hidden = false;
  showState(s);
  showNow(s);
  showPipeline(s);
  showCache(s);
  showTotals(s);
  showEvents(s);
}

function showLost(text) {
  set(byId("state").lastChild, text);
  tone(byId("state"), "bad");
  byId("notice").hidden = false;
  byId("notice").className = "notice";
  set(byId("notice"), "The router does not answer. What you see is the last it said.");
  document.title = "No answer \u00b7 ds4";
}

/* Nothing is asked for meanwhile: an address that goes on without a key is told to wait. */
function askKey() {
  key.asked = true;
  byId("main").hidden = true;
  byId("key").hidden = false;
  set(byId("state").lastChild, "Locked");
  tone(byId("state"), "off");
}

async function poll() {
  const stop = new AbortController(), timer = setTimeout(() => stop.abort(), SLOW_MS);
  try {
    const answer = await fetch("/v1/stats", { headers: headers(), signal: stop.signal });
    if (answer.status === 401 || answer.status === 429) askKey();
    else if (answer.ok) show(await answer.json());
    else showLost("Error " + answer.status);
  } catch (problem) {
    showLost("No answer");
  }
  clearTimeout(timer);
}

async function run() {
  for (;;) {
    if (!document.hidden && !key.asked) await poll();
    await new Promise(done => setTimeout(done, POLL_MS));
  }
}

/* ---- the chat ---- */

const SAMPLE_TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "Current weather of a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string" }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
      required: ["city"],
    },
  },
}];

const chat = { messages: [], stop: null };
const talk = byId("talk");

/* ```fences``` become blocks, `ticks` become code; everything else stays as it was written. */
function format(text) {
  return text.split(/^```[^\n]*\n?/m).flatMap((part, i) => {
    if (i % 2) return [el("pre", {}, part.replace(/\n$/, ""))];
    return part.split(/(`[^`\n]+`)/).map(piece =>
      /^`[^`\n]+`$/.test(piece) ? el("code", {}, piece.slice(1, -1)) : piece);
  });
}

function follow(change) {
  const near = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
  change();
  if (near) talk.scrollTop = talk.scrollHeight;
}

function showEmpty() {
  talk.replaceChildren(el("p", { class: "empty" }, "Ask the model something. Its reasoning is folded above the answer, and calls of tools are shown as they come."));
}

function addUser(text) {
  if (talk.firstChild && talk.firstChild.className === "empty") talk.replaceChildren();
  talk.append(el("div", { class: "msg user" }, el("div", {}, text)));
  talk.scrollTop = talk.scrollHeight;
}

/* An answer on its way: where each kind of text goes. */
function addAnswer() {
  const thought = el("p"), text = el("div", { class: "text" }), calls = el("div"), under = el("p", { class: "under" });
  const label = el("span", {}, "Thinking");
  const think = el("details", { class: "think busy", hidden: true }, el("summary", {}, label), thought);
  const node = el("article", { class: "msg" }, think, text, calls, under);
  follow(() => talk.append(node));
  return { node, think, label, thought, text, calls, under };
}

function showCall(view, call, answered) {
  let parsed = null;
  try { parsed = JSON.parse(call.function.arguments); } catch (unfinished) { /* shown as it came */ }
  const rows = parsed && typeof parsed === "object"
    ? Object.entries(parsed).flatMap(([name, value]) =>
      [el("dt", {}, name), el("dd", {}, typeof value === "string" ? value : JSON.stringify(value))])
    : [el("dt", {}, "arguments"), el("dd", {}, call.function.arguments)];
  const input = el("input", { placeholder: "its result", "aria-label": "Result of " + call.function.name });
  const form = el("form", {}, input, el("button", { type: "submit" }, "Return"));
  const card = el("div", { class: "call" }, el("h4", {}, call.function.name), el("dl", {}, ...rows), form);
  form.addEventListener("submit", event => {
    event.preventDefault();
    form.replaceWith(el("p", { class: "result" }, input.value));
    answered(call, input.value);
  });
  view.calls.append(card);
}

/* Server-sent events of one answer: calls take(chunk) for each. */
async function readStream(answer, take) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines)
      if (line.startsWith("data: ") && line !== "data: [DONE]") take(JSON.parse(line.slice(6)));
  }
}

function takeDelta(message, delta) {
  message.reasoning_content += delta.reasoning_content || "";
  message.content += delta.content || "";
  for (const part of delta.tool_calls || []) {
    const call = message.tool_calls[part.index] = message.tool_calls[part.index] ||
      { id: "", type: "function", function: { name: "", arguments: "" } };
    call.id = part.id || call.id;
    call.function.name += part.function.name || "";
    call.function.arguments += part.function.arguments || "";
  }
}

function offered() {
  if (!byId("tools-on").checked) return undefined;
  return JSON.parse(byId("tools-json").value);
}

function request() {
  return {
    messages: chat.messages, stream: true, stream_options: { include_usage: true },
    reasoning_effort: byId("effort").value, tools: offered(),
  };
}

function summary(answer, usage, firstMs, restMs) {
  const n = usage ? usage.completion_tokens : 0, parts = [plural(n, "token")];
  if (n > 1 && restMs > 0) parts.push(((n - 1) * 1e3 / restMs).toFixed(1) + " tokens/s");
  if (firstMs != null) parts.push("first after " + (firstMs / 1e3).toFixed(2) + " s");
  const effort = answer.headers.get("x-ds4-effort"), lowered = answer.headers.get("x-ds4-effort-downgraded");
  if (effort) parts.push("effort " + effort);
  return [parts.join(" \u00b7 "), ...(lowered ? [" \u00b7 ", el("b", {}, "lowered: " + lowered)] : [])];
}

function redraw(view, message) {
  follow(() => {
    view.think.hidden = message.reasoning_content === "";
    set(view.thought, message.reasoning_content.trim());
    const busy = message.content === "" && message.tool_calls.length === 0;
    if (!busy && view.think.classList.contains("busy")) {
      view.think.classList.remove("busy");
      set(view.label, "Thought for " + ((performance.now() - view.began) / 1e3).toFixed(1) + " s");
    }
    view.text.replaceChildren(...format(message.content));
  });
}

function fault(view, text) {
  follow(() => view.node.append(el("p", { class: "fault" }, text)));
}

async function answerNow() {
  const view = addAnswer();
  const message = { role: "assistant", content: "", reasoning_content: "", tool_calls: [] };
  const begin = view.began = performance.now();
  let first = null, usage = null, failed = null, answer = null, drawn = 0;
  chat.stop = new AbortController();
  setBusy(true);
  try {
    answer = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers({ "content-type": "application/json" }),
      body: JSON.stringify(request()), signal: chat.stop.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    await readStream(answer, chunk => {
      if (chunk.error) failed = chunk.error.message;
      usage = chunk.usage || usage;
      for (const choice of chunk.choices || []) takeDelta(message, choice.delta);
      if (first == null && (message.content || message.reasoning_content || message.tool_calls.length)) first = performance.now();
      if (performance.now() - drawn > 30) { drawn = performance.now(); redraw(view, message); }
    });
    if (failed) throw new Error(failed);
  } catch (problem) {
    fault(view, problem.name === "AbortError" ? "Stopped." : problem.message);
  }
  redraw(view, message);
  view.think.classList.remove("busy");
  if (answer && answer.ok)
    view.under.replaceChildren(...summary(answer, usage, first == null ? null : first - begin, first == null ? 0 : performance.now() - first));
  finish(view, message);
  setBusy(false);
}

/* Keeps the turn, and goes on by itself once every call has its result. */
function finish(view, message) {
  const calls = message.tool_calls.filter(Boolean);
  let left = calls.length;
  if (!message.content && left === 0) return;
  message.tool_calls = left ? calls : undefined;
  chat.messages.push(message);
  for (const call of calls)
    showCall(view, call, (done, result) => {
      chat.messages.push({ role: "tool", tool_call_id: done.id, content: result });
      if (--left === 0) answerNow();
    });
  follow(() => {});
}

function setBusy(busy) {
  const send = byId("send");
  send.textContent = busy ? "Stop" : "Send";
  send.classList.toggle("stop", busy);
  if (!busy) chat.stop = null;
}

function fit(area) {
  area.style.height = "auto";
  area.style.height = area.scrollHeight + 2 + "px";
}

function submit() {
  const say = byId("say"), text = say.value.trim();
  if (chat.stop) { chat.stop.abort(); return; }
  if (!text) return;
  try {
    offered();
  } catch (problem) {
    byId("tools").open = true;
    byId("tools-json").focus();
    return;
  }
  say.value = "";
  fit(say);
  chat.messages.push({ role: "user", content: text });
  addUser(text);
  answerNow();
}

/* ---- what is clicked ---- */

function view(name) {
  byId("main").dataset.view = name;
  byId("tab-rig").setAttribute("aria-pressed", name === "rig");
  byId("tab-chat").setAttribute("aria-pressed", name === "chat");
}
function noteTools() {
  set(byId("tools-note"), byId("tools-on").checked ? "on" : "off");
}

byId("tab-rig").addEventListener("click", () => view("rig"));
byId("tab-chat").addEventListener("click", () => view("chat"));
byId("compose").addEventListener("submit", event => { event.preventDefault(); submit(); });
byId("say").addEventListener("input", event => fit(event.target));
byId("say").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
});
byId("clear").addEventListener("click", () => {
  if (chat.stop) chat.stop.abort();
  chat.messages = [];
  showEmpty();
});
byId("tools-on").addEventListener("change", noteTools);
byId("key").addEventListener("submit", event => {
  event.preventDefault();
  key.value = byId("key-value").value;
  sessionStorage.setItem("ds4-key", key.value);
  key.asked = false;
  poll();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && !key.asked) poll(); });

byId("tools-json").value = JSON.stringify(SAMPLE_TOOLS, null, 1);
showEmpty();
noteTools();
run();
