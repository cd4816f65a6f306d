// The page: settings, turns, tokens. Whatever a model or a server wrote goes in as text, never as HTML.

const HARMFUL = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufdd0-\ufdef\ufffe\uffff]|\p{Cs}/gu;
const EXAMPLE = "Sam has 37 lemons and James has 18 lemons. How many more lemons does Sam have?";
const KEY = "outrider-api-key";

const at = (id) => document.getElementById(id);
const clean = (text) => text.replace(/\r\n/g, "\n").replace(HARMFUL, "\ufffd");
const shown = (number, digits) => (number === null || number === undefined ? "–" : number.toFixed(digits));

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = clean(text);
  return element;
}

function tell(text) { at("status").textContent = text; }

// ---- settings

const RETRY_MS = 1000; // while the server loads its models

let models = [];
let again = null; // timer of the next try
let history = []; // what the model is told of the conversation
let running = null; // AbortController of the turn that runs

async function loadModels() {
  try {
    models = (await (await call("v1/models", at("key").value)).json()).data;
  } catch (error) {
    models = [];
    const loading = error.status === 503;
    at("about").textContent = loading ? "The server is loading its models. This page waits for them." : clean(error.message);
    at("about").className = loading ? "subtitle" : "bad";
    clearTimeout(again);
    if (loading) again = setTimeout(loadModels, RETRY_MS);
    return;
  }
  fill(at("model"), models.map((model) => [model.id, nameOf(model.id)]));
  at("about").className = "subtitle";
  showModel();
}

/** What a model is called here: of a path its last part, where no other model has the same one. */
function nameOf(id) {
  const last = (path) => path.split("/").pop();
  return id.startsWith("/") && models.filter((one) => last(one.id) === last(id)).length === 1 ? last(id) : id;
}

function showModel() {
  const model = models.find((one) => one.id === at("model").value) ?? {};
  const drafters = (model.drafters ?? []).map((one) => (typeof one === "string" ? one : one.name));
  fill(at("drafter"), [["", "the server's choice"], ...drafters.map((name) => [name, name])]);
  const facts = [model.id ? nameOf(model.id) : "no model", drafters.length ? `drafters: ${drafters.join(", ")}` : "no drafter"];
  if (model.max_model_len) facts.push(`${model.max_model_len} tokens of context`);
  at("about").textContent = clean(facts.join(" · "));
  at("about").title = clean(model.id ?? "");
}

function fill(select, options) {
  const before = select.value;
  select.replaceChildren(...options.map(([value, text]) => {
    const option = make("option", "", text);
    option.value = value;
    return option;
  }));
  if (options.some(([value]) => value === before)) select.value = before;
}

function showSliders() {
  const length = Number(at("length").value);
  const words = length === AUTO ? "auto" : length === 0 ? "0, off" : `${length}`;
  at("length-shown").textContent = words;
  at("length").setAttribute("aria-valuetext", words);
  at("temperature-shown").textContent = Number(at("temperature").value) === 0 ? "0, greedy" : at("temperature").value;
}

/** The settings as they are now. Throws Trouble where one cannot be used. */
function wishes() {
  if (!at("fields").reportValidity()) throw new Trouble("One of the settings cannot be used: it is marked.");
  const seed = at("seed").value.trim();
  return {
    model: at("model").value, drafter: at("drafter").value, format: at("format").value, compare: at("compare").checked,
    atOnce: at("at-once").checked, length: Number(at("length").value), temperature: Number(at("temperature").value),
    maxTokens: Number(at("max-tokens").value),
    // both sides need the same seed; a single answer may leave it to the server
    seed: seed ? Number(seed) : at("compare").checked ? Math.floor(Math.random() * 2 ** 31) : null,
  };
}

// ---- one answer

/** A column: the tokens as they come, and their numbers. `done` says how it ended: null, a reason, or "error". */
class Answer {
  constructor(title) {
    this.text = "";
    this.done = null;
    this.reported = null;
    this.tally = new Tally();
    this.element = make("section", "answer");
    this.tokens = make("div", "tokens");
    this.tokens.dir = "auto";
    this.tokens.tabIndex = 0;
    this.tokens.setAttribute("role", "group");
    this.tokens.setAttribute("aria-label", `Answer ${title}. Left and right arrow keys go from token to token.`);
    this.numbers = make("dl", "numbers");
    this.element.append(make("h2", "", title), this.tokens, this.numbers);
    this.count();
  }

  async run(body, key, signal) {
    this.tally = new Tally();
    this.tokens.classList.add("running");
    try {
      const response = await call(body.messages ? "v1/chat/completions" : "v1/completions", key, body, signal);
      for await (const event of events(response)) this.take(event);
    } catch (error) {
      this.fail(error);
    }
    this.tokens.classList.remove("running");
    this.count();
    this.conclude();
  }

