"use strict";
// Zoom, move and pick boxes in timelines, numbers in charts, by pointer and by keys. The page is whole without it.
const SVG = "http://www.w3.org/2000/svg";
const LETTER_PX = 8, SMALL_PX = 7.2;

function element(name, attributes, words) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (words !== undefined) made.textContent = words;
  return made;
}

function roundStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => power * factor >= rough * 0.999);
}

function letters(words) {
  return words.length + 0.6 * (words.split("W").length - 1);
}

class Timeline {
  constructor(svg, picked) {
    this.svg = svg;
    this.picked = picked;
    const [left, right, longest] = svg.dataset.plot.split(" ").map(Number);
    Object.assign(this, { left, right, longest, zoom: 1, from: 0 });  // from: share of the whole at the left edge
    this.boxes = [...svg.querySelectorAll(".rp-plot rect")].map((rect) => ({
      rect, x: Number(rect.getAttribute("x")), wide: Number(rect.getAttribute("width")), texts: [], shape: "[]",
    }));
    this.findSeen();
    this.plots = [...svg.querySelectorAll(".rp-plot")].map((group) => [group, Number(group.getAttribute("stroke-width"))]);
    // Words are made anew at every zoom, for boxes that have become wide enough.
    svg.querySelectorAll(".rp-plot text").forEach((words) => words.remove());
    this.draw();
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoomAt(event.deltaY < 0 ? 1.25 : 0.8, this.shareAt(event.clientX));
    }, { passive: false });
    this.drags();
    svg.addEventListener("click", (event) => this.pick(event.target.closest(".rp-plot rect")));
    svg.setAttribute("tabindex", "0");
    svg.addEventListener("keydown", (event) => { if (this.pressed(event.key, event)) event.preventDefault(); });
  }

  // A message may leave before the one ahead of it has been handed over: words stand in what is seen of a box.
  findSeen() {
    const last = new Map();
    for (const box of this.boxes.filter(({ rect }) => rect.dataset.l).sort((a, b) => a.x - b.x)) {
      const y = box.rect.getAttribute("y"), before = last.get(y);
      if (before) before.seen = Math.min(before.wide, box.x - before.x);
      box.seen = box.wide;
      last.set(y, box);
    }
  }

  pressed(key, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return false;
    const at = this.chosen ? this.shareOf(this.chosen) : 0.5;
    if (key === "+" || key === "=") this.zoomAt(2, at);
    else if (key === "-") this.zoomAt(0.5, at);
    else if (key === "0") this.moveTo(0, 1);
    else if (key === "Escape") this.pick(null);
    else if (key === "ArrowLeft" || key === "ArrowRight") this.step(key === "ArrowRight" ? 1 : -1, 0);
    else if (key === "ArrowUp" || key === "ArrowDown") this.step(0, key === "ArrowDown" ? 1 : -1);
    else return false;
    return true;
  }

  // Where the middle of a box is, as a share of what is shown.
  shareOf(box) {
    const share = (box.x + box.wide / 2 - this.left) / (this.right - this.left);
    return Math.min(1, Math.max(0, (share - this.from) * this.zoom));
  }

  // From the box that is picked to the next one in its row, or to the nearest one of the next row.
  step(across, down) {
    const rows = new Map();
    for (const box of this.boxes) {
      if (box.rect.hasAttribute("opacity")) continue;  // the pale end of a message
      const y = Number(box.rect.getAttribute("y"));
      rows.set(y, [...(rows.get(y) ?? []), box]);
    }
    const order = [...rows.keys()].sort((a, b) => a - b);
    if (!order.length) return;
    const lanes = order.map((y) => rows.get(y).sort((a, b) => a.x - b.x));
    const lane = lanes.findIndex((boxes) => boxes.includes(this.chosen));
    let box = lanes[0][0];
    if (lane >= 0 && across) {
      box = lanes[lane][lanes[lane].indexOf(this.chosen) + across] ?? this.chosen;
    } else if (lane >= 0) {
      const next = lanes[lane + down] ?? lanes[lane];
      box = next.reduce((best, other) => Math.abs(other.x - this.chosen.x) < Math.abs(best.x - this.chosen.x) ? other : best);
    }
    this.pick(box.rect);
    const middle = (box.x + box.wide / 2 - this.left) / (this.right - this.left);
    if (middle < this.from || middle > this.from + 1 / this.zoom) this.moveTo(middle - 0.5 / this.zoom);
  }

  shareAt(clientX) {
    const place = this.svg.getBoundingClientRect();
    const x = (clientX - place.left) * this.svg.viewBox.baseVal.width / place.width;
    return Math.min(1, Math.max(0, (x - this.left) / (this.right - this.left)));
  }

  zoomAt(factor, share) {
    const zoom = Math.min(4000, Math.max(1, this.zoom * factor));
    this.moveTo(this.from + share / this.zoom - share / zoom, zoom);
  }

  moveTo(from, zoom = this.zoom) {
    this.zoom = zoom;
    this.from = Math.min(1 - 1 / zoom, Math.max(0, from));
    this.draw();
  }

  drags() {
    let begin = null;
    this.svg.addEventListener("pointerdown", (event) => { begin = { x: event.clientX, from: this.from }; });
    for (const ends of ["pointerup", "pointercancel"]) window.addEventListener(ends, () => { begin = null; });
    this.svg.addEventListener("pointermove", (event) => {
      if (begin === null || this.zoom === 1) return;
      const wide = this.svg.getBoundingClientRect().width * (this.right - this.left) / this.svg.viewBox.baseVal.width;
      this.moveTo(begin.from - (event.clientX - begin.x) / wide / this.zoom);
    });
  }

  draw() {
    const whole = this.right - this.left;
    for (const [group, edge] of this.plots) group.setAttribute("stroke-width", Math.min(0.8, edge * this.zoom));
    for (const box of this.boxes) {
      const start = this.left + ((box.x - this.left) - this.from * whole) * this.zoom;
      const begin = Math.max(this.left, start), end = Math.min(this.right, start + box.wide * this.zoom);
      const seen = end > begin;
      box.rect.style.display = seen ? "" : "none";
      if (seen) {
        box.rect.setAttribute("x", begin.toFixed(2));
        box.rect.setAttribute("width", Math.max(end - begin, 0.4).toFixed(2));
      }
      this.label(box, seen ? begin : 0, seen ? Math.min(end, start + box.seen * this.zoom) : 0);
    }
    this.svg.querySelectorAll(".rp-ticks").forEach((group) => this.ticks(group));
  }

  // As timeline.py does it: one line, a small one, or the stage above the rest.
  label(box, begin, end) {
    const words = box.rect.dataset.l;
    if (!words) return;
    const height = Number(box.rect.getAttribute("height")), wide = end - begin;
    const [, stage, rest] = /^(\d*)(.*)$/.exec(words);
    let lines = [];
    if (wide >= (height < 20 ? SMALL_PX : LETTER_PX) * letters(words) + 4) lines = [[words, height / 2 + 5, height < 20 ? 12 : 14]];
    else if (height < 20) lines = [];
    else if (wide >= SMALL_PX * letters(words) + 2) lines = [[words, height / 2 + 4, 12]];
    else if (stage && wide >= SMALL_PX * Math.max(letters(stage), letters(rest)) + 2) lines = [[stage, 12, 12], [rest, 25, 12]];
    const shape = JSON.stringify(lines);
    if (box.shape !== shape) {
      for (const line of box.texts) line.remove();
      const pale = box.rect.matches(".rp-I, .rp-W");
      box.texts = lines.map(([text, down, size]) => element("text", {
        y: Number(box.rect.getAttribute("y")) + down, class: pale ? "rp-on-pale" : "rp-on-full",
        "text-anchor": "middle", "pointer-events": "none", "font-size": size,
      }, text));
      box.rect.after(...box.texts);
      box.shape = shape;
    }
    for (const line of box.texts) line.setAttribute("x", ((begin + end) / 2).toFixed(1));
  }

  ticks(group) {
    const bottom = Number(group.dataset.y);
    group.replaceChildren();
    const low = this.from * this.longest, shown = this.longest / this.zoom, step = roundStep(shown / 10);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    for (let n = Math.ceil(low / step - 1e-6); n * step <= (low + shown) * (1 + 1e-9); n++) {
      const x = this.left + (n * step - low) / shown * (this.right - this.left);
      group.append(element("path", { d: `M${x.toFixed(1)},${bottom}v5`, class: "rp-axis" }));
      group.append(element("text", {
        x: x.toFixed(1), y: bottom + 20, class: "rp-mute", "text-anchor": "middle",
      }, Number((n * step).toFixed(digits))));
    }
  }

  pick(rect) {
    this.svg.querySelectorAll(".chosen").forEach((other) => other.classList.remove("chosen"));
    this.chosen = this.boxes.find((box) => box.rect === rect);
    this.picked.hidden = !rect;
    if (!rect) return;
    rect.classList.add("chosen");
    this.picked.textContent = rect.querySelector("title").textContent;
  }
}

