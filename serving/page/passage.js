// A cited passage where it stands in its document.

import { get, part } from "./api.js";
import { button, doing, h, land, landing, say, when } from "./dom.js";

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

// From an address: #passage/<corpus>/<file>/<start>-<end>. It stands over the section at `under`, whose address comes back.
export function passage(under, corpusId, fileId, span) {
  const [start, end] = (span ?? "").split("-");
  return openPassage({ corpus_id: corpusId, file_id: fileId, start, end }, under);
}

// `citation.quote`, where there is one, is compared with what stands there now.
export async function openPassage(citation, under = null) {
  let context = 600;
  const title = (text) => h("h2", { id: "passage-title" }, text);
  const body = h("div", { class: "passage" }, title("Passage"), h("p", { class: "waiting" }, "The passage is being looked up"));
  const box = h("dialog", { class: "viewer", "aria-labelledby": "passage-title" },
    body,
    h("div", { class: "row end" },
      button("More context", doing(async () => ((context = Math.min(4 * context, 10000)), await fill())), { class: "quiet" }),
      button("Close", () => box.close())));
  const from = document.activeElement, address = location.hash;
  box.addEventListener("close", () => {
    box.remove();
    if (under && location.hash === address) history.replaceState(null, "", under);
    if (from?.isConnected && from !== document.body) from.focus();
    else land(landing());
  });

  async function fill() {
    try {
      const p = await read(citation.corpus_id, citation.file_id, citation.start, citation.end, context);
      const changed = citation.quote !== undefined && citation.quote !== p.quote;
      body.replaceChildren(title(p.filename), ...parts(p, changed));
      body.querySelector("mark").scrollIntoView({ block: "start" });
      say(`Passage of ${p.filename} shown.`);
    } catch (error) {
      const gone = error.status === 404 || error.status === 400;
      body.replaceChildren(
        title(gone ? "This passage is not there any more" : "The passage cannot be shown now"),
        h("p", { class: "gone" }, error.message));
    }
  }

  document.body.append(box);
  box.showModal();
  await fill();
  if (box.open) land(body.querySelector("h2"));
}

function parts(p, changed) {
  const place = h("p", { class: "meta" }, whereOf(p), ` · characters ${p.start}–${p.end} of ${p.characters} · version `,
    h("code", {}, p.version.slice(0, 12)));
  return [
    place,
    !p.current && h("p", { class: "note" }, "This version was replaced on ", when(p.valid_to), "."),
    changed && h("p", { class: "note" }, "The document has been read again since the answer: the text here is what stands there now."),
    h("div", { class: "text", tabindex: "0", role: "region", "aria-label": "Text of the document" },
      p.before, h("mark", {}, p.quote), p.after),
  ].filter(Boolean);
}
