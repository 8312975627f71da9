// A conversation over a corpus: streamed answers, their sources, and how their prompts came about.

import { all, events, get, part } from "./api.js";
import { choose, chosen, corpusForm, nameOf } from "./corpora.js";
import { button, doing, field, h, number, say, select } from "./dom.js";
import { firstTokens, origin } from "./origin.js";
import { openPassage, passageHref, whereOf } from "./passage.js";

const SPEAK_MS = 1200; // a screen reader hears of a growing answer so often

let kept = null; // the conversation outlives a look at another section

export function forget() {
  kept?.restart();
  kept = null;
}

export async function ask() {
  const [models, stores] = await Promise.all([get("/v1/models"), all("/v1/vector_stores")]);
  const base = models.data[0];
  const talk = (kept ??= new Talk(base.id));
  const known = [chosen(), stores.find((s) => s.file_counts.completed)?.id, stores[0]?.id];
  const first = known.find((id) => stores.some((s) => s.id === id)) ?? "";
  const corpus = select([["", "No corpus"], ...stores.map((s) => [s.id, nameOf(s)])], first, { id: "corpus" });
  const method = select([["", "Blended (default)"], ["full", "Full prefill"]], "");
  const box = h("textarea", { id: "question", rows: "2", required: true, placeholder: "Ask about the documents" });
  const need = h("input", { type: "checkbox", id: "need", checked: true });
  const form = h("form", { class: "panel question", onsubmit: doing(send) },
    h("label", { for: "question", class: "unseen" }, "Question"), box,
    h("div", { class: "row" },
      field("Corpus", corpus), field("Prompt", method),
      h("label", { class: "check" }, need, " answer only from passages"),
      h("span", { class: "fill" }),
      button("New conversation", () => (restart(), box.focus()), { class: "quiet" }),
      h("button", { type: "submit", class: "main" }, "Send")));

  async function send() {
    const question = box.value.trim();
    if (!question) return;
    if (talk.running) return say("An answer is still being made.");
    box.value = "";
    await talk.ask(question, { corpus: corpus.value, method: method.value, need: need.checked });
  }
  function restart() {
    talk.restart();
    talk.log.append(beginning(stores, stores.find((s) => s.id === corpus.value)));
  }
  corpus.addEventListener("change", () => {
    choose(corpus.value);
    restart();
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault(), form.requestSubmit();
  });
  if (!talk.log.querySelector(".turn")) restart();
  return h("div", { class: "talk" },
    h("h1", {}, "Ask"),
    base.full_prefill_reason && h("p", { class: "note" }, `This model answers by full prefill: ${base.full_prefill_reason}`),
    talk.log, form);
}

// What stands there before the first question: what to do next.
function beginning(stores, store) {
  const box = (title, ...rest) => h("section", { class: "beginning" }, h("h2", {}, title), ...rest);
  if (!stores.length) {
    return box("Nothing has been read yet",
      h("p", {}, "Make a corpus, drop your documents there, and ask about them here. The model reads each document once, when it comes."),
      corpusForm());
  }
  if (!store) return box("Ask the model", h("p", {}, "No corpus is chosen: the model answers without documents, and names no sources."));
  const there = store.file_counts.completed, upload = h("a", { href: `#corpus/${part(store.id)}` }, there ? "Add documents" : "Upload documents");
  if (!there) return box(`“${nameOf(store)}” has no documents yet`, h("p", {}, upload, " and ask about them here as soon as they are read."));
  return box(`Ask about “${nameOf(store)}”`,
    h("p", {}, `${number(there)} ${there === 1 ? "document has" : "documents have"} been read. Each answer names its sources: open one to see the passage where it stands.`),
    h("p", { class: "meta" }, "Below an answer you see how much of its prompt was reused, and can compare it with full prefill. ", upload));
}

class Talk {
  constructor(model) {
    this.model = model;
    this.log = h("div", { class: "log", role: "log", "aria-label": "Conversation", "aria-live": "off", tabindex: "0" });
    this.ended = new AbortController();
    this.restart();
  }

  restart() {
    this.ended.abort(); // what is still being answered
    Object.assign(this, { ended: new AbortController(), running: false, turns: [] });
    this.log.replaceChildren();
  }

  async ask(question, options) {
    const { ended } = this;
    const turns = [...this.turns, { role: "user", content: question }];
    const answer = new Answer(this, turns, options);
    this.show(question, answer);
    this.running = true;
    try {
      await answer.run();
    } finally {
      if (this.ended === ended) this.running = false;
    }
    if (this.ended === ended && answer.text) this.turns = [...turns, { role: "assistant", content: answer.text }];
  }

  show(question, answer) {
    this.log.querySelector(".beginning")?.remove();
    const card = h("article", { class: "turn" }, h("h2", { class: "asked" }, question), answer.node);
    this.log.append(card);
    card.scrollIntoView({ block: "start" });
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
    const signal = AbortSignal.any([stop.signal, this.talk.ended.signal]);
    const halt = button("Stop", () => stop.abort(), { class: "quiet" });
    this.after.replaceChildren(halt);
    const begun = performance.now();
    let spoken = begun;
    const waited = this.waiting(corpus ? "Finding passages and preparing the prompt" : "Preparing the prompt", begun);
    say("The answer is being made.");
    try {
      for await (const event of events("POST", "/v1/chat/completions", { json: body, signal })) {
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
      this.after.replaceChildren(h("p", { class: "error" }, signal.aborted ? "Stopped." : `No whole answer: ${error.message}`));
      if (!signal.aborted) throw error;
    } finally {
      waited();
      halt.remove();
      this.body.setAttribute("aria-busy", "false");
    }
  }

  // Until the first token comes the seconds are counted. Returns what ends that.
  waiting(text, begun) {
    const seconds = h("span", { class: "n" });
    const line = h("span", { class: "waiting" }, text, seconds);
    const tick = setInterval(() => (seconds.textContent = ` ${Math.round((performance.now() - begun) / 1000)} s`), 1000);
    this.body.replaceChildren(line);
    return () => (clearInterval(tick), line.remove());
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
      beside.replaceChildren(h("h3", {}, "By full prefill"), other.node);
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
      this.talk.show(`${this.messages.at(-1).content} (with this emphasis)`, other);
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
  return h("section", { class: "sources" }, h("h3", {}, "Sources"), h("ol", { class: "plain" }, citations.map(line)));
}
