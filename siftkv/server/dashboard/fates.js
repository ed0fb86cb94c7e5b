// Where each token of one request went: all tokens of one head, and one token in all heads.

import { byId, colour, hideTip, legend, percent, short, showTip, variable } from "./format.js";
import { drawGrid } from "./grid.js";
import { head } from "./kept.js";

const SIZE = 9;
const GAP = 1;
const canvas = byId("fates");
const text = byId("fates-text");

let request = null;
let token = 0;
let columns = 1;

export function showFates(found, ended) {
  const had = request?.id;
  request = found?.fates ? found : null;
  byId("fates-view").hidden = !request;
  if (!request) {
    text.textContent = found
      ? `Request ${short(found.id)} is ${found.state} and holds no tokens in the cache.`
      : "Choose a request in the table to see where each of its tokens went.";
    return;
  }
  if (had !== found.id) token = firstSifted();
  draw(ended);
}

// a token that a policy put into a tier says more than the first one, which every head keeps
function firstSifted() {
  const [layer, at] = head();
  return Math.max(0, request.fates[layer][at].search(/\d/));
}

const tiers = () => Object.entries(request.legend).filter(([letter]) => /\d/.test(letter)).map(([, name]) => name);

export function draw(ended = request?.ended) {
  if (!request) return;
  request.ended = ended;
  const [layer, at] = head();
  const fate = request.fates[layer][at];
  token = Math.min(token, fate.length - 1);
  text.textContent =
    `Request ${short(request.id)}${ended ? " (ended; as it stood last)" : ""}, layer ${layer}, head ${at}, ` +
    `${fate.length} tokens, the first at the top left. Choose another head in the picture above.`;
  drawStrip(fate);
  const counts = Object.entries(request.legend)
    .map(([letter, name]) => ({ name, count: fate.split(letter).length - 1 }))
    .filter(({ count }) => count > 0);
  legend(
    byId("fates-legend"),
    counts.map(({ name, count }) => ({
      name,
      fill: colour(name, tiers()),
      value: `${count} (${percent(count / fate.length)})`,
    })),
  );
  drawToken();
}

function drawStrip(fate) {
  const step = SIZE + GAP;
  columns = Math.max(8, Math.floor((canvas.parentElement.clientWidth - 4) / step));
  const size = { width: columns * step, height: Math.ceil(fate.length / columns) * step };
  const dense = window.devicePixelRatio || 1;
  canvas.width = size.width * dense;
  canvas.height = size.height * dense;
  canvas.style.width = `${size.width}px`;
  canvas.style.height = `${size.height}px`;
  const brush = canvas.getContext("2d");
  brush.scale(dense, dense);
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  const fills = Object.fromEntries(
    Object.entries(request.legend).map(([letter, name]) => [letter, value(variable(name, tiers()))]),
  );
  for (let i = 0; i < fate.length; i += 1) {
    brush.fillStyle = fills[fate[i]];
    brush.fillRect((i % columns) * step, Math.floor(i / columns) * step, SIZE, SIZE);
  }
  brush.strokeStyle = value("--ink");
  brush.lineWidth = 2;
  brush.strokeRect((token % columns) * step + 1, Math.floor(token / columns) * step + 1, SIZE - 2, SIZE - 2);
}

function drawToken() {
  const { fates, legend: names } = request;
  const all = fates.flat();
  const kept = all.filter((fate) => fate[token] !== ".").length;
  byId("token-text").textContent =
    `Token ${token} is kept in ${kept} of ${all.length} heads. The same token in every head:`;
  drawGrid(byId("token"), {
    layers: fates.length,
    heads: fates[0].length,
    chosen: head(),
    fill: (l, h) => colour(names[fates[l][h][token]], tiers()),
    tell: (l, h) => `Layer ${l}, head ${h}: ${names[fates[l][h][token]]}`,
  });
}

function under(event) {
  const box = canvas.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / (SIZE + GAP));
  const index = Math.floor((event.clientY - box.top) / (SIZE + GAP)) * columns + column;
  const [layer, at] = head();
  return column < columns && index < request.fates[layer][at].length ? index : -1;
}

function choose(index) {
  const [layer, at] = head();
  token = Math.max(0, Math.min(index, request.fates[layer][at].length - 1));
  draw();
}

canvas.addEventListener("click", (event) => {
  const index = under(event);
  if (index >= 0) choose(index);
});
canvas.addEventListener("pointermove", (event) => {
  const index = under(event);
  const [layer, at] = head();
  if (index < 0) hideTip();
  else showTip(event, `Token ${index}: ${request.legend[request.fates[layer][at][index]]}`);
});
canvas.addEventListener("pointerleave", hideTip);
canvas.addEventListener("keydown", (event) => {
  const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  if (!move) return;
  event.preventDefault();
  choose(token + move);
});
