// The tiles, the bar of bytes and the two charts over time.

import { lineChart, stackedChart, WINDOW_SECONDS } from "./charts.js";
import { byId, bytes, colour, few, hideTip, legend, percent, showTip, whole } from "./format.js";

const history = [];

export function remember(snapshot) {
  const { now, counters, pages, usage } = snapshot;
  const before = history.at(-1);
  // a server that was started again counts from zero: what came before is another server's
  if (before && counters.generation_tokens < before.tokens) history.length = 0;
  const since = history.at(-1);
  const rate = since && now > since.t ? (counters.generation_tokens - since.tokens) / (now - since.t) : null;
  const held = Object.values(pages.by_tier).map((count) => count * usage.page_bytes);
  history.push({ t: now, tokens: counters.generation_tokens, rate, held });
  while (history[0].t < now - WINDOW_SECONDS) history.shift();
}

export function showOverview(snapshot) {
  tiles(snapshot);
  memory(snapshot);
  charts(snapshot);
}

function set(id, text, bad = false) {
  byId(id).textContent = text;
  byId(id).classList.toggle("bad", bad);
}

function tiles(snapshot) {
  const { counters, pages, integrity } = snapshot;
  set("tile-running", whole(snapshot.running));
  const others = [`${whole(snapshot.waiting)} waiting`];
  if (snapshot.swapped) others.push(`${whole(snapshot.swapped)} swapped out`);
  set("tile-running-note", `running, ${others.join(", ")}`);
  const rate = history.at(-1).rate;
  set("tile-rate", rate === null ? "–" : few(rate));
  set("tile-rate-note", `tokens/s, ${whole(counters.generation_tokens)} since the start`);
  set("tile-ratio", snapshot.running ? percent(snapshot.ratio, 1) : "–");
  set("tile-ratio-note", `${bytes(snapshot.physical_bytes)} for ${whole(snapshot.tokens_seen)} tokens`);
  set("tile-live", snapshot.running ? few(snapshot.bytes_per_live_token) : "–");
  set("tile-free", percent(pages.free / pages.total));
  set("tile-free-note", `${whole(pages.free)} of ${whole(pages.total)}`);
  set("tile-integrity", integrity.ok ? "whole" : "FAULT", !integrity.ok);
  const checked = Math.round(integrity.checked_s_ago + snapshot.now - snapshot.time);
  set("tile-integrity-note", integrity.ok ? `checked ${checked} s ago` : integrity.message, !integrity.ok);
}

function memory({ memory: parts, pages, usage }) {
  const tiers = Object.keys(pages.by_tier);
  const shown = Object.entries(parts).filter(([, size]) => size > 0);
  const bar = byId("memory-bar");
  bar.replaceChildren(
    ...shown.map(([name, size]) => {
      const piece = document.createElement("i");
      piece.style.flexGrow = size;
      piece.style.background = colour(name, tiers);
      piece.addEventListener("pointermove", (event) => showTip(event, `${name}: ${bytes(size)}`));
      piece.addEventListener("pointerleave", hideTip);
      return piece;
    }),
  );
  const told = shown.map(([name, size]) => `${name} ${bytes(size)}`).join(", ");
  bar.setAttribute("aria-label", `${bytes(usage.allocated)} in all: ${told}`);
  legend(
    byId("memory-legend"),
    shown.map(([name, size]) => ({ name, fill: colour(name, tiers), value: bytes(size) })),
  );
}

export function charts({ pages }) {
  const rates = history.filter((entry) => entry.rate !== null).map(({ t, rate }) => ({ t, values: [rate] }));
  lineChart(byId("rate-chart"), rates, few);
  const latest = rates.at(-1)?.values[0] ?? 0;
  byId("rate-chart").setAttribute("aria-label", `Output over five minutes, now ${few(latest)} tokens a second`);
  const tiers = Object.keys(pages.by_tier);
  const series = tiers.map((name) => ({ name, fill: colour(name, tiers) }));
  stackedChart(byId("tiers-chart"), history.map(({ t, held }) => ({ t, values: held })), series, bytes);
  const now = history.at(-1).held;
  const told = tiers.map((name, i) => `${name} ${bytes(now[i])}`).join(", ");
  byId("tiers-chart").setAttribute("aria-label", `Bytes of pages by tier over five minutes, now ${told}`);
  legend(
    byId("tiers-legend"),
    tiers.map((name, i) => ({ name, fill: colour(name, tiers), value: bytes(now[i]) })),
  );
}
