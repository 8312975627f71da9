// Elements are made here and nowhere else: what comes from the server becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// h("p", {class: "note", onclick: f}, "text", node): a function for `on…`, an attribute for the rest.
export const h = (tag, props = {}, ...children) => fill(document.createElement(tag), props, children);
export const svg = (tag, props = {}, ...children) => fill(document.createElementNS(SVG, tag), props, children);
export const byId = (id) => document.getElementById(id);

let numbers = 0;
// A control under its label, which is tied to it by an id.
export function field(label, control, note) {
  control.id ||= `f${++numbers}`;
  const hint = note ? h("small", { id: `${control.id}-note` }, note) : null;
  if (hint) control.setAttribute("aria-describedby", hint.id);
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, hint);
}

export const button = (text, onclick, props = {}) => h("button", { type: "button", onclick, ...props }, text);

export const select = (options, chosen, props = {}) =>
  h("select", props, options.map(([value, text]) => h("option", { value, selected: value === chosen }, text)));

export const pill = (status) => h("span", { class: `pill ${String(status).replace(/[^a-z_]/g, "")}` }, String(status).replaceAll("_", " "));

// Roles are said outright: on narrow screens a row is drawn as a card, and a browser then forgets that it is one of a table.
export function table(caption, heads, rows, empty = "Nothing here yet.") {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const head = heads.map((text) => h("th", { scope: "col", role: "columnheader" }, text || h("span", { class: "unseen" }, "Actions")));
  const cell = (content, i) => (i
    ? h("td", { role: "cell", "data-head": heads[i] }, content)
    : h("th", { scope: "row", role: "rowheader" }, content));
  const body = rows.map((cells) => h("tr", { role: "row" }, cells.map(cell)));
  const made = h("table", { role: "table" }, h("caption", { class: "unseen" }, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)), h("tbody", { role: "rowgroup" }, body));
  return h("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" }, made);
}

// The keyboard goes on from here: at a heading, say, of what has just come.
export function land(node) {
  if (!node.matches("a, button, input, select, textarea")) node.tabIndex = -1;
  node.focus();
}

// Where the keyboard is put when what it was at has gone.
export const landing = () => document.querySelector("main h1") ?? byId("main");

// Said by screen readers, politely; and what went wrong, seen and said at once.
export function say(text) {
  byId("status").textContent = text;
}

export function complain(error) {
  if (error?.name === "AbortError") return;
  const box = byId("alert");
  box.replaceChildren(
    h("span", {}, error?.message ?? String(error)),
    button("Dismiss", () => box.replaceChildren(), { class: "quiet" }),
  );
}

// An event's work: its failure is shown, its control is off while it runs.
export const doing = (work) => async (event) => {
  event?.preventDefault?.();
  const control = event?.submitter ?? event?.currentTarget;
  if (control?.tagName === "BUTTON") control.disabled = true;
  try {
    byId("alert").replaceChildren();
    await work(event);
  } catch (error) {
    complain(error);
  } finally {
    if (control?.tagName === "BUTTON") control.disabled = false;
    // A control that is switched off, or has gone with its row, drops the keyboard's place.
    if (document.activeElement === document.body) control?.isConnected ? control.focus() : land(landing());
  }
};

// What is open over a section goes with the section.
export const closeDialogs = () => document.querySelectorAll("dialog").forEach((box) => box.close());

// Asks before something is lost. True if it may be.
export function confirmed(question, action) {
  return new Promise((resolve) => {
    const box = h("dialog", { class: "ask", "aria-labelledby": "ask-title" });
    const close = (chosen) => () => ((answer = chosen), box.close());
    let answer = false; // Escape, and leaving the section, keep it
    box.append(
      h("h2", { id: "ask-title" }, question),
      h("div", { class: "row" }, button("Keep", close(false)), button(action, close(true), { class: "danger" })),
    );
    box.addEventListener("close", () => (box.remove(), resolve(answer)));
    document.body.append(box);
    box.showModal();
  });
}

const units = ["B", "kB", "MB", "GB", "TB"];
export function bytes(count) {
  let size = Number(count) || 0, unit = 0;
  while (size >= 1000 && unit < units.length - 1) (size /= 1000), unit++;
  return `${size.toLocaleString("en", { maximumFractionDigits: size < 10 && unit ? 1 : 0 })} ${units[unit]}`;
}

export const number = (value, digits = 0) =>
  value === null || value === undefined ? "–" : Number(value).toLocaleString("en", { maximumFractionDigits: digits });

export function when(seconds) {
  if (!seconds) return "–";
  const date = new Date(seconds * 1000);
  const text = date.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
  return h("time", { datetime: date.toISOString() }, text);
}
