// Numbers as people read them, colours by what they stand for, and small pieces of the page.

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function bytes(count) {
  let unit = 0;
  while (count >= 1000 && unit < UNITS.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(count) : count.toFixed(count < 100 ? 1 : 0)}\u00a0${UNITS[unit]}`;
}

export const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)}\u00a0%`;
export const whole = (count) => Math.round(count).toLocaleString("en");
export const few = (value) => (value >= 100 || Number.isInteger(value) ? whole(value) : value.toFixed(1));

// enough of a request's id to tell it from others
export const short = (id) => (id.length > 18 ? `${id.slice(0, 15)}…` : id);

export function age(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

const NAMED = {
  window: "--window",
  dropped: "--dropped",
  unknown: "--unknown",
  "windows and tables": "--tables",
  "unused slots": "--unused",
  shared: "--shared",
  "free pages": "--free",
};

// tiers: names of the pool's tiers, most precise first
export function variable(name, tiers) {
  return NAMED[name] ?? `--tier-${Math.min(3, tiers.indexOf(name))}`;
}

export const colour = (name, tiers) => `var(${variable(name, tiers)})`;

export const byId = (id) => document.getElementById(id);

export function legend(list, entries) {
  list.replaceChildren(
    ...entries.map(({ name, fill, value }) => {
      const item = document.createElement("li");
      const key = document.createElement("i");
      key.style.background = fill;
      item.append(key, name);
      if (value !== undefined) {
        const figure = document.createElement("b");
        figure.textContent = value;
        item.append(figure);
      }
      return item;
    }),
  );
}

const tip = byId("tip");

export function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4))}px`;
  tip.style.top = `${Math.max(4, event.clientY - height - 10)}px`;
}

export function hideTip() {
  tip.hidden = true;
}
