// What the browser keeps: conversations, each under a key of its own, and the settings. The same form is exported and imported.
//
//   conversation: { id, name, system, changed, messages, earlier }      changed: milliseconds since 1970; earlier: versions.js
//   message: { role: "user", content, files?: [{ name, text }] }, or
//            { role: "assistant", content, fates, lengths, numbers, ended, isJson, trouble?, verdict? }
//
// `fates` has a letter for each token (tally.js), `lengths` its number of characters; both empty after an edit.

import { Trouble } from "./stream.js";
import { MOST_VERSIONS, packed } from "./versions.js";

const CONVERSATION = "outrider.conversation.";
const UNREADABLE = "outrider.unreadable.";
const SETTINGS = "outrider.settings";
const VERSION = 1; // of an exported file

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isText = (value) => typeof value === "string";

/** The browser's storage, or null where it has none for this page. */
function store() {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}

export function newConversation() {
  return { id: newId(), name: "", system: "", changed: Date.now(), messages: [], earlier: [] };
}

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newAnswer(isJson) {
  return { role: "assistant", content: "", fates: "", lengths: [], numbers: null, ended: null, isJson };
}

/** Every conversation, newest first, and how many could not be read. Those are put aside, so that it is told once. */
export function loadConversations() {
  const kept = store();
  const conversations = [];
  let unreadable = 0;
  for (const key of Object.keys(kept ?? {}).filter((name) => name.startsWith(CONVERSATION))) {
    const text = kept.getItem(key);
    try {
      conversations.push(checked(JSON.parse(text)));
    } catch {
      unreadable += 1;
      kept.removeItem(key); // first: there may be no room for both
      kept.setItem(UNREADABLE + key.slice(CONVERSATION.length), text);
    }
  }
  return { conversations: conversations.sort((one, other) => other.changed - one.changed), unreadable };
}

/** Throws Trouble where the browser takes no more. */
export function saveConversation(conversation) {
  put(CONVERSATION + conversation.id, JSON.stringify(packed(conversation)));
}

export function deleteConversation(id) { store()?.removeItem(CONVERSATION + id); }

/** The id of the conversation that another tab changed, if that is what an event of the storage tells. */
export function changedElsewhere(event) {
  return event.key?.startsWith(CONVERSATION) ? event.key.slice(CONVERSATION.length) : null;
}

function put(key, text) {
  const kept = store();
  if (!kept) throw new Trouble("This browser keeps nothing for this page: conversations end with the tab. Export those you want to keep.");
  try {
    kept.setItem(key, text);
  } catch {
    throw new Trouble("This browser's storage for the page is full: the newest messages are in this tab only. Export conversations, then delete some.");
  }
}

/** The settings that were kept, by field; none where they cannot be read. */
export function loadSettings() {
  try {
    const settings = JSON.parse(store()?.getItem(SETTINGS) ?? "{}");
    return isObject(settings) ? settings : {};
  } catch {
    return {};
  }
}

export function saveSettings(settings) { put(SETTINGS, JSON.stringify(settings)); }

// What this tab keeps until it closes: the API key, the conversation that is open, what is typed and not yet answered.

export function ofTab(name) {
  try {
    return sessionStorage.getItem(`outrider.${name}`) ?? "";
  } catch {
    return "";
  }
}

export function keepInTab(name, text) {
  try {
    sessionStorage.setItem(`outrider.${name}`, text);
  } catch { /* it is lost with the page */ }
}

// ---- files

export function exported(conversations) {
  return JSON.stringify({ outrider_conversations: VERSION, conversations: conversations.map(packed) }, null, 1);
}

/** The conversations of an exported file. Throws Trouble that names the file and what is wrong with it. */
export function imported(name, text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Trouble(`${name} is not JSON. Import takes files that this page exported.`);
  }
  if (!isObject(value) || !("outrider_conversations" in value)) {
    throw new Trouble(`${name} was not exported by this page: it has no "outrider_conversations".`);
  }
  if (value.outrider_conversations !== VERSION) {
    throw new Trouble(`${name} has version ${JSON.stringify(value.outrider_conversations)} of the format; this page reads ${VERSION}.`);
  }
  try {
    if (!Array.isArray(value.conversations)) throw new Trouble('"conversations" is no list');
    return value.conversations.map(checked);
  } catch (error) {
    throw new Trouble(`${name} cannot be imported: ${error.message}.`);
  }
}