  take(event) {
    if (event.error) throw new Trouble(event.error.message ?? "The server broke off without a reason.");
    if (event.usage && !this.tally.passes) this.tally.tokens = event.usage.completion_tokens ?? 0; // no origins were sent
    this.reported = event.metrics ?? this.reported;
    for (const choice of event.choices ?? []) {
      const delta = choice.delta ?? choice;
      this.grow(delta.content ?? delta.text ?? "", delta.token_origins ?? choice.token_origins ?? []);
      this.done = choice.stop_reason === "timeout" ? "timeout" : choice.finish_reason ?? this.done;
    }
  }

  grow(text, origins) {
    this.text += text;
    const pieces = origins.map(([piece]) => piece).join("") === text;
    for (const [piece, fate] of origins) {
      const [step, place] = this.tally.add(fate);
      if (pieces && piece) this.show(piece, fate, `${FATES[fate]}\npass ${step}, token ${place} of it`);
    }
    if (!pieces && text) this.show(text, "plain", "the server did not say where these tokens came from");
    if (text || origins.length) this.tally.heard();
    this.count();
  }

  show(piece, fate, hover) {
    const token = make("span", piece.startsWith("\n") ? `${fate} break` : fate, piece);
    token.dataset.hover = `${JSON.stringify(clean(piece))}\n${hover}`;
    this.tokens.append(token);
  }

  count() {
    const { tally, reported } = this;
    const numbers = [
      ["tokens", `${tally.tokens}`], ["tokens/s", shown(tally.perSecond, 0)],
      ["first token", tally.firstAfter === null ? "–" : `${shown(tally.firstAfter, 2)} s`],
      ["τ", shown(tally.tau, 2)], ["α", shown(tally.alpha, 2)],
    ];
    const drafts = reported?.speculative_decoding;
    if (drafts) {
      const tested = tally.tested ? `${tally.tested} tested, ` : "";
      numbers.push(["kept", `${drafts.num_accepted_draft_tokens} of ${tested}${drafts.num_draft_tokens} drafted`]);
    }
    this.numbers.replaceChildren(...numbers.map(([name, value]) => {
      const pair = make("div");
      pair.append(make("dt", "", name), make("dd", "", value));
      return pair;
    }));
  }

  fail(error) {
    this.done = error.name === "AbortError" ? "abort" : "error";
    if (this.done === "abort") return;
    const words = error instanceof Trouble ? error.message : `The answer could not be read: ${error.message}`;
    const trouble = make("p", "bad", words);
    trouble.setAttribute("role", "alert");
    this.element.append(trouble);
  }

  conclude() {
    const why = { length: "ended at the most tokens allowed", abort: "stopped by you", timeout: "ended by the server's time limit" }[this.done];
    if (why) this.element.append(make("p", "end", why));
  }

  /** Mark the token in which character `place` stands. */
  mark(place) {
    let end = 0;
    for (const token of this.tokens.children) {
      end += token.textContent.length;
      if (end > place) return token.classList.add("differs");
    }
  }
}

// ---- one turn

async function send() {
  const asked = at("message").value.trim();
  if (running || !asked) return at("message").focus();
  running = new AbortController();
  const { signal } = running;
  const turn = make("article", "turn");
  turn.append(make("p", "asked", asked));
  at("turns").append(turn);
  busy(true);
  try {
    if (!models.length) await loadModels();
    const wish = wishes();
    at("message").value = "";
    const asking = [...history, { role: "user", content: asked }];
    const answers = await answer(turn, wish, asking, signal);
    if (!turn.isConnected) return; // reset meanwhile
    const said = answers[0].text;
    if (said) history = [...asking, { role: "assistant", content: said }];
    else if (answers[0].done === "error") at("message").value ||= asked;
    tell(`${answers[0].done === "error" ? "No whole answer" : "Answer ended"}: ${answers[0].tally.tokens} tokens. ${turn.dataset.verdict ?? ""}`);
  } catch (error) {
    const trouble = make("p", "bad", error.message);
    trouble.setAttribute("role", "alert");
    turn.append(trouble);
  } finally {
    running = null;
    busy(false);
    follow(turn);
  }
}

/** Run the one or two answers of a turn; the first is the one the conversation goes on with. */
async function answer(turn, wish, asking, signal) {
  const lengths = wish.compare ? [wish.length === 0 ? AUTO : wish.length, 0] : [wish.length];
  const answers = lengths.map((length) => new Answer(heading(length, wish.drafter)));
  const columns = make("div", wish.compare ? "answers two" : "answers");
  columns.append(...answers.map((one) => one.element));
  turn.append(columns);
  follow(turn, true);
  tell("The answer begins.");
  const key = at("key").value;
  const start = (one, place) => one.run(requestBody(wish, asking, lengths[place]), key, signal);
  const watch = setInterval(() => follow(turn), 250);
  try {
    if (wish.atOnce) await Promise.all(answers.map(start));
    else for (const [place, one] of answers.entries()) if (!failed(answers)) await start(one, place);
  } finally {
    clearInterval(watch);
  }
  if (wish.compare) turn.append(verdict(turn, wish, ...answers));
  return answers;
}

