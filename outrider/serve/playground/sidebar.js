// The list of conversations: open, rename, export, delete.

import { at, iconButton, make } from "./dom.js";

/** Show the list. `does`: { open, rename, exportOne, remove }, each of a conversation; rename also of its new name. */
export function showList(conversations, openId, does) {
  const listed = conversations.filter((conversation) => conversation.messages.length);
  at("list").replaceChildren(...listed.map((conversation) => item(conversation, conversation.id === openId, does)));
  at("export").disabled = !listed.length;
}

function item(conversation, isOpen, does) {
  const row = make("li");
  const button = make("button", "name", conversation.name);
  button.type = "button";
  button.title = conversation.name;
  if (isOpen) button.setAttribute("aria-current", "true");
  button.addEventListener("click", () => does.open(conversation));
  const actions = make("div", "row-actions");
  actions.append(
    withClick(iconButton("edit", `Rename ${conversation.name}`, "rename"), () => rename(row, conversation, does)),
    withClick(iconButton("export", `Export ${conversation.name}`, "export"), () => does.exportOne(conversation)),
    withClick(iconButton("delete", `Delete ${conversation.name}`, "delete"), () => does.remove(conversation)),
  );
  row.append(button, actions);
  return row;
}

function withClick(button, action) {
  button.addEventListener("click", action);
  return button;
}

/** A field in place of the name: Enter or leaving it renames, Escape does not. */
function rename(row, conversation, does) {
  const field = make("input");
  field.value = conversation.name;
  field.setAttribute("aria-label", `New name of ${conversation.name}`);
  let ended = false;
  const end = (name) => {
    if (ended) return;
    ended = true;
    does.rename(conversation, name.trim() || conversation.name);
  };
  field.addEventListener("keydown", (event) => {
    event.stopPropagation(); // Escape stops an answer elsewhere
    if (event.key === "Enter") end(field.value);
    if (event.key === "Escape") end(conversation.name);
  });
  field.addEventListener("blur", () => end(field.value));
  row.replaceChildren(field);
  field.select();
}
