"use strict";
// A card with the numbers of the token that is pointed at, tapped, or reached with the arrow keys; and copy buttons.
(() => {
  const card = document.createElement("div");
  card.className = "card";
  card.hidden = true;
  card.setAttribute("role", "status");
  document.body.append(card);
  let shown = null;

  const hide = () => {
    if (shown) shown.classList.remove("pointed");
    shown = null;
    card.hidden = true;
  };
  const show = (token) => {
    if (!token || token === shown) return;
    hide();
    shown = token;
    token.classList.add("pointed");
    card.textContent = token.dataset.hover;
    card.hidden = false;
    const box = token.getClientRects()[0];
    const left = Math.min(box.left, document.documentElement.clientWidth - card.offsetWidth - 8);
    const above = box.bottom + card.offsetHeight + 8 > window.innerHeight;
    card.style.left = `${Math.max(8, left) + window.scrollX}px`;
    card.style.top = `${window.scrollY + (above ? box.top - card.offsetHeight - 6 : box.bottom + 6)}px`;
  };

  for (const text of document.querySelectorAll(".tokens")) {
    const tokens = [...text.querySelectorAll("[title]")];
    for (const token of tokens) {
      token.dataset.hover = token.title;
      token.removeAttribute("title");
    }
    if (!tokens.length) continue;
    text.tabIndex = 0;
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", "Text by token. Left and right arrow keys go from token to token and read out its numbers.");
    text.addEventListener("pointerover", (event) => {
      if (event.pointerType === "mouse") show(event.target.closest("[data-hover]"));
    });
    text.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    text.addEventListener("click", (event) => {
      const token = event.target.closest("[data-hover]");
      if (event.pointerType !== "mouse" && token === shown) hide(); else show(token);
    });
    text.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      const next = tokens[Math.max(0, Math.min(tokens.length - 1, tokens.indexOf(shown) + step))];
      next.scrollIntoView({ block: "nearest" });
      show(next);
    });
    text.addEventListener("blur", hide);
  }
  document.addEventListener("click", (event) => { if (!event.target.closest("[data-hover]")) hide(); });

  if (navigator.clipboard) {
    for (const code of document.querySelectorAll(".codeblock")) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "Copy";
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(code.querySelector("code").textContent);
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      });
      code.append(button);
    }
  }
})();
