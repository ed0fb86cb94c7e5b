// Charts over time, written by hand as SVG. A sample is { t: seconds, values: [...] }, oldest first.

import { hideTip, showTip } from "./format.js";

export const WINDOW_SECONDS = 300;
const SHORT_SECONDS = 60;
const HEIGHT = 190;
const MARGIN = { left: 58, right: 10, top: 8, bottom: 22 };
const SPACE = "http://www.w3.org/2000/svg";

export function node(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((step) => step * power >= value) * power;
}

function scales(container, samples, top) {
  const width = Math.max(200, container.clientWidth);
  const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
  const now = samples.at(-1)?.t ?? 0;
  const span = now - (samples[0]?.t ?? now) > SHORT_SECONDS ? WINDOW_SECONDS : SHORT_SECONDS;
  return {
    width,
    inner,
    now,
    span,
    x: (t) => MARGIN.left + inner.width * (1 - (now - t) / span),
    y: (value) => MARGIN.top + inner.height * (1 - value / top),
  };
}

function axes(chart, scale, top, format) {
  for (const value of [0, top / 2, top]) {
    const y = scale.y(value);
    chart.append(node("line", { class: "rule", x1: MARGIN.left, x2: scale.width - MARGIN.right, y1: y, y2: y }));
    chart.append(node("text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, format(value)));
  }
  const [unit, name] = scale.span > SHORT_SECONDS ? [60, "min"] : [1, "s"];
  for (let part = 0; part <= 5; part += 1) {
    const ago = (scale.span * part) / 5;
    const label = part === 0 ? "now" : `−${ago / unit} ${name}`;
    const x = scale.x(scale.now - ago);
    chart.append(node("text", { x, y: HEIGHT - 5, "text-anchor": part === 0 ? "end" : "middle" }, label));
  }
}

// the place of each sample, so that a tip can tell the values under the pointer
function pointing(chart, scale, samples, tell) {
  const cross = node("line", { class: "cross", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
  chart.append(cross);
  chart.addEventListener("pointermove", (event) => {
    if (!samples.length) return;
    const x = event.clientX - chart.getBoundingClientRect().left;
    const nearest = samples.reduce((a, b) => (Math.abs(scale.x(b.t) - x) < Math.abs(scale.x(a.t) - x) ? b : a));
    cross.setAttribute("x1", scale.x(nearest.t));
    cross.setAttribute("x2", scale.x(nearest.t));
    cross.setAttribute("visibility", "visible");
    showTip(event, `${Math.round(scale.now - nearest.t)} s ago\n${tell(nearest)}`);
  });
  chart.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    hideTip();
  });
}

const path = (points) => `M${points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L")}`;

function canvas(scale) {
  return node("svg", { viewBox: `0 0 ${scale.width} ${HEIGHT}`, height: HEIGHT, "aria-hidden": "true" });
}

export function lineChart(container, samples, format) {
  const top = ceiling(Math.max(0, ...samples.map((s) => s.values[0])));
  const scale = scales(container, samples, top);
  const chart = canvas(scale);
  axes(chart, scale, top, format);
  if (samples.length > 1) {
    const line = samples.map((s) => [scale.x(s.t), scale.y(s.values[0])]);
    const base = scale.y(0);
    chart.append(node("path", { class: "under", d: path([[line[0][0], base], ...line, [line.at(-1)[0], base]]) }));
    chart.append(node("path", { class: "series", d: path(line) }));
  }
  pointing(chart, scale, samples, (s) => format(s.values[0]));
  container.replaceChildren(chart);
}

// series: [{ name, fill }], the lowest first; values of a sample in the same order
export function stackedChart(container, samples, series, format) {
  const top = ceiling(Math.max(0, ...samples.map((s) => s.values.reduce((a, b) => a + b, 0))));
  const scale = scales(container, samples, top);
  const chart = canvas(scale);
  axes(chart, scale, top, format);
  let below = samples.map(() => 0);
  series.forEach(({ fill }, index) => {
    const above = samples.map((s, i) => below[i] + s.values[index]);
    if (samples.length > 1 && above.some((value, i) => value > below[i])) {
      const upper = samples.map((s, i) => [scale.x(s.t), scale.y(above[i])]);
      const lower = samples.map((s, i) => [scale.x(s.t), scale.y(below[i])]).reverse();
      chart.append(node("path", { class: "area", d: `${path([...upper, ...lower])}Z`, style: `fill:${fill}` }));
    }
    below = above;
  });
  pointing(chart, scale, samples, (s) =>
    series.map(({ name }, i) => `${name}: ${format(s.values[i])}`).reverse().join("\n"),
  );
  container.replaceChildren(chart);
}
