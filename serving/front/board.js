const ROWS = 12;
const KEEP_MS = 5000;
const replicas = new Map();
const state = document.getElementById("state");
const pause = document.getElementById("pause");
let paused = false;
let source = null;

const FIGURES = ["tokens/s", "draft budget", "draft depth", "accepted of verified",
  "step time", "running", "waiting", "times no speculation"];

function open(replica, policy) {
  const section = make("section");
  section.tabIndex = 0;
  section.append(make("h2", "", `Replica ${replica}, policy ${policy}`));
  const list = make("dl");
  const values = FIGURES.map((name) => {
    const pair = make("div");
    const value = make("dd", "", "–");
    pair.append(make("dt", "", name), value);
    list.append(pair);
    return value;
  });
  const columns = make("div", "columns");
  section.append(list, columns);
  document.getElementById("replicas").append(section);
  return { section, values, columns, history: new Map(), totals: null, shownAt: 0, steppedAt: -KEEP_MS };
}

function block(request, index) {
  const admitted = index < request.admitted;
  const accepted = index < request.accepted;
  const rejected = admitted && index === request.accepted;
  const survival = request.survival[index];
  const element = make("span", "block" + (admitted ? " admitted" : "") +
    (accepted ? " accepted" : "") + (rejected ? " rejected" : ""));
  element.style.setProperty("--shade", survival === undefined ? 0.15 : (0.85 * survival).toFixed(2));
  const text = request.draft_text ? request.draft_text[index] : "";
  element.append(make("i"), make("span", "", text || (accepted ? "✓" : rejected ? "×" : "")));
  const fate = accepted ? "accepted" : rejected ? "rejected" : admitted ? "admitted, after a rejection" : "not verified";
  element.title = `draft token ${index + 1}: ${fate}` +
    (survival === undefined ? "" : `, survival ${survival.toFixed(2)}`);
  return element;
}

function draw(view) {
  const columns = [...view.history.entries()].map(([number, rows]) => {
    const column = make("div", "column");
    column.append(make("h3", "", `#${number}`));
    for (const request of rows) {
      const row = make("div", "row");
      for (let index = 0; index < request.drafted; index += 1) row.append(block(request, index));
      if (!request.drafted) row.append(make("span", "empty", "no draft"));
      row.setAttribute("aria-label", `${request.drafted} drafted, ${request.admitted} admitted, ${request.accepted} accepted`);
      row.setAttribute("role", "img");
      column.append(row);
    }
    return column;
  });
  view.columns.replaceChildren(...(columns.length ? columns : [make("span", "empty", "No request is running.")]));
}

function show(one) {
  if (!replicas.has(one.replica)) replicas.set(one.replica, open(one.replica, one.policy));
  const view = replicas.get(one.replica);
  view.seen = true;
  if (!one.totals) {
    view.columns.replaceChildren(make("span", "empty", one.error || "This policy has no drafts to show."));
    view.steppedAt = -KEEP_MS;
    return;
  }
  if (view.totals && view.totals.steps > one.totals.steps) { view.history.clear(); view.totals = null; view.steppedAt = -KEEP_MS; }
  // A step may take longer than it is to the next look.
  if (one.steps.length) view.steppedAt = performance.now();
  else if (performance.now() - view.steppedAt < KEEP_MS) return;
  const last = one.steps.at(-1);
  for (const step of one.steps) {
    for (const request of step.requests) {
      const rows = view.history.get(request.number) || [];
      rows.unshift(request);
      rows.length = Math.min(rows.length, ROWS);
      view.history.set(request.number, rows);
    }
  }
  const alive = new Set(last ? last.requests.map((request) => request.number) : []);
  for (const number of [...view.history.keys()]) if (!alive.has(number)) view.history.delete(number);
  const before = view.totals || { steps: 0, emitted: 0, seconds: 0, admitted: 0, accepted: 0 };
  const now = one.totals;
  const [steps, seconds] = [now.steps - before.steps, now.seconds - before.seconds];
  const elapsed = (performance.now() - view.shownAt) / 1000;
  view.shownAt = performance.now();
  const admitted = now.admitted - before.admitted;
  const figures = steps > 0 && seconds > 0 && last ? [
    view.totals ? ((now.emitted - before.emitted) / elapsed).toFixed(0) : "–",
    last.budget, last.depth,
    admitted > 0 ? `${(100 * (now.accepted - before.accepted) / admitted).toFixed(0)} %` : "–",
    `${(1000 * seconds / steps).toFixed(1)} ms`, last.running, last.waiting,
  ] : ["0", "–", "–", "–", "–", last ? last.running : 0, last ? last.waiting : 0];
  const [gain, lower, upper] = (one.gain || []).map((ratio) => ratio.toFixed(2));
  figures.push(one.held ? "held back" : gain ? `${gain} (${lower} to ${upper})` : "–");
  figures.forEach((figure, index) => { view.values[index].textContent = figure; });
  view.totals = now;
  draw(view);
}

function receive(message) {
  const event = JSON.parse(message.data);
  if (event.error) { state.textContent = event.error; return; }
  for (const view of replicas.values()) view.seen = false;
  event.replicas.forEach(show);
  for (const [name, view] of [...replicas]) {
    if (!view.seen) { view.section.remove(); replicas.delete(name); }
  }
  const count = event.replicas.length;
  const text = `Live, ${count} ${count === 1 ? "replica" : "replicas"}`;
  if (state.textContent !== text) state.textContent = text;
}

// Who does not look keeps no engine recording.
function watch() {
  source?.close();
  if (paused || document.hidden) { state.textContent = "Paused"; return; }
  state.textContent = "Connecting…";
  source = new EventSource("board/events");
  source.onmessage = receive;
  source.onerror = () => {
    state.textContent = source.readyState === EventSource.CLOSED ?
      "The board cannot be watched now. Load this page again to retry." : "Connection lost, trying again…";
  };
}

watch();
document.addEventListener("visibilitychange", watch);
pause.addEventListener("click", () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", String(paused));
  pause.textContent = paused ? "Go on" : "Pause";
  watch();
});
