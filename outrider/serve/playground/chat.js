// The conversation that is open: what is on the screen, and what the buttons of its messages do.

import { AnswerView, questionView } from "./answer.js";
import { Comparison } from "./compare.js";
import { at, copy, hideNotice, make, notice, tell } from "./dom.js";
import { invite } from "./empty.js";
import { filesOfMessage, setFiles } from "./files.js";
import { wishes } from "./settings.js";
import { newAnswer, newConversation } from "./storage.js";
import { requestBody, stream } from "./stream.js";
import { Reply } from "./tally.js";
import { bringBack, earlierThan } from "./versions.js";

const NAME_LENGTH = 48;
const NEAR_END = 60; // pixels

const box = at("scroller");
let conversation = newConversation();
let rows = []; // { message, view } of what is on the screen
let running = null; // { control, question, answer, messages, earlier, asked, view } of the turn that runs
let whenChanged = () => {}; // (conversation): its messages are other ones

export const openConversation = () => conversation;
export const isRunning = () => running !== null;
export function onChange(does) { whenChanged = does; }

export function open(wanted) {
  stop();
  if (wanted !== conversation) at("turns").replaceChildren(...(rows = []));
  conversation = wanted;
  at("system").value = wanted.system;
  hideNotice();
  show();
  toEnd();
}

/** Bring the screen to the conversation's messages; those that are there already stay untouched. */
function show() {
  const { messages } = conversation;
  let same = 0;
  while (same < rows.length && rows[same].message === messages[same]) same += 1;
  for (const { view } of rows.splice(same)) view.element.remove();
  const added = messages.slice(same).map((message) => ({ message, view: viewOf(message) }));
  at("turns").append(...added.map(({ view }) => view.element));
  rows.push(...added);
  at("earlier").hidden = !conversation.earlier.length || isRunning();
  at("earlier-text").textContent = conversation.earlier.length > 1 ? `${conversation.earlier.length} earlier versions are kept.` : "The version before is kept.";
  at("empty").hidden = rows.length > 0 || isRunning();
  if (!at("empty").hidden) invite((text) => { at("message").value = text; send(); });
}

const viewOf = (message) => (message.role === "user" ? { element: questionView(message), show() {} } : new AnswerView(message));

document.addEventListener("mode", () => {
  const top = box.getBoundingClientRect().top;
  const first = rows.find(({ view }) => view.element.getBoundingClientRect().bottom > top)?.view.element;
  const before = first?.getBoundingClientRect().top;
  for (const { view } of rows) view.show();
  running?.view?.show();
  if (first && !follows) box.scrollTop += first.getBoundingClientRect().top - before; // what is read stays in its place
});
document.addEventListener("models", show);

// ---- asking

export async function send() {
  const text = at("message").value.trim();
  const files = filesOfMessage();
  if (running || !(text || files.length)) return at("message").focus();
  const question = files.length ? { role: "user", content: text, files } : { role: "user", content: text };
  at("message").value = "";
  setFiles([]);
  if (!await turn([...conversation.messages, question])) giveBack(question);
}

function giveBack(question) {
  at("message").value ||= question.content;
  if (!filesOfMessage().length) setFiles(question.files ?? []);
}

/** Answer `messages`, which the open conversation then consists of; or give more of `begun`, an answer. Where nothing comes,
    the conversation stays as it was. Returns whether something came. */
async function turn(messages, begun = null) {
  const asked = conversation;
  const before = asked.messages;
  const control = new AbortController();
  const earlier = earlierThan(begun ? [...messages, begun] : messages, asked);
  running = { control, question: messages.at(-1), messages, earlier, answer: null, asked, view: null };
  hideNotice();
  busy(true);
  let trouble = null;
  let wish = null;
  let answer = null;
  try {
    wish = { ...await wishes(), system: asked.system };
    answer = begun ? { ...begun, lengths: [...begun.lengths], ended: null } : newAnswer(wish.isJson);
    if (begun) for (const name of ["trouble", "verdict"]) delete answer[name];
    running.answer = answer;
    asked.messages = messages;
    if (asked === conversation) show();
    await fetchAnswer(answer, wish, begun, control.signal);
  } catch (error) {
    trouble = error;
  }
  const { view } = running;
  running = null;
  const came = answer !== null && (trouble === null || answer.content.length > (begun?.content.length ?? 0));
  if (came) finish(asked, { messages, earlier }, answer, view, trouble); else undo(asked, before, view, trouble);
  busy(false);
  show();
  return came;
}

async function fetchAnswer(answer, wish, begun, signal) {
  const messages = begun ? [...running.messages, begun] : running.messages;
  const view = wish.compare && !begun ? new Comparison(answer, wish) : new AnswerView(answer);
  running.view = view;
  at("turns").append(view.element);
  toEnd();
  tell("The answer begins.");
  const ask = async (reply, length, grew) => {
    for await (const event of stream(requestBody(wish, messages, length, begun !== null), wish.key, signal)) {
      reply.take(event);
      grew();
    }
  };
  if (view instanceof Comparison) return view.run(ask);
  view.element.classList.add("running");
  view.element.setAttribute("aria-busy", "true");
  try {
    await ask(new Reply(answer), wish.length, () => view.grow());
  } finally {
    view.element.classList.remove("running");
    view.element.removeAttribute("aria-busy");
  }
}

