// Jobs as they run, their errors, retries; and schedules.

import { all, follow, get, hasEnded, part, post, remove } from "./api.js";
import { button, bytes, confirmed, doing, field, h, number, pill, say, select, table, when } from "./dom.js";

const FOLLOWED = 4; // streams at once; a browser opens six connections to a server
const SHOWN = 30;

// How far a job is, as a share and in words.
export function progressLine(job) {
  const p = job.progress;
  const through = p.files_done + p.files_failed + p.files_unchanged;
  const files = p.files_total ? through / p.files_total : 0;
  const chunks = p.chunks_total ? Math.min(1, (p.chunks_computed + p.chunks_reused) / p.chunks_total) : files;
  const words = [`${number(through)} of ${number(p.files_total)} files`];
  if (p.chunks_total) words.push(`${number(p.chunks_total)} chunks, ${number(p.chunks_reused)} reused, ${number(p.chunks_computed)} computed`);
  if (p.kv_bytes_written) words.push(`${bytes(p.kv_bytes_written)} KV written`);
  if (!hasEnded(job) && p.eta_seconds) words.push(`about ${number(p.eta_seconds)} s left`);
  return { share: (files + chunks) / 2, text: words.join(" · ") };
}

export function jobErrors(job) {
  const lines = [
    ...job.errors.map((e) => h("li", { class: "error" }, h("code", {}, e.code), ` ${e.filename ?? ""}: ${e.message}`)),
    ...job.warnings.map((w) => h("li", {}, `${w.filename}: ${w.message}`)),
  ];
  if (!lines.length) return null;
  const counted = [[job.errors.length, "error"], [job.warnings.length, "warning"]].filter(([count]) => count);
  const words = counted.map(([count, what]) => `${count} ${what}${count === 1 ? "" : "s"}`);
  return h("details", { open: job.errors.length > 0 }, h("summary", {}, words.join(", ")), h("ul", { class: "plain" }, lines));
}

export async function jobs(signal) {
  const stores = await all("/v1/vector_stores");
  const names = new Map(stores.map((s) => [s.id, s.name || s.id]));
  const list = h("ol", { class: "jobs", "aria-label": "Jobs" });
  const which = select([["", "All corpora"], ...names], "", { onchange: doing(() => fill()) });
  let streams = new AbortController();
  signal.addEventListener("abort", () => streams.abort());

  async function fill() {
    streams.abort();
    streams = new AbortController();
    const found = (await get(`/v1/jobs?limit=${SHOWN}${which.value ? `&corpus_id=${part(which.value)}` : ""}`)).data;
    list.replaceChildren(...(found.length ? found.map((job) => row(job, names, fill)) : [h("li", { class: "empty" }, "No jobs yet.")]));
    const open = found.filter((job) => !hasEnded(job)).slice(0, FOLLOWED);
    for (const job of open) {
      const watch = (now) => document.getElementById(`job-${now.id}`)?.replaceWith(row(now, names, fill));
      follow(job.id, watch, streams.signal).then((end) => say(`Job ${end.status.replaceAll("_", " ")}.`), () => {});
    }
  }

  await fill();
  const refresh = button("Refresh", doing(() => fill()), { class: "quiet" });
  return h("div", {},
    h("section", { class: "panel" }, h("h1", {}, "Jobs"), h("div", { class: "row" }, field("Corpus", which), refresh), list),
    await schedules(stores));
}

function row(job, names, again) {
  const line = progressLine(job);
  const act = (what, json) => doing(async () => {
    await post(`/v1/jobs/${part(job.id)}/${what}`, json);
    await again();
  });
  const failed = job.errors.length > 0 || job.status === "failed" || job.status === "cancelled";
  return h("li", { id: `job-${job.id}` },
    h("div", { class: "row" },
      pill(job.status), h("strong", {}, job.type), h("span", {}, names.get(job.corpus_id) ?? "a deleted corpus"),
      h("span", { class: "meta" }, when(job.created_at)),
      h("span", { class: "fill" }),
      !hasEnded(job) && button("Cancel", act("cancel"), { class: "quiet", "aria-label": `Cancel ${job.type} job` }),
      hasEnded(job) && failed && button("Retry what failed", act("retry", { only: "failed" }))),
    !hasEnded(job) && h("progress", { max: "1", value: String(line.share), "aria-label": `Progress of the ${job.type} job, stage ${job.stage}` }),
    h("p", { class: "meta" }, hasEnded(job) ? "" : `${job.stage} · `, line.text),
    jobErrors(job));
}

// --- schedules ---

async function schedules(stores) {
  const list = h("div");
  const names = new Map(stores.map((s) => [s.id, s.name || s.id]));
  const corpus = select([...names], "");
  const cron = h("input", { value: "0 3 * * *", required: true, autocomplete: "off", size: "14" });
  const zone = h("input", { value: Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC", required: true, size: "16" });

  async function fill() {
    const found = await all("/v1/schedules");
    list.replaceChildren(table("Schedules", ["Corpus", "When", "Next", "State", ""], found.map((s) => [
      names.get(s.corpus_id) ?? s.corpus_id,
      h("span", {}, h("code", {}, s.cron), ` ${s.timezone}`),
      s.enabled ? when(s.next_due_at) : "–",
      button(s.enabled ? "On" : "Off", doing(async () => (await post(`/v1/schedules/${part(s.id)}`, { enabled: !s.enabled }), await fill())), {
        class: "quiet", role: "switch", "aria-checked": String(s.enabled), "aria-label": `Schedule ${s.cron} of ${names.get(s.corpus_id)}` }),
      button("Delete", doing(async () => {
        if (await confirmed(`Delete the schedule ${s.cron}?`, "Delete schedule")) await remove(`/v1/schedules/${part(s.id)}`), await fill();
      }), { class: "quiet danger", "aria-label": `Delete schedule ${s.cron} of ${names.get(s.corpus_id)}` }),
    ]), "No schedules: a corpus with a source can be synced at set times."));
  }

  const create = doing(async () => {
    await post("/v1/schedules", { corpus_id: corpus.value, cron: cron.value, timezone: zone.value });
    say("Schedule made.");
    await fill();
  });
  await fill();
  return h("section", { class: "panel" }, h("h2", {}, "Schedules"), list,
    stores.length > 0 && h("form", { class: "row", onsubmit: create },
      field("Corpus", corpus), field("Cron", cron), field("Time zone", zone), h("button", { type: "submit" }, "Add schedule")));
}
