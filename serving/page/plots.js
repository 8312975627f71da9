// Small plots in SVG. Each has its numbers as a table beside it, for those who do not see it.

import { h, number, svg } from "./dom.js";

const LINE = 26, LEFT = 110, RIGHT = 84;
const widthNow = () => Math.min(680, innerWidth - 80); // one unit is one pixel, so that text has its size

// Rows of stacked bars on one scale: [{label, parts: [[name, value], …]}].
export function bars(title, rows, show = number) {
  const sums = rows.map((row) => row.parts.reduce((sum, [, value]) => sum + value, 0));
  const most = Math.max(...sums, 1e-9), room = widthNow() - LEFT - RIGHT;
  const drawn = rows.flatMap((row, i) => {
    let x = LEFT;
    const y = i * LINE;
    const pieces = row.parts.map(([name, value], n) => {
      const width = (room * value) / most;
      const bar = svg("rect", { class: `s${n}`, x, y: y + 5, width, height: LINE - 10 }, svg("title", {}, `${row.label}, ${name}: ${show(value)}`));
      x += width;
      return bar;
    });
    return [svg("text", { x: LEFT - 8, y: y + 17, class: "end" }, clipped(row.label)), ...pieces, svg("text", { x: x + 6, y: y + 17 }, show(sums[i]))];
  });
  const names = rows[0]?.parts.map(([name]) => name) ?? [];
  return figure(title, names, drawn, rows.length * LINE, rows, show);
}

// A column for each of a row's points: [{label, parts: [[name, value], …]}].
export function columns(title, points, show = number) {
  const wide = widthNow(), height = 140, foot = 18, head = 14;
  const most = Math.max(...points.map((p) => p.parts.reduce((sum, [, v]) => sum + v, 0)), 1e-9);
  const step = (wide - 8) / Math.max(points.length, 1);
  const drawn = points.flatMap((point, i) => {
    let y = height - foot;
    const label = i % Math.ceil(points.length / (wide / 80)) === 0 ? [svg("text", { x: 4 + i * step, y: height - 4 }, point.label)] : [];
    return [...label, ...point.parts.map(([name, value], n) => {
      const tall = ((height - foot - head) * value) / most;
      y -= tall;
      return svg("rect", { class: `s${n}`, x: 4 + i * step, y, width: Math.max(1, step - 3), height: tall },
        svg("title", {}, `${point.label}, ${name}: ${show(value)}`));
    })];
  });
  drawn.push(svg("line", { class: "axis", x1: 0, x2: wide, y1: height - foot, y2: height - foot }), svg("text", { x: 4, y: 10 }, show(most)));
  return figure(title, points[0]?.parts.map(([name]) => name) ?? [], drawn, height, points, show);
}

const clipped = (text) => (text.length > 15 ? `${text.slice(0, 14)}…` : text);

function figure(title, names, drawn, height, rows, show) {
  const picture = svg("svg", { viewBox: `0 0 ${widthNow()} ${height}`, width: widthNow(), height, role: "img", "aria-label": `${title}; the numbers follow as a table` }, ...drawn);
  const legend = h("ul", { class: "legend", "aria-hidden": "true" }, names.map((name, n) => h("li", { class: `s${n}` }, name)));
  const cells = rows.map((row) => h("tr", {}, h("th", { scope: "row" }, row.label), row.parts.map(([, value]) => h("td", {}, show(value)))));
  const head = h("tr", {}, ["", ...names].map((name) => h(name ? "th" : "td", name ? { scope: "col" } : {}, name)));
  const numbers = h("table", {}, h("caption", {}, title), h("thead", {}, head), h("tbody", {}, cells));
  return h("figure", {}, picture, h("figcaption", {}, names.length > 1 ? legend : ""), h("div", { class: "unseen" }, numbers));
}
