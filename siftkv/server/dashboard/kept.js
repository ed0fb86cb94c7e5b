// The heatmap of kept shares: of the running batch, or of the request that is looked at.

import { byId, percent } from "./format.js";
import { choosable, drawGrid } from "./grid.js";

const grid = byId("kept");
const text = byId("kept-text");

let share = [];
let chosen = [0, 0];
let whenChosen = () => {};

export function onHead(handler) {
  whenChosen = handler;
}

export const head = () => chosen;

export function showKept(kept, nothing) {
  const holds = kept.some((layer) => layer.some((value) => value > 0));
  share = holds ? kept : [];
  grid.hidden = !holds;
  byId("kept-scale").hidden = !holds;
  if (!holds) {
    text.textContent = nothing;
    return;
  }
  chosen = [Math.min(chosen[0], kept.length - 1), Math.min(chosen[1], kept[0].length - 1)];
  const all = kept.flat();
  const mean = all.reduce((a, b) => a + b, 0) / all.length;
  text.textContent =
    `Heads keep ${percent(mean)} of their tokens on average, from ${percent(Math.min(...all))} ` +
    `to ${percent(Math.max(...all))}. ${sentence(...chosen)}.`;
  draw();
}

const sentence = (layer, at) => `Layer ${layer}, head ${at} keeps ${percent(share[layer][at])}`;

export function draw() {
  if (!share.length) return;
  drawGrid(grid, {
    layers: share.length,
    heads: share[0].length,
    chosen,
    fill: (l, h) => `color-mix(in oklab, var(--ramp-high) ${(100 * share[l][h]).toFixed(1)}%, var(--ramp-low))`,
    text: (l, h) => (100 * share[l][h]).toFixed(0),
    ink: (l, h) => (share[l][h] > 0.5 ? "var(--ramp-high-ink)" : "var(--ramp-low-ink)"),
    tell: sentence,
  });
}

choosable(
  grid,
  () => ({ layers: share.length, heads: share[0]?.length ?? 0, chosen }),
  (layer, at) => {
    chosen = [layer, at];
    showKept(share, "");
    whenChosen();
  },
);
