// The same question with drafts and without, three times each in turns: the same text, and how much faster.

import { AnswerView, answerActions, verdictView } from "./answer.js";
import { make, tell } from "./dom.js";
import { newAnswer } from "./storage.js";
import { AUTO } from "./stream.js";
import { Reply } from "./tally.js";

const RUNS = 3;
const NUMBERS = ["no", "one", "two", "three"];

/** The two columns. `answer`: the message of the first, which the conversation continues with. */
export class Comparison {
  constructor(answer, wish) {
    this.answer = answer;
    this.wish = wish;
    this.lengths = [wish.length === 0 ? AUTO : wish.length, 0];
    this.messages = [answer, newAnswer(answer.isJson)];
    this.views = [new AnswerView(this.messages[0], withDrafts(wish, this.lengths[0])), new AnswerView(this.messages[1], "Without drafts")];
    this.columns = make("div", "columns");
    this.columns.append(...this.views.map((view) => view.element));
    this.progress = make("p", "end");
    this.element = make("article", "message answer");
    this.element.setAttribute("aria-label", "Answers with and without drafts");
    this.element.append(this.columns, this.progress, answerActions());
  }

  show() { for (const view of this.views) view.show(); }

  /** `ask(reply, length, grew)` fills a reply. The verdict is on the rounds that were whole. Throws what `ask` throws, except
      that somebody stopped it after the first round. */
  async run(ask) {
    const rounds = [];
    try {
      for (let number = 0; number < RUNS; number += 1) rounds.push(await this.round(number, ask));
    } catch (error) {
      if (!rounds.length || error.name !== "AbortError") throw error;
    } finally {
      this.answer.verdict = this.verdict(rounds);
      this.progress.replaceWith(verdictView(this.answer.verdict));
      this.show();
    }
  }

  /** Both sides once; which goes first alternates, so that what happens meanwhile on the machine harms both. */
  async round(number, ask) {
    const replies = [null, null];
    for (const side of number % 2 ? [1, 0] : [0, 1]) {
      const view = this.views[side];
      this.progress.textContent = `Run ${number + 1} of ${RUNS}, ${side ? "without drafts" : "with drafts"}.`;
      tell(this.progress.textContent);
      replies[side] = new Reply(number ? newAnswer(this.answer.isJson) : this.messages[side]);
      view.element.classList.add("running");
      try {
        await ask(replies[side], this.lengths[side], number ? () => {} : () => view.grow());
      } finally {
        view.element.classList.remove("running");
      }
      if (!number) view.show();
    }
    return replies;
  }

  verdict(rounds) {
    if (!rounds.length) return { tone: "caution", headline: "Nothing to compare.", text: "At least one side did not end by itself." };
    const speed = speedWords(rounds.map(([one, other]) => one.perSecond / other.perSecond));
    const draw = this.wish.sampling.temperature === 0 ? "greedy" : `seed ${this.wish.seed}`;
    const text = rounds[0][0].message.content;
    const other = rounds.flat().map((reply) => reply.message.content).find((said) => said !== text);
    if (other === undefined) {
      return { ...speed, text: `${speed.text} Same text each time, character for character (${[...text].length} characters, ${draw}).` };
    }
    const place = firstDifference(text, other);
    for (const view of this.views) view.differsAt = place;
    const around = (said) => JSON.stringify(said.slice(Math.max(0, place - 12), place + 12));
    const where = `From character ${place + 1} on (${draw}): ${around(text)} against ${around(other)}.`;
    return { tone: "bad", headline: "The texts differ.", text: `${where} ${speed.headline} ${speed.text}` };
  }
}

function withDrafts(wish, length) {
  const drafter = wish.drafter ? `${wish.drafter}, ` : "";
  return `With drafts: ${drafter}${length === AUTO ? "auto" : `${length} a step`}`;
}

/** What the ratios of tokens per second with and without drafts, one a round, say. */
function speedWords(ratios) {
  const times = ratios.filter((ratio) => Number.isFinite(ratio) && ratio > 0).sort((one, other) => one - other);
  if (!times.length) return { tone: "caution", headline: "Too short an answer to compare speeds.", text: "" };
  const low = times[0];
  const high = times.at(-1);
  const middle = (times[Math.floor((times.length - 1) / 2)] + times[Math.ceil((times.length - 1) / 2)]) / 2;
  const runs = `over ${NUMBERS[times.length]} run${times.length === 1 ? "" : "s"}.`;
  const factor = (ratio) => `${Math.max(ratio, 1 / ratio).toFixed(1)}x`;
  const direction = (ratio) => `${factor(ratio)} ${ratio < 1 ? "slower" : "faster"}`;
  if (factor(middle) === "1.0x" || (low < 1 && high > 1)) {
    return { tone: "caution", headline: "About as fast with drafts as without.", text: `Between ${direction(low)} and ${direction(high)} ${runs}` };
  }
  const range = middle > 1 ? `${factor(low)} to ${factor(high)}` : `${factor(high)} to ${factor(low)}`;
  return { tone: middle > 1 ? "good" : "bad", headline: `${direction(middle)} with drafts.`, text: times.length > 1 ? `${range} ${runs}` : `Measured ${runs}` };
}

/** Where two texts part, in characters. */
function firstDifference(one, other) {
  let place = 0;
  while (one[place] === other[place]) place += 1;
  return place;
}
