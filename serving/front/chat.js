const MAX_TOKENS = 512;
const MAX_ROWS = 300;
const WATCH_MS = 60000;
const EXAMPLES = ["What is the capital of France?", "Write a haiku about the sea.", "How do I reverse a string in Python?"];
const base = location.pathname.replace(/\/*$/, "/");
const find = (id) => document.getElementById(id);
const [log, form, text, send, steps, state] = ["log", "form", "text", "send", "steps", "state"].map(find);
let model = null;
let maxTokens = MAX_TOKENS;
let messages = [];
let running = null;
let answer = null;

// ---- the conversation

// Who reads at the end goes on there.
function change(how) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  how();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function add(element) {
  change(() => log.append(element));
  return element;
}

// Fenced code becomes a block; all else stays as it was written.
function write(element, content) {
  change(() => element.replaceChildren(...content.split("```").map((part, index) =>
    index % 2 ? make("pre", "", part.replace(/^[\w+-]*\n/, "").trimEnd()) : document.createTextNode(part.trim()))));
}

// What a model thinks stands above its answer, and is never sent back.
function think(mine, box, content) {
  if (!mine.thought) {
    mine.thought = make("details", "thought");
    mine.thought.open = true;
    mine.thought.append(make("summary", "", "Thinking"), make("div"));
    box.before(mine.thought);
  }
  change(() => mine.thought.lastChild.append(content));
}

function welcome() {
  const box = make("div", "welcome", "Ask something. Beside the answer you see which tokens were drafted, which of them the engine verified, and which the model accepted.");
  const choices = make("div");
  for (const example of EXAMPLES) {
    const button = make("button", "small", example);
    button.type = "button";
    button.addEventListener("click", () => submit(example));
    choices.append(button);
  }
  box.append(choices);
  log.replaceChildren(box);
}

function fail(reason, action, act) {
  const box = make("div", "error");
  box.setAttribute("role", "alert");
  const button = make("button", "small", action);
  button.type = "button";
  button.addEventListener("click", () => { box.remove(); act(); });
  box.append(make("span", "", reason), button);
  add(box);
}

function restart() {
  running?.abort();
  messages = [];
  answer = null;
  draw();
  welcome();
  text.focus();
}

function setRunning(controller) {
  running = controller;
  send.textContent = controller ? "Stop" : "Send";
  send.title = controller ? "Stop the answer (Escape)" : "Send (Enter)";
  log.setAttribute("aria-busy", String(Boolean(controller)));
}

function submit(content) {
  if (running || !content.trim()) return;
  if (!messages.length) log.replaceChildren();
  for (const box of log.querySelectorAll(".error")) box.remove();
  // A question that was never answered is asked together with the new one.
  if (messages.at(-1)?.role === "user") messages.at(-1).content += `\n\n${content}`;
  else messages.push({ role: "user", content });
  log.scrollTop = log.scrollHeight;
  add(make("div", "message user", content));
  text.value = "";
  reply();
}

// A question that is refused would be refused again with every other.
function takeBack() {
  text.value = [messages.pop().content, text.value].filter(Boolean).join("\n\n");
  for (const box of log.querySelectorAll(".user:not(:has(~ .assistant))")) box.remove();
}

// What a refusal says, for people.
async function describe(response) {
  let message = `${response.status} ${response.statusText}`;
  try { message = (await response.json()).error.message || message; } catch { /* not ours */ }
  if (!/[.!?]$/.test(message)) message += ".";
  const wait = Number(response.headers.get("retry-after"));
  const when = wait ? ` Try again in ${wait} s.` : "";
  if (response.status === 503) return `The server is busy: ${message}${when}`;
  if (response.status === 429) return `Too much was asked: ${message}${when}`;
  return response.status < 500 ? `The server refused this: ${message}` : `The server failed: ${message}`;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const lines = rest.split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

