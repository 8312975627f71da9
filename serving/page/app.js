// Signing in, the sections of the page, light and dark.

import { dropKey, get, keepKey, key, logOut } from "./api.js";
import { ask, forget } from "./chat.js";
import { corpora, corpus } from "./corpora.js";
import { button, byId, closeDialogs, complain, doing, field, h, land, landing, say } from "./dom.js";
import { jobs } from "./jobs.js";
import { passage } from "./passage.js";
import { savings } from "./savings.js";

const SECTIONS = [["ask", "Ask", ask], ["corpora", "Corpora", corpora], ["jobs", "Jobs", jobs], ["savings", "Savings", savings]];
const HIDDEN = { corpus };
const LATE_MS = 250; // a section that takes longer says that it is coming
let leaving = new AbortController();
let shown = null; // the address of the section that is shown

function place() {
  try {
    const [name, ...rest] = location.hash.slice(1).split("/").map(decodeURIComponent);
    return { name: name || "ask", rest };
  } catch {
    return { name: "ask", rest: [] }; // no address of ours
  }
}

async function show() {
  const { name, rest } = place();
  if (name === "main") return;
  closeDialogs();
  if (name === "passage") {
    if (!shown) await section("ask", []);
    return passage(shown, ...rest);
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
  const title = found?.[1] ?? "Corpus";
  document.title = `${title} · Preread`;
  const moved = shown !== null;
  shown = `#${[name, ...rest].map(encodeURIComponent).join("/")}`;
  const late = setTimeout(() => signal.aborted || coming(title), LATE_MS);
  const put = (content) => signal.aborted || byId("main").replaceChildren(content);
  try {
    put(await view(signal, ...rest));
  } catch (error) {
    put(failed("This cannot be shown", error, () => section(name, rest)));
  } finally {
    clearTimeout(late);
  }
  if (moved && !signal.aborted) land(landing());
}

function coming(title) {
  say(`${title}: loading.`);
  byId("main").replaceChildren(h("h1", {}, title), h("p", { class: "waiting" }, "Loading"));
}

const failed = (title, error, again) => h("section", { class: "panel" },
  h("h1", {}, title), h("p", { class: "error", role: "alert" }, error.message), button("Try again", doing(again)));

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
    const given = input.value.trim();
    if (!/^[\x21-\x7e]+$/.test(given)) throw new Error("This is no key: it has characters that no key has.");
    keepKey(given);
    try {
      await enter();
      if (!document.querySelector("dialog[open]")) land(byId("question") ?? landing());
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
        h("button", { type: "submit", class: "main" }, "Sign in")),
      h("h2", {}, "Where is my key?"),
      h("p", { class: "meta" }, "The first one lies in the file ", h("code", {}, "admin.key"), " of the data folder on the server; ",
        h("code", {}, "preread up"), " prints its path when it starts. An admin makes others with ", h("code", {}, "preread key create"), ".")),
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
  closeDialogs();
  byId("alert").replaceChildren();
  const config = await login();
  const failure = config && (await logOut().catch((error) => (error.status === 401 ? null : error)));
  signIn(config, message);
  if (failure) complain(failure);
}

async function start() {
  const config = await login();
  if (key() || config) {
    try {
      return await enter();
    } catch (error) {
      if (error.status === undefined || error.status >= 500) { // the key may be good: it is asked for only if it is not
        return void byId("main").replaceChildren(failed("The service does not answer", error, start));
      }
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
// A file that is dropped beside its place would replace this page.
for (const name of ["dragover", "drop"]) addEventListener(name, (event) => event.preventDefault());
document.querySelector(".skip").addEventListener("click", (event) => (event.preventDefault(), byId("main").focus()));
start().catch(complain);
