// The service as this page sees it. A key lives in this tab's session storage and goes nowhere but into the header. Without one
// the cookie of a login speaks for the user, and what changes something shows that login's token too.

const KEY = "preread.key";
const ENDED = new Set(["cancelled", "completed", "completed_with_errors", "failed"]);

export class ApiError extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `The server answered ${status}.`);
    this.status = status;
    this.code = body?.error?.code ?? null;
  }
}

export const key = () => sessionStorage.getItem(KEY);
export const keepKey = (value) => sessionStorage.setItem(KEY, value);
export const dropKey = () => sessionStorage.removeItem(KEY);
export const hasEnded = (job) => ENDED.has(job.status);

let token = null;

async function credentials(method) {
  if (key()) return { authorization: `Bearer ${key()}` };
  if (method === "GET") return {};
  token ??= (await get("/auth/session")).csrf_token;
  return { "x-csrf-token": token };
}

// End the login whose cookie this browser holds.
export async function logOut() {
  await post("/auth/logout");
  token = null;
}

async function failure(reply) {
  let body = null;
  try {
    body = await reply.json();
  } catch {
    // not JSON: the status has to do
  }
  if (reply.status === 401) dispatchEvent(new Event("preread:signed-out"));
  return refusal(reply.status, body);
}

function refusal(status, body) {
  const error = new ApiError(status, body);
  if (error.code === "csrf_token_missing") token = null; // of a login before this one: the next try asks for another
  return error;
}

async function open(method, path, { json, headers = {}, signal } = {}) {
  const sent = json === undefined ? {} : { "content-type": "application/json" };
  const options = { method, signal, cache: "no-store", headers: { ...(await credentials(method)), ...sent, ...headers } };
  if (json !== undefined) options.body = JSON.stringify(json);
  const reply = await fetch(path, options);
  if (!reply.ok) throw await failure(reply);
  return reply;
}

export const call = async (method, path, options) => (await open(method, path, options)).json();
export const get = (path, options) => call("GET", path, options);
export const post = (path, json = {}) => call("POST", path, { json });
export const put = (path, json) => call("PUT", path, { json });
export const remove = (path) => call("DELETE", path);
export const part = encodeURIComponent;

// All items of a list, up to `most`.
export async function all(path, most = 1000) {
  const found = [];
  let after = "";
  for (;;) {
    const page = await get(`${path}${path.includes("?") ? "&" : "?"}limit=100${after}`);
    found.push(...page.data);
    if (!page.has_more || found.length >= most || !page.last_id) return found;
    after = `&after=${part(page.last_id)}`;
  }
}

// Server-sent events as {id, data}. EventSource cannot send a key.
export async function* events(method, path, options = {}) {
  const reply = await open(method, path, options);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const event = { id: null, data: "" };
        for (const line of frame.split("\n")) {
          if (line.startsWith("data: ")) event.data += line.slice(6);
          else if (line.startsWith("id: ")) event.id = line.slice(4);
        }
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// A job to its end. A stream that breaks off is resumed after the last event that came.
export async function follow(jobId, onJob, signal) {
  let last = null, wait = 500;
  for (;;) {
    try {
      const headers = last === null ? {} : { "last-event-id": last };
      for await (const event of events("GET", `/v1/jobs/${part(jobId)}/events`, { headers, signal })) {
        last = event.id ?? last;
        wait = 500;
        const job = JSON.parse(event.data);
        onJob(job);
        if (hasEnded(job)) return job;
      }
      const job = await get(`/v1/jobs/${part(jobId)}`, { signal });
      if (hasEnded(job)) return onJob(job), job;
    } catch (error) {
      if (signal?.aborted || error instanceof ApiError) throw error;
    }
    await pause(wait);
    wait = Math.min(2 * wait, 8000);
  }
}

// A form with files. fetch() does not tell how much has been sent.
export async function send(path, form, onSent) {
  const headers = await credentials("POST");
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", (event) => event.lengthComputable && onSent(event.loaded, event.total));
    request.addEventListener("error", () => reject(new Error("The upload did not reach the server. Try again.")));
    request.addEventListener("load", () => {
      let body = null;
      try {
        body = JSON.parse(request.responseText);
      } catch {
        // not JSON: the status has to do
      }
      if (request.status < 300) resolve(body);
      else reject(refusal(request.status, body));
    });
    request.send(form);
  });
}
