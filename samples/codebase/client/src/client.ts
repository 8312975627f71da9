/**
 * Typed client of the Tallyroom HTTP interface.
 *
 * Every changing request carries an idempotency key, so repeating it is safe.
 * A request is abandoned after 8 seconds unless the caller sets `timeoutMs`.
 */

/** Amounts are minor units; never divide them by 100 to compute. */
export interface Money {
  minor: number;
  currency: string;
}

export type InvoiceState =
  | "received"
  | "parsed"
  | "approved"
  | "posted"
  | "paid"
  | "rejected";

export interface Invoice {
  key: string;
  state: InvoiceState;
  total: Money;
  /** Calendar date, `YYYY-MM-DD`, without a time zone. */
  due: string;
}

export interface ClientOptions {
  baseUrl: string;
  token: string;
  timeoutMs?: number;
  maxAttempts?: number;
  fetchFn?: typeof fetch;
}

export const DEFAULT_TIMEOUT_MS = 8_000;
/** Fewer attempts than the Python package makes: a person waits for this one. */
export const DEFAULT_MAX_ATTEMPTS = 3;
export const PAGE_SIZE = 50;

const RETRYABLE = new Set([429, 502, 503, 504]);

export class ApiError extends Error {
  readonly status: number;

  constructor(status: number, message: string) {
    super(`${status}: ${message}`);
    this.name = "ApiError";
    this.status = status;
  }
}

export class TallyroomClient {
  private readonly options: Required<ClientOptions>;

  constructor(options: ClientOptions) {
    this.options = {
      timeoutMs: DEFAULT_TIMEOUT_MS,
      maxAttempts: DEFAULT_MAX_ATTEMPTS,
      fetchFn: fetch,
      ...options,
    };
  }

  /** Reads one invoice; an unknown key rejects with `ApiError` 404. */
  async get(key: string): Promise<Invoice> {
    return this.request<Invoice>("GET", `/v2/invoices/${encodeURIComponent(key)}`);
  }

  /** Approves an invoice. The token needs the role `approver`. */
  async approve(key: string): Promise<Invoice> {
    const path = `/v2/invoices/${encodeURIComponent(key)}/approve`;
    return this.request<Invoice>("POST", path, `approve:${key}`);
  }

  /** Yields every invoice; a page shorter than PAGE_SIZE is the last one. */
  async *list(): AsyncGenerator<Invoice> {
    for (let page = 1; ; page += 1) {
      const batch = await this.request<Invoice[]>("GET", `/v2/invoices?page=${page}`);
      yield* batch;
      if (batch.length < PAGE_SIZE) return;
    }
  }

  private async request<T>(method: string, path: string, idempotencyKey?: string): Promise<T> {
    const { baseUrl, token, timeoutMs, maxAttempts, fetchFn } = this.options;
    for (let attempt = 1; ; attempt += 1) {
      const headers: Record<string, string> = { Authorization: `Bearer ${token}` };
      if (idempotencyKey !== undefined) headers["Idempotency-Key"] = idempotencyKey;
      const answer = await fetchFn(baseUrl + path, {
        method,
        headers,
        signal: AbortSignal.timeout(timeoutMs),
      });
      if (answer.ok) return (await answer.json()) as T;
      if (!RETRYABLE.has(answer.status) || attempt >= maxAttempts) {
        throw new ApiError(answer.status, await answer.text());
      }
      // 250 ms, 500 ms, 1 s, ...: linear growth proved too slow for the ledger.
      await new Promise((resolve) => setTimeout(resolve, 250 * 2 ** (attempt - 1)));
    }
  }
}
