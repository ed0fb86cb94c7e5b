// The table of live requests, and the choice of the one that is looked at.

import { age, byId, bytes, percent, short, whole } from "./format.js";

const SHOWN = 100;
const rows = byId("requests");
const subject = byId("subject");

let whenChosen = () => {};

export function onRequest(handler) {
  whenChosen = handler;
}

export const chosenRequest = () => subject.value;

function cell(text, name) {
  const made = document.createElement("td");
  made.textContent = text;
  if (name) made.className = name;
  return made;
}

function fill(row, request) {
  const place = request.index ? ` (${request.index})` : "";
  const first = document.createElement("td");
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = short(request.id) + place;
  button.title = request.id;
  button.dataset.id = request.id;
  button.setAttribute("aria-label", `Look at request ${request.id}${place}`);
  first.append(button);
  const setting = cell(request.kv, "setting");
  setting.title = request.kv;
  row.replaceChildren(
    first,
    cell(request.state),
    cell(whole(request.prompt_tokens), "number"),
    cell(whole(request.output_tokens), "number"),
    cell(age(request.age_s), "number"),
    cell(request.physical_bytes === undefined ? "–" : bytes(request.physical_bytes), "number"),
    cell(request.ratio === undefined ? "–" : percent(request.ratio), "number"),
    setting,
  );
}

export function showRequests(requests) {
  const focused = document.activeElement?.dataset?.id;
  byId("requests-empty").hidden = requests.length > 0;
  rows.closest("table").hidden = requests.length === 0;
  rows.replaceChildren(
    ...requests.slice(0, SHOWN).map((request) => {
      const row = document.createElement("tr");
      fill(row, request);
      return row;
    }),
  );
  if (requests.length > SHOWN) {
    const rest = cell(`and ${whole(requests.length - SHOWN)} more`);
    rest.colSpan = 8;
    const row = document.createElement("tr");
    row.append(rest);
    rows.append(row);
  }
  if (focused) rows.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
  offer([...new Set(requests.map((request) => request.id))].slice(0, SHOWN));
}

// the request that is looked at stays on offer after it has ended
function offer(ids) {
  const current = subject.value;
  const wanted = current && !ids.includes(current) ? [current, ...ids] : ids;
  const known = [...subject.options].slice(1).map((option) => option.value);
  if (known.join("\n") === wanted.join("\n")) return;
  subject.replaceChildren(subject.options[0], ...wanted.map((id) => new Option(`request ${short(id)}`, id)));
  subject.value = current;
}

function choose(id) {
  if (![...subject.options].some((option) => option.value === id)) subject.append(new Option(`request ${short(id)}`, id));
  subject.value = id;
  whenChosen(id);
}

rows.addEventListener("click", (event) => {
  const id = event.target.dataset?.id;
  if (id) {
    choose(id);
    byId("kept-title").scrollIntoView({ block: "start" });
  }
});
subject.addEventListener("change", () => whenChosen(subject.value));
