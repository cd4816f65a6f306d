// Elements, notices, panels. Whatever a model, a server or a file said goes in as text, never as markup.

const HARMFUL = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufdd0-\ufdef\ufffe\uffff]|\p{Cs}/gu;
const WIDE = window.matchMedia("(min-width: 64rem)");
const SVG = "http://www.w3.org/2000/svg";

export const at = (id) => document.getElementById(id);
export const clean = (text) => text.replace(/\r\n/g, "\n").replace(HARMFUL, "\ufffd");
export const shown = (number, digits) => (number === null || number === undefined ? "–" : number.toFixed(digits));

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = clean(text);
  return element;
}

/** A small button that shows a symbol of page.html and is called `label`. */
export function iconButton(symbol, label, action) {
  const button = make("button", "bare");
  button.type = "button";
  button.dataset.action = action;
  button.title = clean(label);
  button.setAttribute("aria-label", clean(label));
  const icon = document.createElementNS(SVG, "svg");
  icon.setAttribute("class", "icon");
  icon.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${symbol}`);
  icon.append(use);
  button.append(icon);
  return button;
}

/** Say something to those who cannot see the page. */
export function tell(text) { at("status").textContent = clean(text); }

let whenTaken = null;

/** Say something to everybody, above the composer. `action`: a button's words and what it does. */
export function notice(text, tone = "bad", action = null) {
  const box = at("notice");
  box.hidden = false;
  box.className = tone;
  box.setAttribute("role", tone === "bad" ? "alert" : "status");
  at("notice-text").textContent = clean(text);
  at("notice-action").hidden = !action;
  at("notice-action").textContent = action?.words ?? "";
  whenTaken = action?.does ?? null;
}

export function hideNotice() { at("notice").hidden = true; }

at("notice-close").addEventListener("click", () => { hideNotice(); at("message").focus(); });
at("notice-action").addEventListener("click", () => { hideNotice(); whenTaken?.(); at("message").focus(); });

/** Copy a text; `button` says for a moment that it was done. */
export async function copy(text, button) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelected(text, button);
  } catch {
    return notice("This browser does not let the page copy. Select the text and copy it yourself.", "caution");
  }
  tell("Copied.");
  button.classList.add("done");
  setTimeout(() => button.classList.remove("done"), 1200);
}

/** The old way, for pages that are neither of this machine nor over TLS: browsers give those no clipboard. */
function copySelected(text, button) {
  const field = make("textarea", "unseen");
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  button.focus();
  if (!copied) throw new Error("not copied");
}

export function download(name, text) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// ---- panels: columns where the screen is wide, else one at a time over the page

export const isWide = () => WIDE.matches;

export function openPanel(id, open = true) {
  const panel = at(id);
  if (!isWide() && open) for (const other of document.querySelectorAll(".panel.open")) openPanel(other.id, false);
  panel.classList.toggle("open", open);
  at(`${id}-toggle`).setAttribute("aria-expanded", `${open}`);
  const covered = !isWide() && document.querySelector(".panel.open") !== null;
  document.querySelector("main").inert = covered;
  document.body.classList.toggle("covered", covered);
}

/** Close what lies over the page; whether there was something. */
export function closeOverlay() {
  const panel = isWide() ? null : document.querySelector(".panel.open");
  if (!panel) return false;
  openPanel(panel.id, false);
  at(`${panel.id}-toggle`).focus();
  return true;
}

function arrangePanels() {
  openPanel("settings", false);
  openPanel("conversations", isWide());
}

for (const id of ["conversations", "settings"]) {
  at(`${id}-toggle`).addEventListener("click", () => {
    openPanel(id, !at(id).classList.contains("open"));
    if (at(id).classList.contains("open")) at(id).querySelector("button, textarea, select, input").focus();
  });
  at(id).querySelector(".close").addEventListener("click", () => { openPanel(id, false); at(`${id}-toggle`).focus(); });
}
document.querySelector(".page").addEventListener("pointerdown", (event) => {
  if (!isWide() && !event.target.closest(".panel")) closeOverlay();
});
WIDE.addEventListener("change", arrangePanels);
arrangePanels();
