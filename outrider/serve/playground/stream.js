// Talking to the server: what is asked of it, the events of a streamed answer, and what can be counted while it runs.

const FATES = {
  accepted: "drafted and accepted",
  correction: "the target's correction of a rejected draft token",
  bonus: "the target's bonus token after a draft kept whole",
  plain: "written by the target without a draft",
};
const AUTO = -1; // the draft length that leaves the choice to the server

/** Something went wrong that the reader of the page can be told in one sentence. `status`: of the server's answer, where it gave one. */
class Trouble extends Error {
  constructor(message, status = null) {
    super(message);
    this.status = status;
  }
}

/** The body of one request. `length`: AUTO, 0 for none, or the number of draft tokens of every step. */
function requestBody(wish, history, length) {
  const body = {
    model: wish.model, stream: true, stream_options: { include_usage: true }, return_token_origins: true,
    temperature: wish.temperature, max_tokens: wish.maxTokens, speculation: speculation(length, wish.drafter),
  };
  if (wish.seed !== null) body.seed = wish.seed;
  if (wish.format === "chat") Object.assign(body, { messages: history, separate_reasoning: false }); // tokens as they come
  else body.prompt = history[history.length - 1].content;
  return body;
}

function speculation(length, drafter) {
  if (length === 0) return { mode: "off" };
  const wanted = length === AUTO ? { mode: "auto" } : { mode: "fixed", max_draft_tokens: length };
  if (drafter) wanted.drafter = drafter;
  return wanted;
}

/** The parsed objects of a stream of server-sent events, until [DONE]. Throws Trouble where it breaks off. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Trouble("The connection ended in the middle of the answer.");
      const whole = (rest + value).split(/\r?\n\r?\n/);
      rest = whole.pop();
      for (const event of whole) {
        const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may be cancelled already, by Stop
  }
}

/** GET, or POST where there is a body. Throws Trouble with the server's own words when it refuses. */
async function call(path, key, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, credentials: "same-origin" };
  if (body) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("The server does not answer. Is it still running?");
  }
  if (!response.ok) throw new Trouble(await refusal(response), response.status);
  return response;
}

async function refusal(response) {
  let said = "";
  try {
    const answer = await response.json();
    said = answer.error?.message ?? (typeof answer.detail === "string" ? answer.detail : "");
  } catch { /* not JSON: a proxy answered */ }
  if (response.status === 401) return `The server wants an API key: enter it in the settings. ${said}`.trim();
  if (response.status === 429) {
    const wait = Number(response.headers.get("Retry-After"));
    return `The server is busy. ${wait ? `Try again in ${wait} s. ` : ""}${said}`.trim();
  }
  return said || `The server refused with status ${response.status} and no reason.`;
}

/** What one answer has been so far, in this page's own clock. */
class Tally {
  constructor() {
    this.fates = { accepted: 0, correction: 0, bonus: 0, plain: 0 };
    this.tokens = 0;
    this.last = null;
    this.startedAt = performance.now();
    this.firstAt = null;
    this.atFirst = null; // tokens of the first chunk
    this.lastAt = null;
  }

  /** Count a token; returns [step, place in the step], both from 1. A step ends with a token of the target's own. */
  add(fate) {
    const step = this.passes + (this.last === "accepted" ? 0 : 1);
    this.place = this.last === "accepted" ? this.place + 1 : 1;
    this.fates[fate] += 1;
    this.tokens += 1;
    this.last = fate;
    return [step, this.place];
  }

  /** After the tokens of a chunk were added. */
  heard() {
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    this.atFirst ??= this.tokens;
  }

  get passes() {
    const { correction, bonus, plain } = this.fates;
    return correction + bonus + plain + (this.last === "accepted" ? 1 : 0);
  }

  get tau() { return this.passes ? this.tokens / this.passes : null; }

  get tested() { return this.fates.accepted + this.fates.correction; }

  get alpha() { return this.tested ? this.fates.accepted / this.tested : null; }

  get firstAfter() { return this.firstAt === null ? null : (this.firstAt - this.startedAt) / 1000; }

  /** Tokens per second behind the first chunk; null where the answer came in one. */
  get perSecond() {
    return this.lastAt > this.firstAt ? (this.tokens - this.atFirst) / ((this.lastAt - this.firstAt) / 1000) : null;
  }
}

/** How many times the tokens per second of `other` `one` had, once each had begun: reading the prompt, which the second of
    two finds cached, is left out. null where an answer came in one piece. */
function timesAsFast(one, other) {
  const times = one.perSecond / other.perSecond;
  return Number.isFinite(times) && times > 0 ? times : null;
}

/** Where two texts part, in characters; null when they are the same. */
function firstDifference(one, other) {
  if (one === other) return null;
  let place = 0;
  while (place < one.length && one[place] === other[place]) place += 1;
  return place;
}
