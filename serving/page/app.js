// Signing in, the sections of the page, light and dark.

import { dropKey, get, keepKey, key, logOut } from "./api.js";
import { ask, forget } from "./chat.js";
import { corpora, corpus } from "./corpora.js";
import { button, byId, complain, doing, field, h, say } from "./dom.js";
import { jobs } from "./jobs.js";
import { passage } from "./passage.js";
import { savings } from "./savings.js";

const SECTIONS = [["ask", "Ask", ask], ["corpora", "Corpora", corpora], ["jobs", "Jobs", jobs], ["savings", "Savings", savings]];
const HIDDEN = { corpus };
let leaving = new AbortController();
let shown = null;

function place() {
  const [name, ...rest] = location.hash.slice(1).split("/").map(decodeURIComponent);
  return { name: name || "ask", rest };
}

async function show() {
  const { name, rest } = place();
  if (name === "main") return;
  if (name === "passage") {
    if (!shown) await section("ask", []);
    return passage(...rest);
  }
  await section(name, rest);
}

async function section(name, rest) {
  const found = SECTIONS.find((s) => s[0] === name);
  const view = found?.[2] ?? HIDDEN[name];
  if (!view) return void location.replace("#ask");
  leaving.abort();
  leaving = new AbortController();
  const signal = leaving.signal;
  for (const link of byId("nav").children) {
    const here = link.getAttribute("href") === `#${name === "corpus" ? "corpora" : name}`;
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${found?.[1] ?? "Corpus"} · Preread`;
  const main = byId("main");
  const moved = shown !== null;
  shown = name;
  try {
    const content = await view(signal, ...rest);
    if (signal.aborted) return;
    main.replaceChildren(content);
    if (moved) main.focus();
  } catch (error) {
    if (signal.aborted) return;
    main.replaceChildren(h("section", { class: "panel" }, h("h1", {}, "This cannot be shown"), h("p", {}, error.message)));
    complain(error);
  }
}

// --- signing in ---

// What the server says of logins, where it has them: {oidc, login_url}.
async function login() {
  try {
    const reply = await fetch("/auth/config", { cache: "no-store" });
    const config = reply.ok ? await reply.json() : {};
    return config.oidc ? config : null;
  } catch {
    return null;
  }
}

function signIn(config, message) {
  shown = null;
  byId("nav").hidden = byId("leave").hidden = true;
  const input = h("input", { type: "password", name: "key", autocomplete: "off", required: true, spellcheck: "false" });
  const submit = doing(async () => {
    keepKey(input.value.trim());
    try {
      await enter();
    } catch (error) {
      dropKey();
      input.select();
      throw error;
    }
  });
  // The address comes from the server; only a path of this origin is followed.
  const url = /^\/[\w/-]*$/.test(config?.login_url ?? "") ? config.login_url : "/auth/login";
  const single = config && h("p", {}, h("a", { class: "button", href: url }, "Sign in with your organisation"));
  byId("main").replaceChildren(
    h("section", { class: "panel sign-in" },
      h("h1", {}, "Sign in"),
      message && h("p", { class: "note" }, message),
      single,
      h("form", { onsubmit: submit },
        field("API key", input, "It stays in this tab, and is forgotten when the tab is closed."),
        h("button", { type: "submit", class: "main" }, "Sign in"))),
  );
  input.focus();
}

async function enter() {
  await get("/v1/models");
  byId("nav").replaceChildren(...SECTIONS.map(([name, text]) => h("a", { href: `#${name}` }, text)));
  byId("nav").hidden = byId("leave").hidden = false;
  say("Signed in.");
  await show();
}

async function signOut(message) {
  shown = null; // from here on a 401 is no news
  leaving.abort();
  forget();
  dropKey();
  document.querySelectorAll("dialog").forEach((box) => box.remove());
  byId("alert").replaceChildren();
  const config = await login();
  const failed = config && (await logOut().catch((error) => (error.status === 401 ? null : error)));
  signIn(config, message);
  if (failed) complain(failed);
}

async function start() {
  const config = await login();
  if (key() || config) {
    try {
      return await enter();
    } catch {
      dropKey();
    }
  }
  signIn(config);
}

// --- light and dark ---

const THEMES = ["system", "light", "dark"];

function theme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = `Theme: ${name}`;
  localStorage.setItem("preread.theme", name);
}

byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  theme(next);
  say(`Theme: ${next}`);
});
const kept = localStorage.getItem("preread.theme");
theme(THEMES.includes(kept) ? kept : "system");

byId("leave").addEventListener("click", () => signOut());
addEventListener("preread:signed-out", () => shown && signOut(key() ? "Your key is no longer accepted. Sign in again." : "Your login has ended. Sign in again."));
addEventListener("hashchange", () => shown && show().catch(complain));
document.querySelector(".skip").addEventListener("click", (event) => (event.preventDefault(), byId("main").focus()));
start().catch(complain);
