// The page: conversations, composer and keys put together.

import { hideCard } from "./card.js";
import { isRunning, onChange, open, openConversation, send, stop, unanswered, unfinished } from "./chat.js";
import { at, closeOverlay, download, isWide, notice, openPanel, tell } from "./dom.js";
import { setFiles, startFiles } from "./files.js";
import { startSettings } from "./settings.js";
import { showList } from "./sidebar.js";
import {
  changedElsewhere, deleteConversation, exported, imported, keepInTab, loadConversations, newConversation, ofTab, saveConversation, withFreeId,
} from "./storage.js";

let conversations = [];
const deleted = new Set(); // ids: an answer that still ran must not bring them back

function list() {
  keepInTab("open", openConversation().id);
  showList(conversations, openConversation().id, { open: choose, rename, exportOne, remove });
}

function choose(conversation) {
  open(conversation);
  list();
  if (!isWide()) openPanel("conversations", false);
  at("message").focus();
}

/** Keep a conversation and say so where that cannot be. */
function keep(conversation) {
  try {
    saveConversation(conversation);
  } catch (error) {
    notice(error.message);
  }
}

function rename(conversation, name) {
  conversation.name = name;
  keep(conversation);
  list();
}

function exportOne(conversation) { download("outrider-conversation.json", exported([conversation])); }

function remove(conversation) {
  const place = conversations.indexOf(conversation);
  conversations = conversations.filter((other) => other !== conversation);
  deleted.add(conversation.id);
  deleteConversation(conversation.id);
  if (conversation === openConversation()) open(newConversation());
  list();
  notice(`"${conversation.name}" is deleted.`, "caution", { words: "Undo", does: () => {
    deleted.delete(conversation.id);
    conversations.splice(place, 0, conversation);
    keep(conversation);
    choose(conversation);
  } });
}

function importFile(name, text) {
  const added = imported(name, text);
  for (const conversation of added) {
    const free = withFreeId(conversation, conversations);
    conversations.push(free);
    keep(free);
  }
  conversations.sort((one, other) => other.changed - one.changed);
  list();
  if (at("notice").hidden) notice(`${name}: ${added.length} conversation${added.length === 1 ? "" : "s"} imported.`, "good");
}

onChange((conversation) => {
  if (deleted.has(conversation.id)) return;
  conversations = [conversation, ...conversations.filter((other) => other !== conversation)];
  keep(conversation);
  list();
});

window.addEventListener("storage", (event) => { // another tab
  const id = changedElsewhere(event);
  if (!id || isRunning()) return;
  conversations = loadConversations().conversations;
  const mine = conversations.find((conversation) => conversation.id === openConversation().id);
  if (id === openConversation().id && mine) open(mine);
  else if (mine) conversations.splice(conversations.indexOf(mine), 1, openConversation());
  list();
});

window.addEventListener("pagehide", () => {
  keepInTab("draft", unanswered());
  keepInTab("system", at("system").value);
  const conversation = unfinished();
  stop();
  if (conversation) keep(conversation);
});

// ---- the controls

at("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  hideCard();
  if (!closeOverlay()) stop();
});
at("stop").addEventListener("click", stop);
at("new").addEventListener("click", () => { choose(newConversation()); tell("A new conversation."); });
at("export").addEventListener("click", () => {
  download("outrider-conversations.json", exported(conversations.filter((conversation) => conversation.messages.length)));
});

// ---- the start

startFiles(importFile);
startSettings((error) => notice(error.message));
const kept = loadConversations();
conversations = kept.conversations;
open(conversations.find((conversation) => conversation.id === ofTab("open")) ?? { ...newConversation(), system: ofTab("system") });
list();
setFiles([]);
at("message").value = ofTab("draft");
if (kept.unreadable) {
  notice(`${kept.unreadable} conversation${kept.unreadable === 1 ? "" : "s"} in this browser's storage could not be read and ${kept.unreadable === 1 ? "is" : "are"} left out.`, "caution");
}
if (isWide()) at("message").focus();