async function reply() {
  if (running) return;
  const controller = new AbortController();
  const talk = messages;
  const mine = { text: "", finish: null, isRefused: false, thought: null, tag: null, steps: new Map(), startedAt: performance.now(), endedAt: null };
  answer = mine;
  setRunning(controller);
  draw();
  watch();
  const box = add(make("div", "message assistant"));
  const reason = await stream(controller.signal, mine, box);
  if (running === controller) setRunning(null);
  mine.endedAt = performance.now();
  if (talk !== messages) return;
  if (mine.text) messages.push({ role: "assistant", content: mine.text });
  else box.remove();
  if (controller.signal.aborted) add(make("div", "note", "Stopped."));
  else if (mine.isRefused) {
    takeBack();
    fail(`${reason} Change your question, or begin afresh with New.`, "New", restart);
  } else if (reason) fail(reason, "Try again", () => {
    // What broke off is no part of the conversation.
    if (mine.text) messages.pop();
    for (const part of [box, mine.thought]) part?.remove();
    reply();
  });
  else if (mine.finish === "length") add(make("div", "note", "Cut off here: the answer reached its limit."));
  else if (!mine.text) add(make("div", "note", "The model had nothing to say."));
  text.focus();
}

// Returns what went wrong, if anything.
async function stream(signal, mine, box) {
  let response;
  try {
    if (!model) await connect();
    response = await fetch(`${base}v1/chat/completions`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ model, messages, stream: true, max_tokens: maxTokens }),
      signal,
    });
    mine.isRefused = [400, 413].includes(response.status);
    // The server may serve another model by now.
    if (response.status === 404) model = null;
    if (!response.ok) return await describe(response);
  } catch (error) {
    return error instanceof TypeError ? "The server cannot be reached." : error.message;
  }
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return null;
      const chunk = JSON.parse(data);
      if (chunk.error) return `The answer broke off: ${chunk.error.message}`;
      if (chunk.id) mine.tag = chunk.id.slice(-8);
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      if (choice.delta?.reasoning) think(mine, box, choice.delta.reasoning);
      mine.text += choice.delta?.content || "";
      mine.finish = choice.finish_reason || mine.finish;
      if (mine.text) write(box, mine.text);
    }
    return mine.finish ? null : "The answer broke off: the connection was lost.";
  } catch (error) {
    return `The answer broke off: ${error instanceof TypeError ? "the connection was lost." : error.message}`;
  }
}

async function connect() {
  const response = await fetch(`${base}v1/models`);
  if (!response.ok) throw new Error(await describe(response));
  const card = (await response.json()).data[0];
  model = card.id;
  // Half of a small context is left for questions.
  const context = card.max_model_len ?? card.metadata?.max_request_context_length ?? Infinity;
  maxTokens = Math.min(MAX_TOKENS, Math.ceil(context / 2));
  find("model").textContent = model;
}

// ---- the board

let source = null;
let closing = null;

// A page that is left open must not keep the engine recording.
function watch() {
  clearTimeout(closing);
  closing = setTimeout(() => { if (running) watch(); else unwatch("Paused"); }, WATCH_MS);
  if (source && source.readyState !== EventSource.CLOSED) return;
  source = new EventSource(`${base}board/events`);
  source.onmessage = receive;
  source.onerror = () => {
    state.textContent = source.readyState === EventSource.CLOSED ? "The board cannot be watched now" : "Connection lost, trying again…";
  };
}

function unwatch(reason) {
  source?.close();
  state.textContent = reason;
}

function receive(message) {
  const event = JSON.parse(message.data);
  if (event.error) { state.textContent = event.error; return; }
  let others = 0;
  let blind = event.replicas.length > 0;
  let error;
  for (const replica of event.replicas) {
    error ??= replica.error;
    if (!replica.totals) continue;
    blind = false;
    const last = replica.steps.at(-1);
    if (last) others += last.requests.filter((request) => !answer || request.tag !== answer.tag).length;
    if (!answer) continue;
    // Until the first token comes, any request may be ours.
    const isOurs = (request) => !answer.endedAt && !answer.tag || request.tag === answer.tag;
    for (const step of replica.steps) {
      answer.steps.set(`${replica.replica} ${step.step}`, { ...step, replica: replica.replica, requests: step.requests.filter(isOurs) });
    }
  }
  state.textContent = blind ? error || `Policy ${event.replicas[0].policy}: nothing is drafted` : others ? `${others} other ${others === 1 ? "request" : "requests"}` : "Live";
  draw();
}

