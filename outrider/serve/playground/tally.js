// An answer as it grows: its text, what became of each token, and what can be counted.

export const FATES = {
  accepted: "drafted and accepted",
  correction: "the model's correction of a rejected draft token",
  bonus: "the model's bonus token after a draft kept whole",
  plain: "written by the model without a draft",
  unknown: "the server did not say where these tokens came from",
};
const LETTERS = { accepted: "a", correction: "c", bonus: "b", plain: "p", unknown: "u" }; // as a message keeps them, a letter a token
const NAMES = Object.fromEntries(Object.entries(LETTERS).map(([fate, letter]) => [letter, fate]));

/** Every token of a kept message: its text, its fate, and where it stands in the model's passes, both from 1. */
export function* tokensOf({ content, fates, lengths }) {
  let end = 0;
  let pass = 0;
  let place = 0;
  let before = null;
  for (const [index, length] of lengths.entries()) {
    const fate = NAMES[fates[index]];
    if (before !== "accepted") { pass += 1; place = 0; } // a pass ends with a token of the model's own
    place += 1;
    before = fate;
    end += length;
    yield { text: content.slice(end - length, end), fate, pass, place };
  }
}

/** Grows by the events of a stream into `message`, a message as storage.js keeps it; what that says already is continued. */
export class Reply {
  constructor(message) {
    this.message = message;
    if (message.content && !message.lengths.length) { // edited by the user
      message.fates = LETTERS.unknown;
      message.lengths = [message.content.length];
    }
    this.before = message.content.length;
    this.startedAt = performance.now();
    this.tokens = 0;
    this.counts = { accepted: 0, correction: 0, bonus: 0, plain: 0 };
    this.last = null;
    this.firstAt = null;
    this.atFirst = null; // tokens of the first chunk
    this.lastAt = null;
    this.reported = null;
  }

  get isEmpty() { return this.message.content.length === this.before; }

  take(event) {
    if (event.usage && !this.passes) this.tokens = event.usage.completion_tokens ?? 0; // no origins were sent
    this.reported = event.metrics ?? this.reported;
    for (const choice of event.choices ?? []) {
      const delta = choice.delta ?? choice;
      this.grow(delta.content ?? delta.text ?? "", delta.token_origins ?? choice.token_origins ?? []);
      const ended = choice.stop_reason === "timeout" ? "timeout" : choice.finish_reason;
      if (ended) this.message.ended = ended;
    }
    this.message.numbers = this.numbers;
  }

  grow(text, origins) {
    const { message } = this;
    message.content += text;
    for (const [, fate] of origins) {
      this.counts[fate] += 1;
      this.tokens += 1;
      this.last = fate;
    }
    if (origins.map(([piece]) => piece).join("") === text) {
      message.fates += origins.map(([, fate]) => LETTERS[fate]).join("");
      message.lengths.push(...origins.map(([piece]) => piece.length));
    } else {
      message.fates += LETTERS.unknown;
      message.lengths.push(text.length);
    }
    if (!text && !origins.length) return;
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    this.atFirst ??= this.tokens;
  }

  get passes() {
    const { correction, bonus, plain } = this.counts;
    return correction + bonus + plain + (this.last === "accepted" ? 1 : 0);
  }

  /** Tokens per second that followed the first ones: by the server's clock once it told, else by this page's, which counts from
      the first chunk; null where the answer came in one. */
  get perSecond() {
    const measured = this.reported?.timing?.decode_tokens_per_s;
    if (measured) return measured;
    return this.lastAt > this.firstAt ? (this.tokens - this.atFirst) / ((this.lastAt - this.firstAt) / 1000) : null;
  }

  get numbers() {
    const tested = this.counts.accepted + this.counts.correction;
    const drafts = this.reported?.speculative_decoding;
    return {
      tokens: this.tokens, perSecond: this.perSecond,
      firstAfter: this.firstAt === null ? null : (this.firstAt - this.startedAt) / 1000,
      tau: this.passes ? this.tokens / this.passes : null, alpha: tested ? this.counts.accepted / tested : null,
      accepted: drafts?.num_accepted_draft_tokens ?? null, tested, drafted: drafts?.num_draft_tokens ?? null,
    };
  }
}
