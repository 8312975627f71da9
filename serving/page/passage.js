// A cited passage where it stands in its document.

import { get, part } from "./api.js";
import { button, doing, h, say, when } from "./dom.js";

export const passageHref = (c) => `#passage/${part(c.corpus_id)}/${part(c.file_id)}/${c.start}-${c.end}`;

export function whereOf(p) {
  const range = (from, to) => (from === to ? from : `${from}–${to}`);
  const place = p.page_start === null || p.page_start === undefined
    ? `line${p.line_start === p.line_end ? "" : "s"} ${range(p.line_start, p.line_end)}`
    : `page${p.page_start === p.page_end ? "" : "s"} ${range(p.page_start, p.page_end)}`;
  return [place, ...(p.headings.length ? [p.headings.join(" › ")] : [])].join(" · ");
}

const read = (corpusId, fileId, start, end, context) =>
  get(`/v1/vector_stores/${part(corpusId)}/files/${part(fileId)}/passage?start=${start}&end=${end}&context=${context}`);

// From an address: #passage/<corpus>/<file>/<start>-<end>
export function passage(corpusId, fileId, span) {
  const [start, end] = (span ?? "").split("-");
  return openPassage({ corpus_id: corpusId, file_id: fileId, start, end });
}

// `citation.quote`, where there is one, is compared with what stands there now.
export async function openPassage(citation) {
  let context = 600;
  const body = h("div", { class: "passage" });
  const box = h("dialog", { class: "viewer", "aria-labelledby": "passage-title" },
    body,
    h("div", { class: "row end" },
      button("More context", doing(async () => ((context = Math.min(4 * context, 10000)), await fill())), { class: "quiet" }),
      button("Close", () => box.close())));
  const from = document.activeElement;
  box.addEventListener("close", () => {
    box.remove();
    if (location.hash.startsWith("#passage/")) history.replaceState(null, "", "#ask");
    from?.focus?.();
  });

  async function fill() {
    try {
      const p = await read(citation.corpus_id, citation.file_id, citation.start, citation.end, context);
      const changed = citation.quote !== undefined && citation.quote !== p.quote;
      body.replaceChildren(...parts(p, changed));
      body.querySelector("mark").scrollIntoView({ block: "center" });
      say(`Passage of ${p.filename} shown.`);
    } catch (error) {
      if (error.status !== 404 && error.status !== 400) throw error;
      body.replaceChildren(
        h("h2", { id: "passage-title" }, "This passage is not there any more"),
        h("p", { class: "gone" }, error.message));
    }
  }

  document.body.append(box);
  box.showModal();
  await fill();
}

function parts(p, changed) {
  const place = h("p", { class: "meta" }, whereOf(p), ` · characters ${p.start}–${p.end} of ${p.characters} · version `,
    h("code", {}, p.version.slice(0, 12)));
  return [
    h("h2", { id: "passage-title" }, p.filename),
    place,
    !p.current && h("p", { class: "note" }, "This version was replaced on ", when(p.valid_to), "."),
    changed && h("p", { class: "note" }, "The document has been read again since the answer: the text here is what stands there now."),
    h("div", { class: "text", tabindex: "0", role: "region", "aria-label": "Text of the document" },
      p.before, h("mark", {}, p.quote), p.after),
  ].filter(Boolean);
}
