// A conversation over a corpus: streamed answers, their sources, and how their prompts came about.

import { all, events, get } from "./api.js";
import { button, doing, field, h, number, say, select } from "./dom.js";
import { nameOf } from "./corpora.js";
import { openPassage, passageHref, whereOf } from "./passage.js";
import { bars } from "./plots.js";

// Why a chunk was computed although it is stored with the corpus.
const WHY = {
  absent: "its KV is not in the store", damaged: "its stored KV is damaged, and is being repaired", wrong_key: "its stored KV is of something else",
  wrong_layout: "its stored KV has an unknown layout", unavailable: "the store did not answer",
  slow: "computing it took less time than reading it would have", timeout: "the store was slower than computing it",
  unsynced: "this site has not heard from its parent", pending: "its KV has not been computed yet", policy: "a rule keeps its KV out of the store",
  method: "full prefill was asked for", model: "this model is not blended", over_quota: "the quota of stored KV is used up",
};
// What holds stored KV, as the report calls it.
const TIERS = { device: "the accelerator's memory", memory: "this server's memory", disk: "this server's disk", store: "the object store" };
const CORPUS = "preread.corpus"; // what this tab asked last
const SPEAK_MS = 1200; // a screen reader hears of a growing answer so often

let kept = null; // the conversation outlives a look at another section

export const forget = () => (kept = null);

export async function ask(signal) {
  const [models, stores] = await Promise.all([get("/v1/models"), all("/v1/vector_stores")]);
  const base = models.data[0];
  const talk = (kept ??= new Talk(base.id));
  talk.signal = signal;
  const known = [sessionStorage.getItem(CORPUS), stores.find((s) => s.file_counts.completed)?.id, stores[0]?.id];
  const chosen = known.find((id) => stores.some((s) => s.id === id)) ?? "";
  const corpus = select([["", "No corpus"], ...stores.map((s) => [s.id, nameOf(s)])], chosen, { id: "corpus" });
  const method = select([["", "Blended (default)"], ["full", "Full prefill"]], "");
  const box = h("textarea", { id: "question", rows: "2", required: true, placeholder: "Ask about the documents" });
  const need = h("input", { type: "checkbox", id: "need", checked: true });
  const form = h("form", { class: "panel question", onsubmit: doing(send) },
    h("label", { for: "question", class: "unseen" }, "Question"), box,
    h("div", { class: "row" },
      field("Corpus", corpus), field("Prompt", method),
      h("label", { class: "check" }, need, " answer only from passages"),
      h("span", { class: "fill" }),
      button("New conversation", () => (talk.restart(), box.focus()), { class: "quiet" }),
      h("button", { type: "submit", class: "main" }, "Send")));

  async function send() {
    const question = box.value.trim();
    if (!question) return;
    box.value = "";
    await talk.ask(question, { corpus: corpus.value, method: method.value, need: need.checked });
  }
  corpus.addEventListener("change", () => {
    sessionStorage.setItem(CORPUS, corpus.value);
    talk.restart();
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault(), form.requestSubmit();
  });
  return h("div", { class: "talk" },
    h("h1", {}, "Ask"),
    base.full_prefill_reason && h("p", { class: "note" }, `This model answers by full prefill: ${base.full_prefill_reason}`),
    talk.log, form);
}

class Talk {
  constructor(model) {
    this.model = model;
    this.signal = null;
    this.log = h("div", { class: "log", role: "log", "aria-label": "Conversation", "aria-live": "off", tabindex: "0" });
    this.turns = [];
  }

  restart() {
    this.turns = [];
    this.log.replaceChildren();
  }

  async ask(question, options) {
    const before = [...this.turns];
    const answer = new Answer(this, [...before, { role: "user", content: question }], options);
    const card = h("article", { class: "turn" }, h("p", { class: "asked" }, question), answer.node);
    this.log.append(card);
    card.scrollIntoView({ block: "start" });
    await answer.run();
    this.turns = [...before, { role: "user", content: question }, { role: "assistant", content: answer.text }];
  }
}

class Answer {
  constructor(talk, messages, options) {
    Object.assign(this, { talk, messages, options, text: "", citations: [], report: null, firstMs: null, refused: false });
    this.body = h("div", { class: "answer", "aria-busy": "true" });
    this.after = h("div", { class: "after" });
    this.node = h("div", { class: "answered" }, this.body, this.after);
  }

  async run() {
    const { corpus, method, need, emphasis } = this.options;
    const preread = { ...(method && { method }), ...(corpus && need && { require_context: true }), ...(emphasis && { emphasis }) };
    const body = { model: corpus ? `${this.talk.model}@${corpus}` : this.talk.model, messages: this.messages, stream: true,
      stream_options: { include_usage: true }, preread };
    const stop = new AbortController();
    this.talk.signal.addEventListener("abort", () => stop.abort());
    const halt = button("Stop", () => stop.abort(), { class: "quiet" });
    this.after.replaceChildren(halt);
    const begun = performance.now();
    let spoken = begun;
    say("The answer is being made.");
    try {
      for await (const event of events("POST", "/v1/chat/completions", { json: body, signal: stop.signal })) {
        if (event.data === "[DONE]") break;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new Error(chunk.error.message);
        this.take(chunk, begun);
        if (performance.now() - spoken > SPEAK_MS) {
          say(this.text);
          spoken = performance.now();
        }
      }
      this.end();
    } catch (error) {
      this.after.replaceChildren(h("p", { class: "error" }, stop.signal.aborted ? "Stopped." : `No whole answer: ${error.message}`));
      if (!stop.signal.aborted) throw error;
    } finally {
      halt.remove();
      this.body.setAttribute("aria-busy", "false");
    }
  }

