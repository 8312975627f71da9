// Corpora: the list, and one with its documents, settings and source.

import { all, follow, get, part, post, put, remove } from "./api.js";
import { button, bytes, confirmed, doing, field, h, number, pill, say, select, table, when } from "./dom.js";
import { jobErrors, progressLine } from "./jobs.js";
import { uploader } from "./upload.js";

const CHOSEN = "preread.corpus";

export const nameOf = (store) => store.name || store.id;
// What this tab asks about.
export const chosen = () => sessionStorage.getItem(CHOSEN);
export const choose = (id) => sessionStorage.setItem(CHOSEN, id);

export async function corpora() {
  const list = h("div");

  async function fill() {
    const stores = await all("/v1/vector_stores");
    list.replaceChildren(table("Corpora", ["Name", "Documents", "Stored", "Used last", ""], stores.map((store) => [
      h("a", { href: `#corpus/${part(store.id)}` }, nameOf(store)),
      `${number(store.file_counts.completed)} of ${number(store.file_counts.total)}`,
      bytes(store.usage_bytes),
      when(store.last_active_at),
      button("Delete", doing(async () => (await erase(store)) && fill()), { class: "quiet danger", "aria-label": `Delete ${nameOf(store)}` }),
    ]), "No corpus yet: make the first one."));
  }

  await fill();
  return h("section", { class: "panel" }, h("h1", {}, "Corpora"), corpusForm(), list);
}

// Makes a corpus and goes there.
export function corpusForm() {
  const input = h("input", { name: "name", required: true, maxlength: "200", autocomplete: "off", placeholder: "handbook" });
  const create = doing(async () => {
    const made = await post("/v1/vector_stores", { name: input.value });
    say(`Corpus ${made.name} made.`);
    location.hash = `#corpus/${part(made.id)}`;
  });
  return h("form", { class: "row", onsubmit: create }, field("New corpus", input), h("button", { type: "submit", class: "main" }, "Create"));
}

async function erase(store) {
  const text = `Delete “${nameOf(store)}” with its ${store.file_counts.total} documents, their text, index and stored KV?`;
  if (!(await confirmed(text, "Delete corpus"))) return false;
  await remove(`/v1/vector_stores/${part(store.id)}`);
  say(`Corpus ${nameOf(store)} deleted.`);
  return true;
}

export async function corpus(signal, id) {
  const store = await get(`/v1/vector_stores/${part(id)}`);
  const documents = h("div");
  const heading = h("h2", {}, "Documents");

  async function fill() {
    const found = await all(`/v1/vector_stores/${part(id)}/files?order=asc`);
    for (const d of found) d.path ??= `${d.document_id} (not open to you)`;
    heading.textContent = `Documents (${found.length})`;
    documents.replaceChildren(table("Documents", ["Path", "Status", "Size", "Added", ""], found.map((d) => [
      d.path,
      h("span", {}, pill(d.status), d.last_error && h("span", { class: "error" }, ` ${d.last_error.message}`)),
      bytes(d.usage_bytes),
      when(d.created_at),
      button("Delete", doing(async () => {
        if (!(await confirmed(`Delete “${d.path}”, its text, index entries and stored KV?`, "Delete document"))) return;
        const gone = await remove(`/v1/vector_stores/${part(id)}/files/${part(d.id)}`);
        await fill();
        say(`${d.path} deleted: ${number(gone.receipt.chunks)} chunks.`);
      }), { class: "quiet danger", "aria-label": `Delete ${d.path}` }),
    ]), "No documents yet: drop some above."));
  }

  await fill();
  const [uploads, settings, source] = [uploader(id, fill, signal), await settingsForm(id), await sourcePanel(id, fill, signal)];
  return h("div", {},
    h("section", { class: "panel" },
      h("p", { class: "crumb" }, h("a", { href: "#corpora" }, "Corpora"), " /"),
      h("h1", {}, nameOf(store)),
      h("p", { class: "meta" }, h("code", {}, store.id), " · ", h("a", { href: "#ask", onclick: () => choose(id) }, "Ask about it")),
      uploads, heading, documents),
    h("div", { class: "columns" }, settings, source),
    h("section", { class: "panel" },
      h("h2", {}, "Delete"),
      button("Delete this corpus", doing(async () => (await erase(store)) && (location.hash = "#corpora")), { class: "danger" })));
}

// --- settings and source ---

async function settingsForm(id) {
  const path = `/v1/corpora/${part(id)}/settings`;
  const now = await get(path);
  const lines = Object.entries(now.emphasis).map(([pattern, weight]) => `${pattern} = ${weight}`);
  const rules = h("textarea", { rows: "3", spellcheck: "false", placeholder: "contracts/* = 2" });
  rules.value = lines.join("\n");
  const reading = select([["none", "alone"], ["document", "behind what stands before it"]], now.conditioning);
  const versions = h("input", { value: String(now.keep_versions), size: "6", autocomplete: "off" });
  const save = doing(async () => {
    const kept = versions.value.trim();
    const sent = { emphasis: parsed(rules.value), conditioning: reading.value, keep_versions: /^\d+$/.test(kept) ? Number(kept) : kept };
    const shown = await put(path, sent);
    versions.value = String(shown.keep_versions);
    say("Settings saved.");
  });
  return h("section", { class: "panel" }, h("h2", {}, "Settings"),
    h("form", { class: "stack", onsubmit: save },
      field("Standing emphasis", rules, "A line each: path pattern = weight; 1 changes nothing."),
      field("A chunk is read", reading),
      field("Keep replaced versions", versions, "For a time (30d, 12h) or a number of each; 0: none."),
      h("button", { type: "submit" }, "Save settings")));
}

function parsed(text) {
  const found = {};
  for (const line of text.split("\n").filter((l) => l.trim())) {
    const at = line.lastIndexOf("=");
    const weight = Number(line.slice(at + 1));
    if (at < 1 || !line.slice(at + 1).trim() || Number.isNaN(weight)) throw new Error(`“${line}”: write a path pattern, =, and a weight.`);
    found[line.slice(0, at).trim()] = weight;
  }
  return found;
}

async function sourcePanel(id, changed, signal) {
  const source = (await get(`/v1/corpora/${part(id)}/sources`)).source;
  const state = h("p", { class: "meta" });
  const sync = doing(async () => {
    const started = await post(`/v1/corpora/${part(id)}/sync`);
    const ended = await follow(started.job_id, (job) => state.replaceChildren(pill(job.status), ` ${progressLine(job).text}`), signal);
    state.append(jobErrors(ended) ?? "");
    await changed();
  });
  const told = source
    ? [h("dl", {}, Object.entries(source).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))])), button("Sync now", sync)]
    : [h("p", { class: "empty" }, "None: documents are uploaded. An operator can set a folder, a git repository, a bucket or a list of URLs.")];
  return h("section", { class: "panel" }, h("h2", {}, "Source"), ...told, state);
}
