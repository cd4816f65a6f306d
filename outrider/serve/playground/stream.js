// Talking to the server: what is asked of it, and the events of a streamed answer.

export const AUTO = "auto"; // the draft length that leaves the choice to the server

/** Something went wrong that the reader of the page can be told in one sentence. `status`, `code`: the server's, where it gave them. */
export class Trouble extends Error {
  constructor(message, status = null, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The body of one request for an answer to `messages`, or for more of their last. `length`: AUTO, 0 for none, or the
    number of draft tokens of every step. */
export function requestBody(wish, messages, length, continued = false) {
  const body = {
    model: wish.model, stream: true, stream_options: { include_usage: true }, return_token_origins: true,
    ...wish.sampling, speculation: speculation(length, wish.drafter),
  };
  if (wish.seed !== null) body.seed = wish.seed;
  if (wish.format === "text") {
    const last = messages.findLastIndex((message) => message.role === "user");
    return { ...body, prompt: messages.slice(last).map(told).join("") };
  }
  body.messages = messages.map((message) => ({ role: message.role, content: told(message) }));
  if (wish.system) body.messages.unshift({ role: "system", content: wish.system });
  body.separate_reasoning = false; // tokens as they come
  if (continued) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return body;
}

/** What the model reads of a message: its files, each between fences longer than any in it, and its text. */
export function told(message) {
  const files = (message.files ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text}\n${fence}\n\n`;
  });
  return files.join("") + message.content;
}

function speculation(length, drafter) {
  if (length === 0) return { mode: "off" };
  const wanted = length === AUTO ? { mode: "auto" } : { mode: "fixed", max_draft_tokens: length };
  if (drafter) wanted.drafter = drafter;
  return wanted;
}

/** The parsed objects of a streamed answer, until [DONE]. Throws Trouble where it is refused or breaks off. */
export async function* stream(body, key, signal) {
  const response = await call(body.messages ? "v1/chat/completions" : "v1/completions", key, body, signal);
  for await (const event of events(response)) {
    if (event.error) throw new Trouble(event.error.message ?? "The server broke off without a reason.");
    yield event;
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true };
      });
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
export async function call(path, key, body = null, signal = undefined) {
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
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let said = "";
  let code = null;
  try {
    const answer = await response.json();
    said = answer.error?.message ?? (typeof answer.detail === "string" ? answer.detail : "");
    code = answer.error?.code ?? null;
  } catch { /* not JSON: a proxy answered */ }
  return new Trouble(refusalWords(response, said, code), response.status, code);
}

function refusalWords(response, said, code) {
  if (response.status === 401) return `The server wants an API key: enter it in the settings. ${said}`.trim();
  if (response.status === 429) {
    const wait = Number(response.headers.get("Retry-After"));
    return `The server is busy. ${wait ? `Try again in ${wait} s. ` : ""}${said}`.trim();
  }
  if (code === "context_length_exceeded") return `Too long for this model. Shorten the message, or start a new conversation. (${said})`;
  return said || `The server refused with status ${response.status} and no reason.`;
}