  take(chunk, begun) {
    const delta = chunk.choices[0]?.delta ?? {};
    const piece = delta.content ?? delta.refusal ?? "";
    this.refused ||= Boolean(delta.refusal);
    if (piece) {
      this.firstMs ??= performance.now() - begun;
      this.text += piece;
      this.body.textContent = this.text;
    }
    if (chunk.citations) this.citations = chunk.citations;
    if (chunk.preread) this.report = chunk.preread;
  }

  end() {
    this.body.replaceChildren(...marked(this.text, this.citations));
    this.body.classList.toggle("refused", this.refused);
    say(this.text);
    this.after.replaceChildren(...[sources(this.citations), this.report && origin(this.report, this.citations), this.more()].filter(Boolean));
  }

  // What can be tried with this answer: full prefill beside it, other weights for its documents.
  more() {
    if (!this.citations.length) return null;
    const beside = h("div");
    const compare = button("Answer by full prefill too", doing(async () => {
      const other = new Answer(this.talk, this.messages, { ...this.options, method: "full" });
      beside.replaceChildren(h("h2", {}, "By full prefill"), other.node);
      await other.run();
      if (other.report) beside.append(firstTokens(this, other));
    }));
    return h("div", {}, h("div", { class: "row" }, this.options.method !== "full" && compare), this.sliders(), beside);
  }

  sliders() {
    const chosen = new Map();
    const documents = new Map(this.citations.map((c) => [c.document_id, c.filename]));
    const rows = [...documents].map(([id, name]) => {
      const old = this.options.emphasis?.[id] ?? 1;
      const said = h("output", {}, `× ${number(old, 2)}`);
      const slide = h("input", { type: "range", min: "-3", max: "3", step: "0.25", value: String(Math.log2(old)), "aria-valuetext": `${number(old, 2)} times` });
      chosen.set(id, old);
      slide.addEventListener("input", () => {
        const weight = 2 ** Number(slide.value);
        chosen.set(id, weight);
        said.textContent = `× ${number(weight, 2)}`;
        slide.setAttribute("aria-valuetext", `${number(weight, 2)} times`);
      });
      const line = field(name, slide);
      line.append(said);
      return line;
    });
    const again = doing(async () => {
      const emphasis = Object.fromEntries([...chosen].filter(([, weight]) => weight !== 1));
      const other = new Answer(this.talk, this.messages, { ...this.options, emphasis });
      this.talk.log.append(h("article", { class: "turn" }, h("p", { class: "asked" }, `${this.messages.at(-1).content} (with this emphasis)`), other.node));
      other.node.scrollIntoView({ block: "nearest" });
      await other.run();
    });
    return h("details", { class: "emphasis" }, h("summary", {}, "Emphasis"),
      h("p", { class: "meta" }, "How many times the usual attention a document is paid."),
      h("div", { class: "sliders" }, rows), button("Ask again with this emphasis", again));
  }
}

function link(citation, text, props = {}) {
  const open = (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    doing(() => openPassage(citation))(event);
  };
  return h("a", { href: passageHref(citation), onclick: open, ...props }, text);
}

// The text with its [n] and [n, m] made into links to the passages.
export function marked(text, citations) {
  const byNumber = new Map(citations.map((c) => [c.n, c]));
  return text.split(/(\[\d{1,4}(?:\s*[,;]\s*\d{1,4})*\])/).flatMap((piece, i) => {
    if (i % 2 === 0) return [piece];
    return piece.split(/(\d+)/).map((bit) => {
      const citation = byNumber.get(Number(bit));
      return citation && /^\d/.test(bit)
        ? link(citation, bit, { class: "mark", "aria-label": `Source ${bit}: ${citation.filename}, ${whereOf(citation)}` })
        : bit;
    });
  });
}

function sources(citations) {
  if (!citations.length) return null;
  const line = (c) => h("li", { class: c.cited ? "cited" : "" },
    h("span", { class: "n" }, `[${c.n}]`), h("span", {}, link(c, c.filename), h("span", { class: "meta" }, ` ${whereOf(c)}`)));
  return h("section", { class: "sources" }, h("h2", {}, "Sources"), h("ol", { class: "plain" }, citations.map(line)));
}

// Where every token of the prompt came from, and for each chunk why.
function origin(report, citations) {
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
    h("h3", {}, "Why each chunk was reused, or not"),
    h("ul", { class: "plain why" }, citations.map((c) => {
      const [state, text] = why(c);
      return h("li", {}, h("span", { class: "n" }, `[${c.n}]`), h("span", {}, h("strong", {}, state), `: ${text}`));
    })),
    report.tokens_emphasised > 0 && h("p", { class: "meta" }, `${number(report.tokens_emphasised)} tokens were paid another attention than usual.`),
    h("dl", { class: "ms" }, ms.flat()));
}

function firstTokens(blended, full) {
  const rows = [["blended", blended], ["full prefill", full]].map(([label, a]) => ({ label, parts: [["first token, ms", a.report.ms.first_token ?? a.firstMs]] }));
  const [one, two] = rows.map((row) => row.parts[0][1]);
  return h("div", { class: "compare" }, h("h2", {}, "First token"), bars("First token in milliseconds", rows),
    h("p", {}, `${number(one)} ms blended, ${number(two)} ms by full prefill (× ${number(two / one, 1)}).`));
}