function heading(length, drafter) {
  if (length === 0) return "Without speculation";
  return `With speculation: ${drafter ? `${drafter}, ` : ""}${length === AUTO ? "auto" : `${length} draft tokens`}`;
}

const failed = (answers) => answers.some((one) => one.done === "error" || one.done === "abort");

function verdict(turn, wish, one, other) {
  const say = (tone, text) => {
    turn.dataset.verdict = text;
    return make("p", tone, text);
  };
  const seed = wish.temperature === 0 ? "greedy" : `seed ${wish.seed}`;
  const place = firstDifference(one.text, other.text);
  if (failed([one, other])) return say("caution", "Nothing to compare: at least one side did not end by itself.");
  if (place !== null) {
    one.mark(place);
    other.mark(place);
    const around = (text) => JSON.stringify(text.slice(Math.max(0, place - 12), place + 12));
    return say("bad", `The texts differ from character ${place + 1} on (${seed}): ${around(one.text)} against ${around(other.text)}.`);
  }
  const times = timesAsFast(one.tally, other.tally);
  const after = times === null ? "" : `After the first tokens ${shown(times, 2)} times as many tokens per second with speculation.`;
  const speed = wish.atOnce ? "Both ran at once, so their speeds do not tell." : after;
  return say("good", `Same text, character for character (${[...one.text].length} characters, ${seed}). ${speed}`);
}

function busy(is) {
  at("turns").setAttribute("aria-busy", `${is}`);
  if (!is && document.activeElement === at("stop")) at("message").focus();
  at("send").disabled = is;
  at("stop").disabled = !is;
}

/** Keep the end of a turn above the composer, unless the reader scrolled away from it. */
function follow(turn, force = false) {
  const hidden = turn.getBoundingClientRect().bottom + 12 - at("composer").getBoundingClientRect().top;
  if (hidden > 0 && (force || hidden < 240)) window.scrollBy(0, hidden);
}

function stop() { running?.abort(); }

function reset() {
  stop();
  history = [];
  at("turns").replaceChildren();
  at("message").value = "";
  at("message").focus();
  tell("A new conversation.");
}

// ---- the card of a token

const card = make("div", "card");
card.hidden = true;
card.setAttribute("role", "status");
document.body.append(card);
let pointed = null;

function hideCard() {
  pointed?.classList.remove("pointed");
  pointed = null;
  card.hidden = true;
}

function showCard(token) {
  if (!token || token === pointed) return;
  hideCard();
  pointed = token;
  token.classList.add("pointed");
  card.textContent = token.dataset.hover;
  card.hidden = false;
  const box = token.getClientRects()[0];
  const left = Math.min(box.left, document.documentElement.clientWidth - card.offsetWidth - 8);
  const above = box.top - card.offsetHeight - 6;
  card.style.left = `${Math.max(8, left) + window.scrollX}px`;
  card.style.top = `${window.scrollY + (above > 0 ? above : box.bottom + 6)}px`;
}

const tokenAt = (event) => event.target.closest?.("[data-hover]");
at("turns").addEventListener("pointerover", (event) => {
  if (event.pointerType === "mouse") { if (tokenAt(event)) showCard(tokenAt(event)); else hideCard(); }
});
at("turns").addEventListener("pointerleave", hideCard);
at("turns").addEventListener("focusout", hideCard);
at("turns").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const box = event.target.closest(".tokens");
  if (!step || !box) return;
  event.preventDefault();
  const tokens = [...box.children];
  const next = tokens[Math.max(0, Math.min(tokens.length - 1, tokens.indexOf(pointed) + step))];
  next?.scrollIntoView({ block: "nearest" });
  showCard(next);
});
document.addEventListener("click", (event) => {
  const token = tokenAt(event);
  if (!token || (token === pointed && event.pointerType !== "mouse")) hideCard(); else showCard(token);
});

// ---- what the controls do

at("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("fields").addEventListener("submit", (event) => event.preventDefault());
at("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { hideCard(); stop(); }
});
at("stop").addEventListener("click", stop);
at("reset").addEventListener("click", reset);
at("example").addEventListener("click", () => { at("message").value = EXAMPLE; at("message").focus(); });
at("model").addEventListener("change", showModel);
for (const id of ["length", "temperature"]) at(id).addEventListener("input", showSliders);
at("key").addEventListener("change", () => { sessionStorage.setItem(KEY, at("key").value); loadModels(); });

at("key").value = sessionStorage.getItem(KEY) ?? "";
at("settings").open = window.matchMedia("(min-width: 60rem)").matches;
if (at("settings").open) at("message").focus();
showSliders();
loadModels();
