// How a message looks. An answer is read as formatted text or watched token by token, whichever <body data-mode> says.

import { clean, iconButton, make, shown } from "./dom.js";
import { formatted } from "./markdown.js";
import { FATES, tokensOf } from "./tally.js";

const ENDS = {
  length: "Ended at the most tokens allowed.", abort: "Stopped by you.", timeout: "Ended by the server's time limit.",
  edited: "Edited by you.",
};
const REST = 3; // formatting a growing answer anew takes at most a quarter of the time

export const isWatching = () => document.body.dataset.mode === "watching";

/** A user's message with its buttons. */
export function questionView(message) {
  const element = make("article", "message question");
  element.setAttribute("aria-label", "Your message");
  const bubble = make("div", "bubble", message.content);
  bubble.dir = "auto";
  for (const file of message.files ?? []) bubble.append(make("span", "file", `${file.name}, ${file.text.length} characters`));
  element.append(bubble, actions([["copy", "Copy"], ["edit", "Edit"]]));
  return element;
}

export function answerActions() {
  return actions([["copy", "Copy"], ["edit", "Edit"], ["regenerate", "Regenerate"], ["continue", "Continue"]]);
}

function actions(wanted) {
  const group = make("div", "actions");
  group.append(...wanted.map(([action, label]) => iconButton(action, label, action)));
  return group;
}

/** What a comparison found. */
export function verdictView({ tone, headline, text }) {
  const element = make("p", `${tone} verdict`);
  element.append(make("strong", "", headline), ` ${clean(text)}`);
  return element;
}

/** What a token says about itself; card.js shows it. */
const cards = new WeakMap();
export const cardOf = (token) => cards.get(token);

/** An answer: its text, its numbers, what became of it, its buttons. `title`: above it, where there are several. */
export class AnswerView {
  constructor(message, title = "") {
    this.message = message;
    this.numShown = 0; // tokens
    this.nextAt = 0;
    this.isAlone = !title;
    this.differsAt = null; // a character, where the text is compared with another one
    this.element = make(title ? "section" : "article", title ? "side" : "message answer");
    this.element.setAttribute("aria-label", title || "Answer");
    this.text = make("div");
    this.text.dir = "auto";
    this.numbers = make("dl", "numbers");
    this.end = make("div", "ends");
    this.foot = make("div", "foot");
    this.foot.append(this.numbers);
    if (title) this.element.append(make("h2", "", title));
    else this.foot.append(answerActions());
    this.element.append(this.text, this.end, this.foot);
    this.show();
  }

  /** Everything anew: after a change of the mode or at the answer's end. */
  show() {
    this.numShown = 0;
    this.text.replaceChildren();
    this.text.className = isWatching() ? "tokens" : "prose";
    if (isWatching()) {
      this.text.tabIndex = 0;
      this.text.setAttribute("role", "group");
      this.text.setAttribute("aria-label", "Tokens. Left and right arrow keys go from token to token.");
    } else for (const name of ["tabindex", "role", "aria-label"]) this.text.removeAttribute(name);
    this.grow(true);
    this.conclude();
  }

  /** Show what came since. Formatted text is made again as a whole, so now and then only unless `all` is wanted. */
  grow(all = false) {
    this.count();
    if (isWatching()) return this.growTokens();
    const begun = performance.now();
    if (!all && begun < this.nextAt) return;
    const fragment = formatted(this.message);
    fragment.querySelector(".thoughts")?.toggleAttribute("open", this.text.querySelector(".thoughts")?.open ?? false);
    replaceTail(this.text, fragment);
    const ended = performance.now();
    this.nextAt = ended + REST * (ended - begun);
  }

  growTokens() {
    const { message } = this;
    if (message.content && !message.lengths.length) return this.text.replaceChildren(make("span", "", message.content));
    let number = 0;
    for (const token of tokensOf(message)) {
      number += 1;
      if (number <= this.numShown || !token.text) continue;
      const span = make("span", token.text.startsWith("\n") ? `${token.fate} break` : token.fate, token.text);
      const place = token.fate === "unknown" ? "" : `\npass ${token.pass}, token ${token.place} of it`;
      cards.set(span, `${JSON.stringify(clean(token.text))}\n${FATES[token.fate]}${place}`);
      this.text.append(span);
    }
    this.numShown = number;
  }

  count() {
    const { numbers } = this.message;
    this.numbers.hidden = !numbers;
    if (!numbers) return;
    const tested = numbers.tested ? `${numbers.tested} tested, ` : "";
    const pairs = [
      ["tokens", `${numbers.tokens}`, ""], ["tokens/s", shown(numbers.perSecond, 0), ""],
      ["first token", numbers.firstAfter === null ? "–" : `${shown(numbers.firstAfter, 2)} s`, "detail"],
      ["τ", shown(numbers.tau, 2), "detail"],
    ];
    if (numbers.alpha !== null) pairs.push(["α", shown(numbers.alpha, 2), "detail"]);
    if (numbers.drafted !== null) pairs.push(["kept", `${numbers.accepted} of ${tested}${numbers.drafted} drafted`, "detail"]);
    this.numbers.replaceChildren(...pairs.map(([name, value, kind]) => {
      const pair = make("div", kind);
      pair.append(make("dt", "", name), make("dd", "", value));
      return pair;
    }));
  }

  conclude() {
    const { ended, trouble, verdict } = this.message;
    this.end.replaceChildren();
    if (isWatching() && this.differsAt !== null) this.mark(this.differsAt);
    if (ended === "stop" && !this.message.content) this.end.append(make("p", "end", "The model wrote nothing."));
    if (ENDS[ended]) this.end.append(make("p", "end", ENDS[ended]));
    if (trouble) this.end.append(make("p", "bad", trouble));
    if (verdict && this.isAlone) this.end.append(verdictView(verdict));
  }

  set isRunning(is) {
    this.element.classList.toggle("running", is);
    this.element.setAttribute("aria-busy", `${is}`);
  }

  /** Mark the token in which character `place` stands. */
  mark(place) {
    let end = 0;
    for (const token of this.text.children) {
      end += token.textContent.length;
      if (end > place) return token.classList.add("differs");
    }
  }
}

/** Make `box` contain what `fragment` does, and touch nothing in front of the first difference: what is selected there stays. */
function replaceTail(box, fragment) {
  let kept = 0;
  while (box.childNodes[kept]?.isEqualNode(fragment.childNodes[kept] ?? null)) kept += 1;
  while (box.childNodes.length > kept) box.lastChild.remove();
  box.append(...[...fragment.childNodes].slice(kept));
}
