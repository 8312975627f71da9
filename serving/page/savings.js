// What reuse saved, day by day, and where the stored KV lies.

import { ApiError, get } from "./api.js";
import { bytes, h, number, table } from "./dom.js";
import { bars, columns } from "./plots.js";

const DAYS = 30;
// What holds stored KV, as the service calls it.
const TIERS = { device: "accelerator", memory: "server memory", disk: "server disk", object: "object store" };
const tierName = (tier) => TIERS[tier] ?? tier;

export async function savings() {
  try {
    const [usage, storage] = await Promise.all([get(`/v1/usage?limit=${DAYS}`), get("/v1/storage")]);
    return h("div", {}, reuse(usage, storage), tiers(storage));
  } catch (error) {
    if (!(error instanceof ApiError) || error.status !== 403) throw error;
    return h("section", { class: "panel" }, h("h1", {}, "Savings"), h("p", {}, "Usage and storage are shown to admin keys only."));
  }
}

function sum(results, pick) {
  return results.reduce((total, result) => total + (pick(result) ?? 0), 0);
}

function reuse(usage, storage) {
  const points = usage.data.map((day) => {
    const reused = sum(day.results, (r) => r.input_cached_tokens);
    const date = new Date(day.start_time * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });
    return { label: date, parts: [["reused", reused], ["computed", sum(day.results, (r) => r.input_tokens) - reused]] };
  });
  const every = usage.data.flatMap((day) => day.results);
  const asked = sum(every, (r) => r.num_model_requests);
  const prompt = sum(every, (r) => r.input_tokens);
  const reused = sum(every, (r) => r.input_cached_tokens);
  const known = every.every((r) => r.preread.gpu_seconds_saved !== null);
  const currency = usage.preread.currency;
  const facts = [
    ["Answers", number(asked)],
    ["Prompt tokens reused", prompt ? `${number((100 * reused) / prompt, 1)} %` : "–"],
    ["Prefill saved", known ? `${number(sum(every, (r) => r.preread.gpu_seconds_saved), 1)} s` : "not measured yet"],
    ["Spent on computing KV", `${number(sum(every, (r) => r.preread.gpu_seconds_spent), 1)} s`],
    currency && ["Money saved, spent", `${number(sum(every, (r) => r.preread.money_saved), 2)}, ${number(sum(every, (r) => r.preread.money_spent), 2)} ${currency}`],
    ["Prefill speed", storage.prefill_tokens_per_s.measured ? `${number(storage.prefill_tokens_per_s.measured)} tokens/s` : "not measured yet"],
  ].filter(Boolean);
  return h("section", { class: "panel" },
    h("h1", {}, "Savings"),
    h("p", { class: "meta" }, `The last ${DAYS} days, by UTC.`),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("h2", {}, "Prompt tokens by day"),
    prompt ? columns("Prompt tokens by day", points) : h("p", { class: "empty" }, "No answers yet: what is asked from now on is counted here."));
}

function tiers(storage) {
  const names = [...new Set(storage.corpora.flatMap((c) => Object.keys(c.tiers)))];
  const rows = names.map((tier) => ({ label: tierName(tier), parts: [["bytes", sum(storage.corpora, (c) => c.tiers[tier]?.bytes)]] }));
  const priced = storage.corpora.some((c) => c.currency);
  const kept = (c) => Object.entries(c.not_stored).map(([rule, count]) => `${count} by ${rule}`).join(", ") || "–";
  return h("section", { class: "panel" },
    h("h2", {}, "Stored KV by tier"),
    h("p", { class: "meta" }, "Faster tiers hold copies of what lies in the object store."),
    rows.length ? bars("Bytes of stored KV by tier", rows, bytes) : h("p", { class: "empty" }, "No corpus yet."),
    table("Corpora and their stored KV",
      ["Corpus", ...names.map(tierName), "Tokens not computed again", "Prefill saved", priced && "Cost a month", "Kept out by rules"].filter(Boolean),
      storage.corpora.map((c) => [
        c.name || c.corpus_id, ...names.map((tier) => bytes(c.tiers[tier]?.bytes)), number(c.tokens_not_recomputed),
        c.gpu_seconds_saved === null ? "not measured yet" : `${number(c.gpu_seconds_saved, 1)} s`,
        priced && `${number(c.cost_per_month, 2)} ${c.currency}`, kept(c),
      ].filter((cell) => cell !== false)), "No corpus yet."));
}
