// The page before the first message: what the model at hand can be asked.

import { at, make } from "./dom.js";
import { greedy, model } from "./settings.js";

const FUNCTION = ["Write a function", "Write a Python function that reverses a string, with an example."];
const COPY = ["Copy a text: drafts help most here", "Copy this text without changes: The harbour was quiet in the morning. Two boats lay at the pier, and a man mended nets. "
  + "The harbour was loud in the evening. Six boats lay at the pier, and many people were buying fish."];
const OF_CHATS = [
  FUNCTION,
  ["Explain something", "Explain in a few sentences why the sky is blue."],
  ["Make a list", "List five fruits and the colour of each."],
  COPY,
];
const OF_SMALL_CHATS = [ // SmolLM2-135M in four bits answers these right, greedily
  ["Correct a sentence", "Correct the spelling: I beleive we recieved the wrong adress."],
  ["Get advice", "Give me three tips for sleeping better."],
  FUNCTION,
  COPY,
];
const OF_TEXTS = [
  ["Begin a story", "Once upon a time, there was a little girl named Lily. She"],
  ["Begin a recipe", "Pancakes for four people\n\nIngredients:\n- 2 cups of flour\n-"],
  ["Begin a fable", "One day, a cat found a red hat in the garden. The cat"],
  ["Begin a program", "def is_prime(number):\n    \"\"\"Whether a number is prime.\"\"\"\n    if number < 2:"],
];
const OF_THE_DEMO = [ // it answers these right
  ["How many more?", "Sam has 37 lemons and James has 18 lemons. How many more lemons does Sam have?"],
  ["How many in all?", "A box holds 11 pink books and 18 blue books. How many books does the box hold?"],
  ["How many are left?", "Hannah has 40 cookies. She eats 12 cookies. How many cookies are left?"],
  ["How much change?", "Leah buys 3 hats for $2 each and a bag for $17. She pays with $36. How much change does she get?"],
];

const KINDS = { // as the server names them
  chat: { can: "Type a message, drop a text file, or try one of these:", examples: OF_CHATS },
  "small-chat": {
    can: "A small model: short, plain tasks suit it. These examples set the temperature to 0, where it errs least:",
    examples: OF_SMALL_CHATS,
  },
  demo: { can: "A tiny model that is made for short word problems and knows nothing else. Try one:", examples: OF_THE_DEMO },
  text: { can: "A model without a chat template: it answers no questions, it continues texts. Type the beginning of one, or try one of these:", examples: OF_TEXTS },
};

/** Show the invitation; a click on an example calls `ask` with its text. */
export function invite(ask) {
  const { name, kind } = model() ?? {};
  const { can, examples } = KINDS[kind] ?? KINDS.chat;
  at("invitation").textContent = kind === "text" ? `Continue a text with ${name}` : `Ask ${name ?? "the model"}`;
  at("can").textContent = can;
  at("examples").replaceChildren(...examples.map(([title, text]) => {
    const button = make("button", "example");
    button.type = "button";
    button.append(make("strong", "", title), make("span", "", text));
    button.addEventListener("click", () => {
      if (kind === "small-chat") greedy();
      ask(text);
    });
    return button;
  }));
}