function finish(asked, { messages, earlier }, answer, view, trouble) {
  const stopped = trouble?.name === "AbortError";
  if (trouble) answer.ended = stopped ? "abort" : "error";
  if (trouble && !stopped) answer.trouble = wordsOf(trouble);
  view.show();
  asked.messages = [...messages, answer];
  asked.earlier = earlier;
  asked.name ||= nameFor(messages);
  asked.changed = Date.now();
  if (asked === conversation) {
    rows.push({ message: answer, view });
    show();
    tell(`${answer.trouble ?? "Answer"}: ${answer.content} ${answer.verdict?.headline ?? ""} ${answer.verdict?.text ?? ""}`);
  }
  whenChanged(asked);
}

function undo(asked, before, view, trouble) {
  view?.element.remove();
  asked.messages = before;
  if (trouble && trouble.name !== "AbortError") notice(wordsOf(trouble));
  else tell("Stopped before the answer began.");
}

const wordsOf = (error) => (error.name === "Error" ? error.message : `The answer could not be read: ${error.message}`);

function nameFor(messages) {
  const [{ content, files }] = messages;
  const words = (content || files[0].name).replace(/\s+/g, " ").trim();
  return words.length > NAME_LENGTH ? `${words.slice(0, NAME_LENGTH).trimEnd()}…` : words;
}

export function stop() { running?.control.abort(); }

function busy(is) {
  at("turns").setAttribute("aria-busy", `${is}`);
  document.body.classList.toggle("busy", is);
  const hadFocus = [at("send"), at("stop"), document.body].includes(document.activeElement);
  at("send").disabled = is;
  at("send").hidden = is;
  at("stop").hidden = !is;
  if (hadFocus) at("message").focus();
}

/** What has no answer yet: typed, or sent a moment ago. */
export const unanswered = () => at("message").value || (running && !running.answer?.content ? running.question.content : "");

/** The answer that is growing, in a conversation to keep; null where none is. */
export function unfinished() {
  if (!running?.answer?.content) return null;
  const { asked, messages, earlier, answer } = running;
  return { ...asked, name: asked.name || nameFor(messages), changed: Date.now(), messages: [...messages, { ...answer, ended: "abort" }], earlier };
}

// ---- what the buttons of messages do

at("turns").addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  if (!button) return;
  const index = rows.findIndex(({ view }) => view.element.contains(button));
  const { action } = button.dataset;
  if (action === "copy-code") return copy(button.closest(".code").querySelector("code").textContent.replace(/\n$/, ""), button);
  if (index < 0 || running) return;
  const { messages } = conversation;
  const message = messages[index];
  if (action === "copy") copy(message.content, button);
  if (action === "edit") edit(index);
  if (action === "regenerate") turn(messages.slice(0, index));
  if (action === "continue") turn(messages.slice(0, index), message);
});

/** A field in place of a message. A question is sent again, without what followed it; an answer is kept as it is written. */
function edit(index) {
  const { message, view } = rows[index];
  const isQuestion = message.role === "user";
  const form = make("form", "editor");
  const field = make("textarea");
  field.value = message.content;
  field.setAttribute("aria-label", isQuestion ? "Edit your message" : "Edit the answer");
  const dropped = conversation.messages.length - index - 1;
  const words = dropped > 1 ? `Send, and put the ${dropped} messages after it aside` : "Send";
  const save = make("button", "main", isQuestion ? words : "Save");
  const cancel = make("button", "", "Cancel");
  cancel.type = "button";
  const row = make("div", "row");
  row.append(save, cancel);
  form.append(field, row);
  const end = () => {
    form.remove();
    view.element.classList.remove("editing");
    at("message").focus();
  };
  cancel.addEventListener("click", end);
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); end(); }
    if (isQuestion && event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const content = field.value.trim();
    if (running || !content) return;
    end();
    if (!isQuestion) return keepEdited(index, content);
    const question = { ...message, content };
    if (!await turn([...conversation.messages.slice(0, index), question])) giveBack(question);
  });
  view.element.classList.add("editing");
  view.element.append(form);
  field.focus();
}

function keepEdited(index, content) {
  const { isJson } = conversation.messages[index];
  const messages = conversation.messages.with(index, { ...newAnswer(isJson), content, ended: "edited" });
  conversation.earlier = earlierThan(messages, conversation);
  conversation.messages = messages;
  show();
  whenChanged(conversation);
}

at("bring-back").addEventListener("click", () => {
  bringBack(conversation);
  show();
  whenChanged(conversation);
  tell("The version before is back.");
});

at("system").addEventListener("change", () => {
  conversation.system = at("system").value.trim();
  if (conversation.messages.length) whenChanged(conversation);
});

// ---- the end of the page, which is followed until the reader scrolls up

let follows = true;
let lastTop = 0;

function toEnd() {
  follows = true;
  box.scrollTop = rows.length || running ? box.scrollHeight : 0;
}

box.addEventListener("scroll", () => {
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
  if (isAtEnd || box.scrollTop < lastTop) follows = isAtEnd;
  lastTop = box.scrollTop;
  at("to-end").hidden = isAtEnd || follows;
});
const growth = new ResizeObserver(() => { if (follows) toEnd(); });
growth.observe(box);
growth.observe(at("turns"));
at("to-end").addEventListener("click", () => { toEnd(); at("message").focus(); });
