// A picture of all heads: layers from left to right, heads from top to bottom, a cell a head.

import { node } from "./charts.js";
import { hideTip, showTip } from "./format.js";

const LEFT = 46;
const BOTTOM = 20;
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

// view: { layers, heads, fill(layer, head), text?(layer, head), ink?(layer, head), tell(layer, head), chosen?: [l, h] }
export function drawGrid(container, view) {
  const width = Math.max(200, container.clientWidth);
  const cell = (width - LEFT) / view.layers;
  const tall = Math.max(12, Math.min(26, cell));
  const height = tall * view.heads + BOTTOM;
  const picture = node("svg", { viewBox: `0 0 ${width} ${height}`, height });
  for (let head = 0; head < view.heads; head += 1) {
    if (tall >= 12 && (view.heads <= 16 || head % 4 === 0)) {
      picture.append(node("text", { x: 0, y: tall * (head + 0.5) + 4 }, `head ${head}`));
    }
    for (let layer = 0; layer < view.layers; layer += 1) {
      const box = { x: LEFT + cell * layer, y: tall * head, width: cell, height: tall };
      const chosen = view.chosen && view.chosen[0] === layer && view.chosen[1] === head;
      const marks = { style: `fill:${view.fill(layer, head)}`, "data-layer": layer, "data-head": head };
      picture.append(node("rect", { ...box, ...marks, ...(chosen ? { class: "chosen" } : {}) }));
      if (view.text && cell >= 24) {
        const place = { class: "cell", x: box.x + cell / 2, y: box.y + tall / 2 };
        picture.append(node("text", { ...place, style: `fill:${view.ink(layer, head)}` }, view.text(layer, head)));
      }
    }
  }
  // a chosen cell's outline must not lie under its neighbours
  picture.querySelectorAll(".chosen").forEach((rect) => {
    const label = rect.nextElementSibling;
    picture.append(rect);
    if (label?.classList.contains("cell")) picture.append(label);
  });
  labels(picture, view.layers, cell, height);
  picture.addEventListener("pointermove", (event) => {
    const at = place(event);
    if (at) showTip(event, view.tell(...at));
    else hideTip();
  });
  picture.addEventListener("pointerleave", hideTip);
  container.replaceChildren(picture);
}

function labels(picture, layers, cell, height) {
  const every = [1, 2, 4, 5, 8, 10, 16, 20].find((step) => cell * step >= 26) ?? 32;
  for (let layer = 0; layer < layers; layer += every) {
    const spot = { x: LEFT + cell * (layer + 0.5), y: height - 5, "text-anchor": "middle" };
    picture.append(node("text", spot, String(layer)));
  }
  picture.append(node("text", { x: 0, y: height - 5 }, "layer"));
}

function place(event) {
  const { layer, head } = event.target.dataset ?? {};
  return layer === undefined ? null : [Number(layer), Number(head)];
}

// make a grid's cells choosable by pointer and by arrow keys; `state()` gives { layers, heads, chosen }
export function choosable(container, state, choose) {
  container.addEventListener("click", (event) => {
    const at = place(event);
    if (at) choose(...at);
  });
  container.addEventListener("keydown", (event) => {
    const move = MOVES[event.key];
    const { layers, heads, chosen } = state();
    if (!move || !layers) return;
    event.preventDefault();
    choose((chosen[0] + move[0] + layers) % layers, (chosen[1] + move[1] + heads) % heads);
  });
}