/** With an id of its own where another conversation has that one. */
export function withFreeId(conversation, conversations) {
  const isTaken = conversations.some((other) => other.id === conversation.id);
  return isTaken ? { ...conversation, id: newId() } : conversation;
}

/** A conversation with nothing but what it may have. Throws Trouble where a part is missing or of another kind. */
function checked(value) {
  if (!isObject(value)) throw new Trouble("a conversation is no object");
  const { id, name, system = "", changed, messages, earlier = [] } = value;
  if (!isText(id) || !/^[0-9a-f]{1,64}$/.test(id)) throw new Trouble("a conversation has no valid id");
  if (!isText(name)) throw new Trouble(`conversation ${id} has no name`);
  if (!Number.isFinite(changed)) throw new Trouble(`conversation ${id} has no date`);
  if (!isText(system)) throw new Trouble(`the system prompt of "${name}" is no text`);
  if (!Array.isArray(messages)) throw new Trouble(`conversation ${id} has no messages`);
  if (!Array.isArray(earlier) || earlier.length > MOST_VERSIONS) throw new Trouble(`the earlier versions of "${name}" are no list of at most ${MOST_VERSIONS}`);
  const now = checkedMessages(messages, `of "${name}"`);
  return { id, name, system, changed, messages: now, earlier: earlier.map((version) => checkedVersion(version, now, `of an earlier version of "${name}"`)) };
}

const checkedMessages = (messages, where) => messages.map((message, index) => checkedMessage(message, `message ${index + 1} ${where}`));

function checkedVersion(value, now, where) {
  const { shared, messages } = isObject(value) ? value : {};
  if (!Number.isInteger(shared) || shared < 0 || shared > now.length || !Array.isArray(messages) || !(shared + messages.length)) {
    throw new Trouble(`the messages ${where} are no list that begins as the conversation does`);
  }
  return [...now.slice(0, shared), ...checkedMessages(messages, where)];
}

function checkedMessage(value, where) {
  if (!isObject(value) || !isText(value.content)) throw new Trouble(`${where} has no text`);
  if (value.role === "user") return checkedQuestion(value, where);
  if (value.role !== "assistant") throw new Trouble(`${where} has the role ${JSON.stringify(value.role)}, not "user" or "assistant"`);
  const { content, fates, lengths, numbers, ended, isJson, trouble, verdict } = value;
  const areTokens = isText(fates) && /^[acbpu]*$/.test(fates) && Array.isArray(lengths) && lengths.length === fates.length
    && lengths.every((length) => Number.isInteger(length) && length >= 0);
  if (!areTokens || (fates && lengths.reduce((sum, length) => sum + length, 0) !== content.length)) {
    throw new Trouble(`the tokens of ${where} do not add up to its text`);
  }
  const message = { role: "assistant", content, fates, lengths, numbers: checkedNumbers(numbers), ended: isText(ended) ? ended : null, isJson: isJson === true };
  if (isText(trouble)) message.trouble = trouble;
  if (isObject(verdict) && ["good", "bad", "caution"].includes(verdict.tone) && isText(verdict.headline) && isText(verdict.text)) {
    message.verdict = { tone: verdict.tone, headline: verdict.headline, text: verdict.text };
  }
  return message;
}

function checkedQuestion({ content, files = [] }, where) {
  const areFiles = Array.isArray(files) && files.every((file) => isObject(file) && isText(file.name) && isText(file.text));
  if (!areFiles) throw new Trouble(`the files of ${where} have no name or no text`);
  const message = { role: "user", content };
  if (files.length) message.files = files.map(({ name, text }) => ({ name, text }));
  return message;
}

function checkedNumbers(value) {
  if (!isObject(value)) return null;
  const names = ["tokens", "perSecond", "firstAfter", "tau", "alpha", "accepted", "tested", "drafted"];
  return Object.fromEntries(names.map((name) => [name, Number.isFinite(value[name]) ? value[name] : null]));
}