function short(value) {
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function nearest(points, x) {
  let best = null;
  for (const point of points) if (!best || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
  return best;
}

function watchChart(svg) {
  const { lines, unit, x: name, plot: [left, right, top, bottom], span: [low, high] } = JSON.parse(svg.dataset.chart);
  const figure = svg.closest("figure"), steps = lines.length ? lines[0][1].map(([x]) => x) : [];
  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  const cross = element("line", { class: "cross", y1: top, y2: bottom, visibility: "hidden" });
  let at = null;
  figure.append(tip);
  svg.append(cross);
  const leave = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); };
  const show = (wanted) => {
    const found = lines.map(([label, points]) => [label, nearest(points, wanted)]).filter(([, point]) => point);
    if (!found.length || wanted < low || wanted > high) return leave();
    const place = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / place.width;
    at = found[0][1][0];
    const x = left + (at - low) / (high - low) * (right - left);
    cross.setAttribute("x1", x); cross.setAttribute("x2", x); cross.setAttribute("visibility", "visible");
    const values = found.map(([label, point]) => `${label} ${short(point[1])} ${unit}`.trim());
    tip.textContent = `${name} ${short(at)}: ${values.join(", ")}`;
    tip.hidden = false;
    tip.style.top = "34px";
    tip.style.left = `${Math.max(4, Math.min(x / scale + 10, place.width - tip.offsetWidth - 4))}px`;
  };
  svg.addEventListener("pointermove", (event) => {
    const place = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / place.width;
    show(low + ((event.clientX - place.left) * scale - left) / (right - left) * (high - low));
  });
  svg.addEventListener("pointerleave", leave);
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const now = steps.indexOf(at), last = steps.length - 1;
    const next = { ArrowRight: now + 1, ArrowLeft: now < 0 ? last : now - 1, Home: 0, End: last }[event.key];
    if (next === undefined || last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    show(steps[Math.min(last, Math.max(0, next))]);
  });
}

document.querySelectorAll("svg.rp-timeline").forEach((svg) => {
  const section = svg.closest("section"), tools = section.querySelector(".tools");
  const timeline = new Timeline(svg, section.querySelector(".picked"));
  tools.hidden = false;
  tools.addEventListener("click", (event) => {
    const what = event.target.dataset.zoom;
    if (what === "all") timeline.moveTo(0, 1);
    else if (what) timeline.zoomAt(what === "in" ? 2 : 0.5, 0.5);
  });
});
document.querySelectorAll("svg.rp-chart").forEach(watchChart);
