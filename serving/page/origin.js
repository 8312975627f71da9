// How the prompt of an answer came about: what was reused, what was computed, and why.

import { h, number } from "./dom.js";
import { bars } from "./plots.js";

// Why a chunk was computed although it is stored with the corpus.
const WHY = {
  absent: "its KV is not in the store", damaged: "its stored KV is damaged, and is being repaired", wrong_key: "its stored KV is of something else",
  wrong_layout: "its stored KV has an unknown layout", unavailable: "the store did not answer",
  slow: "computing it took less time than reading it would have", timeout: "the store was slower than computing it",
  unsynced: "this site has not heard from its parent", pending: "its KV has not been computed yet", policy: "a rule keeps its KV out of the store", prefix: "these passages come again in this order: read in full, once for all",
  refused: "vLLM did not take the plan",
  method: "full prefill was asked for", model: "this model is not blended", over_quota: "the quota of stored KV is used up",
};
// What holds stored KV, as the report calls it.
const TIERS = { device: "the accelerator's memory", memory: "this server's memory", disk: "this server's disk", store: "the object store" };

// Where every token of the prompt came from, and for each chunk why.
export function origin(report, citations) {
  const total = report.tokens_reused + report.tokens_recomputed + report.tokens_computed;
  if (!total) return null;
  const ms = Object.entries(report.ms).map(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, `${number(value, 1)} ms`)]);
  const tiers = new Map(report.reused.map((r) => [r.chunk_id, r.tier]));
  const reasons = new Map(report.not_reused.map((r) => [r.chunk_id, r.reason]));
  const why = (c) => {
    if (tiers.has(c.chunk_id)) return ["reused", `its KV was read from ${TIERS[tiers.get(c.chunk_id)] ?? tiers.get(c.chunk_id)}`];
    if (reasons.has(c.chunk_id)) return ["computed", WHY[reasons.get(c.chunk_id)] ?? reasons.get(c.chunk_id)];
    return report.resumed ? ["reused", "as blended for an earlier answer"] : ["computed", report.full_prefill_reason ?? WHY.method];
  };
  const first = report.ms.first_token;
  const summary = `${number((100 * report.tokens_reused) / total)} % of ${number(total)} prompt tokens reused${first ? `, first token after ${number(first)} ms` : ""}`;
  return h("details", { class: "origin" }, h("summary", {}, summary),
    bars("Tokens of the prompt", [{ label: report.method, parts: [
      ["reused", report.tokens_reused], ["computed again", report.tokens_recomputed], ["computed", report.tokens_computed]] }]),
    h("h4", {}, "Why each chunk was reused, or not"),
    h("ul", { class: "plain why" }, citations.map((c) => {
      const [state, text] = why(c);
      return h("li", {}, h("span", { class: "n" }, `[${c.n}]`), h("span", {}, h("strong", {}, state), `: ${text}`));
    })),
    report.tokens_emphasised > 0 && h("p", { class: "meta" }, `${number(report.tokens_emphasised)} tokens were paid another attention than usual.`),
    h("dl", { class: "ms" }, ms.flat()));
}

export function firstTokens(blended, full) {
  const rows = [["blended", blended], ["full prefill", full]].map(([label, a]) => ({ label, parts: [["first token, ms", a.report.ms.first_token ?? a.firstMs]] }));
  const [one, two] = rows.map((row) => row.parts[0][1]);
  return h("div", { class: "compare" }, h("h3", {}, "First token"), bars("First token in milliseconds", rows),
    h("p", {}, `${number(one)} ms blended, ${number(two)} ms by full prefill (× ${number(two / one, 1)}).`));
}
