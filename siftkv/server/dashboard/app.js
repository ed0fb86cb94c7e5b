// The dashboard: follows the server's stream of snapshots, and looks into one request where one is chosen.

import { events, getJson, setKey } from "./api.js";
import { draw as drawFates, showFates } from "./fates.js";
import { byId } from "./format.js";
import { draw as drawKept, onHead, showKept } from "./kept.js";
import { charts, remember, showOverview } from "./overview.js";
import { chosenRequest, onRequest, showRequests } from "./requests.js";
import "./try.js";

const INSPECT_MS = 2000;
const RETRY_MS = 2000;
const STATES = { starting: "Loading the model", draining: "Draining", failed: "The engine has failed" };

let latest = null;
let inspected = null;

function status(state, text) {
  const line = byId("status");
  if (line.textContent !== text) line.textContent = text;
  line.dataset.state = state;
}

function show(snapshot) {
  status(snapshot.state === "ready" ? "live" : "lost", STATES[snapshot.state] ?? "Live");
  if (!snapshot.pages) return; // nothing is loaded yet
  latest = snapshot;
  remember(snapshot);
  byId("model").textContent = `${snapshot.model}, ${snapshot.kv}`;
  byId("fault").hidden = snapshot.integrity.ok;
  byId("fault").textContent = snapshot.integrity.ok ? "" : `The cache is damaged: ${snapshot.integrity.message}`;
  showOverview(snapshot);
  showRequests(snapshot.requests);
  if (!chosenRequest()) showKept(snapshot.kept_share, "Nothing runs.");
}

async function follow() {
  for (;;) {
    try {
      for await (const snapshot of events("api/stream")) {
        byId("key-form").hidden = true;
        show(snapshot);
      }
      status("lost", "The server closed the stream, trying again");
    } catch (error) {
      if (error.status === 401) {
        status("lost", "An API key is needed");
        byId("key-form").hidden = false;
        return;
      }
      status("lost", "No answer, trying again");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

async function inspect() {
  const id = chosenRequest();
  if (!id) return;
  let found;
  try {
    found = await getJson(`api/requests/${encodeURIComponent(id)}`);
  } catch {
    return; // the stream tells that the server does not answer
  }
  if (id !== chosenRequest()) return;
  if (found.fates) inspected = found;
  const last = inspected?.id === id ? inspected : null;
  if (last) showKept(last.kept_share, "It keeps nothing yet.");
  else showKept([], `It is ${found.state} and holds nothing.`);
  showFates(last ?? found, found.state === "ended");
}

byId("key-form").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  setKey(byId("key").value);
  follow();
});

onRequest((id) => {
  inspected = null;
  if (id) {
    inspect();
    return;
  }
  showFates(null);
  if (latest) showKept(latest.kept_share, "Nothing runs.");
});
onHead(() => drawFates());

function redraw() {
  if (latest) charts(latest);
  drawKept();
  drawFates();
}

addEventListener("resize", redraw);
// the canvas of fates holds colours, which the page's style cannot change by itself
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
setInterval(inspect, INSPECT_MS);
follow();
