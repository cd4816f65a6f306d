// What is known of the token that is pointed at, touched, or reached with the arrow keys.

import { at, make } from "./dom.js";
import { cardOf } from "./answer.js";

const card = make("div", "card");
card.hidden = true;
card.setAttribute("role", "status");
document.body.append(card);
let pointed = null;

export function hideCard() {
  pointed?.classList.remove("pointed");
  pointed = null;
  card.hidden = true;
}

function showCard(token) {
  if (!token || token === pointed) return;
  hideCard();
  pointed = token;
  token.classList.add("pointed");
  card.textContent = cardOf(token);
  card.hidden = false;
  place();
}

function place() {
  const box = pointed.getClientRects()[0];
  const left = Math.min(box.left, document.documentElement.clientWidth - card.offsetWidth - 8);
  const above = box.top - card.offsetHeight - 6;
  card.style.left = `${Math.max(8, left)}px`;
  card.style.top = `${above > 0 ? above : box.bottom + 6}px`;
}

const tokenAt = (event) => (event.target instanceof Element && cardOf(event.target) ? event.target : null);

at("turns").addEventListener("pointerover", (event) => {
  if (event.pointerType !== "mouse") return;
  if (tokenAt(event)) showCard(tokenAt(event)); else hideCard();
});
at("turns").addEventListener("pointerleave", hideCard);
at("turns").addEventListener("focusout", hideCard);
at("scroller").addEventListener("scroll", () => { if (pointed) place(); });
at("turns").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const box = event.target.closest(".tokens");
  if (!step || !box) return;
  event.preventDefault();
  const tokens = [...box.children].filter(cardOf);
  const next = tokens[Math.max(0, Math.min(tokens.length - 1, tokens.indexOf(pointed) + step))];
  next?.scrollIntoView({ block: "nearest" });
  showCard(next);
});
document.addEventListener("click", (event) => {
  const token = tokenAt(event);
  if (!token || (token === pointed && event.pointerType !== "mouse")) hideCard(); else showCard(token);
});
