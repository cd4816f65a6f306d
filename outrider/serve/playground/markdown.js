// An answer as formatted text. Markup in it stays text; what the formatting makes passes DOMPurify.

import hljs from "./vendor/highlight.min.js";
import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import { clean, make } from "./dom.js";

const { DOMPurify } = globalThis;
const ALLOWED = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "span", "strong",
    "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const THOUGHTS = /^\s*<think>([\s\S]*?)(?:<\/think>|$)/; // how most models that think mark it

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escaped = (text) => text.replace(/[&<>"]/g, (character) => ESCAPES[character]);

const reader = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`, // a picture would be fetched from elsewhere
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code: ({ text, lang }) => {
      const language = (lang ?? "").match(/^\S*/)[0].toLowerCase();
      const code = hljs.getLanguage(language) ? hljs.highlight(text, { language }).value : escaped(text);
      return `<pre title="${escaped(language)}"><code>${code}\n</code></pre>`;
    },
  },
});

/** A fragment of the document for an answer. */
export function formatted({ content, isJson }) {
  const text = clean(content);
  if (isJson) return finished(`\`\`\`json\n${text}\n\`\`\``);
  const thoughts = text.match(THOUGHTS);
  if (!thoughts) return finished(text);
  const box = make("details", "thoughts");
  box.append(make("summary", "", "Thoughts"), finished(thoughts[1]));
  const fragment = finished(text.slice(thoughts[0].length));
  fragment.prepend(box);
  return fragment;
}

function finished(text) {
  const fragment = DOMPurify.sanitize(reader.parse(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    if (!link.href) link.replaceWith(...link.childNodes); // it led nowhere that is allowed
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const block of fragment.querySelectorAll("pre")) block.replaceWith(codeBox(block));
  for (const table of fragment.querySelectorAll("table")) table.replaceWith(scrolled(table, "table", "Table"));
  return fragment;
}

/** A block of code below its language and a button that copies it. */
function codeBox(block) {
  const language = block.title;
  block.removeAttribute("title");
  const box = make("div", "code");
  const head = make("div", "code-head");
  const button = make("button", "bare", "Copy");
  button.type = "button";
  button.dataset.action = "copy-code";
  button.setAttribute("aria-label", "Copy the code");
  head.append(make("span", "", language), button);
  box.append(head, scrolled(block.cloneNode(true), "code-body", language ? `Code in ${language}` : "Code"));
  return box;
}

/** `content` in a box that scrolls sideways, by keyboard too. */
function scrolled(content, className, label) {
  const box = make("div", className);
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", label);
  box.append(content.cloneNode(true));
  return box;
}