function block(request, index) {
  const isAdmitted = index < request.admitted;
  const isAccepted = index < request.accepted;
  const isRejected = isAdmitted && index === request.accepted;
  const element = make("span", "block" + (isAdmitted ? " admitted" : "") + (isAccepted ? " accepted" : "") + (isRejected ? " rejected" : ""));
  const token = request.draft_text?.[index];
  element.textContent = token ? token.replaceAll("\n", "⏎").replace(/^ | $/g, "·") : isAccepted ? "✓" : isRejected ? "×" : " ";
  const survival = request.survival[index];
  element.title = (isAccepted ? "accepted" : isRejected ? "rejected" : isAdmitted ? "admitted, after a rejection" : "not verified") +
    (survival === undefined ? "" : `, survival ${survival.toFixed(2)}`);
  return element;
}

// Of the steps from this answer's first to its last, those that did not come here.
function countMissed(seen) {
  let missed = 0;
  for (const all of Map.groupBy(seen, (step) => step.replica).values()) {
    const own = all.filter((step) => step.own).map((step) => step.step);
    const known = all.filter((step) => step.step >= own[0] && step.step <= own.at(-1) && (step.own || !step.left_out));
    if (own.length) missed += Math.max(0, own.at(-1) - own[0] + 1 - known.length);
  }
  return missed;
}

function draw() {
  const seen = answer?.tag ? [...answer.steps.values()].map((step) => ({ ...step, own: step.requests.find((request) => request.tag === answer.tag) })) : [];
  const rows = seen.flatMap((step) => step.own || []);
  const missed = countMissed(seen);
  const count = rows.length + missed;
  const sum = (name) => rows.reduce((total, row) => total + row[name], 0);
  for (const name of ["drafted", "admitted", "accepted"]) find(name).textContent = rows.length ? sum(name) : "–";
  find("count").textContent = count || "–";
  find("missed").hidden = !missed;
  find("missed").textContent = `${missed} of these steps ${missed === 1 ? "was" : "were"} not seen; their tokens are estimated, their drafts not counted.`;
  find("length").textContent = rows.length ? (sum("emitted") / rows.length).toFixed(2) : "–";
  if (rows.length) {
    const seconds = ((answer.endedAt || performance.now()) - answer.startedAt) / 1000;
    find("speed").textContent = (sum("emitted") / rows.length * count / seconds).toFixed(0);
  } else find("speed").textContent = "–";
  steps.replaceChildren(...rows.map((request, index) => {
    const row = make("div", "row");
    row.setAttribute("role", "img");
    row.setAttribute("aria-label", `Step ${index + 1}: ${request.drafted} drafted, ${request.admitted} admitted, ${request.accepted} accepted`);
    row.append(make("b", "", index + 1));
    for (let place = 0; place < request.drafted; place += 1) row.append(block(request, place));
    const own = request.emitted - request.accepted;
    if (own > 0) row.append(make("span", "block own", `+${own}`));
    return row;
  }).slice(-MAX_ROWS).reverse());
}

// ---- keys and buttons

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else submit(text.value);
});
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(text.value); }
});
text.addEventListener("focus", watch);
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
document.addEventListener("visibilitychange", () => { if (document.hidden && !running) unwatch("Paused"); });
find("clear").addEventListener("click", restart);
find("all").href = `${base}board`;
welcome();
draw();
setRunning(null);
connect().catch((error) => { find("model").textContent = error instanceof TypeError ? "The server cannot be reached." : error.message; });
