// The page before the first message: what the model at hand can be asked.

import { at, make } from "./dom.js";
import { model } from "./settings.js";

const GENERAL = [
  ["Write a function", "Write a Python function that reverses a string, with an example."],
  ["Explain something", "Explain in a few sentences why the sky is blue."],
  ["Make a list", "List five fruits and the colour of each."],
  ["Copy a text: drafts help most here", "Copy this text without changes: The harbour was quiet in the morning. Two boats lay at the pier, and a man mended nets. "
    + "The harbour was loud in the evening. Six boats lay at the pier, and many people were buying fish."],
];
const OF_THE_DEMO = [ // it answers these right
  ["How many more?", "Sam has 37 lemons and James has 18 lemons. How many more lemons does Sam have?"],
  ["How many in all?", "A box holds 11 pink books and 18 blue books. How many books does the box hold?"],
  ["How many are left?", "Hannah has 40 cookies. She eats 12 cookies. How many cookies are left?"],
  ["How much change?", "Leah buys 3 hats for $2 each and a bag for $17. She pays with $36. How much change does she get?"],
];

/** Show the invitation; a click on an example calls `ask` with its text. */
export function invite(ask) {
  const { id, name } = model() ?? {};
  const isDemo = id === "demo";
  at("invitation").textContent = name ? `Ask ${name}` : "Ask the model";
  at("can").textContent = isDemo
    ? "A tiny model that is made for short word problems and knows nothing else. Try one:"
    : "Type a message, drop a text file, or try one of these:";
  at("examples").replaceChildren(...(isDemo ? OF_THE_DEMO : GENERAL).map(([title, text]) => {
    const button = make("button", "example");
    button.type = "button";
    button.append(make("strong", "", title), make("span", "", text));
    button.addEventListener("click", () => ask(text));
    return button;
  }));
}
