// Files and folders, chosen or dropped, sent as one job whose progress is shown to the end.

import { follow, hasEnded, part, send } from "./api.js";
import { bytes, doing, h, pill, say } from "./dom.js";
import { jobErrors, progressLine } from "./jobs.js";

export function uploader(id, changed, signal) {
  const going = h("ul", { class: "uploads", "aria-label": "Uploads" });
  const take = (found) => found.length && upload(id, found, going, changed, signal);
  const chooser = (text, props) => {
    const input = h("input", { type: "file", multiple: true, class: "unseen", ...props });
    input.addEventListener("change", doing(async () => {
      const found = [...input.files].map((file) => ({ file, path: file.webkitRelativePath || file.name }));
      input.value = "";
      await take(found);
    }));
    return [input, h("label", { for: props.id, class: "button" }, text)];
  };
  const zone = h("div", { class: "drop" },
    chooser("Choose files", { id: "upload" }), " ", chooser("Choose a folder", { id: "upload-folder", webkitdirectory: true }),
    h("p", {}, "or drop files, folders and archives here"));
  zone.addEventListener("dragover", (event) => (event.preventDefault(), zone.classList.add("over")));
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", doing(async (event) => {
    zone.classList.remove("over");
    await take(await dropped(event.dataTransfer));
  }));
  return h("div", {}, zone, going);
}

// What was dropped, as {file, path}; folders with all that is in them. Entries have to be asked for before anything is awaited.
async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return [...transfer.files].map((file) => ({ file, path: file.name }));
  return (await Promise.all(entries.map(within))).flat();
}

async function within(entry) {
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    return [{ file, path: entry.fullPath.replace(/^\//, "") }];
  }
  const reader = entry.createReader(), found = [];
  for (;;) { // a reader gives some at a time, and none at the end
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) return found;
    for (const each of some) found.push(...(await within(each)));
  }
}

async function upload(id, found, going, changed, signal) {
  const name = found.length === 1 ? found[0].path : `${found.length} files`;
  const bar = h("progress", { max: "1", "aria-label": `Upload of ${name}` });
  const state = h("span", { class: "meta" }, "sending");
  const more = h("div");
  going.prepend(h("li", {}, h("strong", {}, name), bar, state, more));
  const form = new FormData();
  for (const { file, path } of found) {
    form.append("files", file, file.name);
    form.append("paths", path);
  }
  let job;
  try {
    job = await send(`/v1/corpora/${part(id)}/documents`, form, (sent, total) => {
      bar.value = (0.3 * sent) / total;
      state.textContent = `sending, ${bytes(sent)} of ${bytes(total)}`;
    });
  } catch (error) {
    bar.remove();
    state.replaceChildren(h("span", { class: "error" }, `not sent: ${error.message}`));
    throw error;
  }
  const skipped = (job.skipped ?? []).map((s) => h("li", {}, `${s.path}: ${s.reason}`));
  if (skipped.length) more.append(h("details", {}, h("summary", {}, `${skipped.length} skipped`), h("ul", {}, skipped)));
  say(`${name} sent, being read.`);
  const ended = await follow(job.id, (now) => {
    const line = progressLine(now);
    bar.value = hasEnded(now) ? 1 : 0.3 + 0.7 * line.share;
    state.replaceChildren(pill(now.status), ` ${line.text}`);
  }, signal);
  more.append(jobErrors(ended) ?? "");
  say(`${name}: ${ended.status.replaceAll("_", " ")}.`);
  await changed();
}
