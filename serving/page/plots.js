// Small plots in SVG. Each has its numbers as a table beside it, for those who do not see it.

import { h, number, svg } from "./dom.js";

const LINE = 26, LEFT = 110, RIGHT = 84; // of a row of bars; one unit is one pixel, so that text has its size
const TALL = 170, HEAD = 12, FOOT = 20, SIDE = 52; // of a plot of columns
const LABEL = 46; // room of a column's label

const sum = (parts) => parts.reduce((total, [, value]) => total + value, 0);
const namesOf = (rows) => rows[0]?.parts.map(([name]) => name) ?? [];

// Rows of stacked bars on one scale: [{label, parts: [[name, value], …]}].
export function bars(title, rows, show = number) {
  const most = Math.max(...rows.map((row) => sum(row.parts)), 1e-9);
  const draw = (wide) => rows.flatMap((row, i) => {
    const room = Math.max(40, wide - LEFT - RIGHT), y = i * LINE;
    let x = LEFT;
    const pieces = row.parts.map(([name, value], n) => {
      const width = (room * value) / most;
      const bar = svg("rect", { class: `s${n}`, x, y: y + 5, width, height: LINE - 10 }, svg("title", {}, `${row.label}, ${name}: ${show(value)}`));
      x += width;
      return bar;
    });
    return [svg("text", { x: LEFT - 8, y: y + 17, class: "end" }, clipped(row.label)), ...pieces, svg("text", { x: x + 6, y: y + 17 }, show(sum(row.parts)))];
  });
  return figure(title, draw, rows.length * LINE, rows, show);
}

// A column for each of a row's points, the last one at the right: [{label, parts: [[name, value], …]}].
export function columns(title, points, show = number) {
  const most = rounded(Math.max(...points.map((point) => sum(point.parts)), 1));
  const up = (value) => ((TALL - FOOT - HEAD) * value) / most;
  const grid = (wide) => [0, most / 2, most].flatMap((value) => {
    const y = TALL - FOOT - up(value);
    return [svg("line", { class: "axis", x1: SIDE, x2: wide, y1: y, y2: y }), svg("text", { x: SIDE - 8, y: y + 4, class: "end" }, show(value))];
  });
  const draw = (wide) => {
    const step = (wide - SIDE) / Math.max(points.length, 1), every = Math.max(1, Math.ceil(LABEL / step));
    return [...grid(wide), ...points.flatMap((point, i) => {
      let y = TALL - FOOT;
      const x = SIDE + i * step, width = Math.min(48, Math.max(1, step - 3));
      const label = (points.length - 1 - i) % every === 0 && svg("text", { x: Math.min(x + step / 2, wide - LABEL / 2), y: TALL - 4, class: "middle" }, point.label);
      const pieces = point.parts.map(([name, value], n) => {
        y -= up(value);
        return svg("rect", { class: `s${n}`, x: x + (step - width) / 2, y, width, height: up(value) }, svg("title", {}, `${point.label}, ${name}: ${show(value)}`));
      });
      return [...pieces, label].filter(Boolean);
    })];
  };
  return figure(title, draw, TALL, points, show);
}

// The next number that is round: 1, 2, 4, 5 or 10 times a power of ten, so that its half is round too.
function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 5, 10].find((times) => times * power >= value);
}

const clipped = (text) => (text.length > 15 ? `${text.slice(0, 14)}…` : text);

// Drawn for the width it has, and again when that changes.
function figure(title, draw, height, rows, show) {
  const names = namesOf(rows);
  const picture = svg("svg", { height, role: "img", "aria-label": `${title}; the numbers follow as a table` });
  const room = h("div", { class: "plot" }, picture);
  let drawn = 0;
  new ResizeObserver(([entry]) => {
    const wide = Math.floor(entry.contentRect.width);
    if (wide === drawn) return;
    drawn = wide;
    picture.setAttribute("width", wide);
    picture.replaceChildren(...draw(wide));
  }).observe(room);
  const legend = h("ul", { class: "legend", "aria-hidden": "true" }, names.map((name, n) => h("li", { class: `s${n}` }, name)));
  const cells = rows.map((row) => h("tr", {}, h("th", { scope: "row" }, row.label), row.parts.map(([, value]) => h("td", {}, show(value)))));
  const head = h("tr", {}, ["", ...names].map((name) => h(name ? "th" : "td", name ? { scope: "col" } : {}, name)));
  const numbers = h("table", {}, h("caption", {}, title), h("thead", {}, head), h("tbody", {}, cells));
  return h("figure", {}, room, h("figcaption", {}, names.length > 1 ? legend : ""), h("div", { class: "unseen" }, numbers));
}
