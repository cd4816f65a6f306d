// Text files that go with a message: chosen or dropped, shown above the composer.

import { at, iconButton, make, notice } from "./dom.js";
import { Trouble } from "./stream.js";

const MOST_BYTES = 256 * 1024; // more than most models can read
const MOST_IMPORTED_BYTES = 64 * 1024 * 1024;

let files = [];

export const filesOfMessage = () => files;

export function setFiles(wanted) {
  files = wanted;
  at("files").replaceChildren(...files.map((file, index) => {
    const item = make("li", "", `${file.name} `);
    const button = iconButton("close", `Remove ${file.name}`, "remove");
    button.addEventListener("click", () => { setFiles(files.filter((_, other) => other !== index)); at("message").focus(); });
    item.append(button);
    return item;
  }));
}

async function add(chosen) {
  for (const file of chosen) {
    try {
      const text = await textOf(file, MOST_BYTES);
      setFiles([...files, { name: file.name, text }]);
    } catch (error) {
      notice(error.message);
    }
  }
  at("message").focus();
}

/** Throws Trouble where a file is too large or no text. */
async function textOf(file, mostBytes) {
  if (file.size > mostBytes) throw new Trouble(`${file.name} has ${Math.ceil(file.size / 1024)} KB; a text file may have ${mostBytes / 1024}.`);
  let text = null;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch { /* a folder, or not UTF-8 */ }
  if (text === null || text.includes("\0")) throw new Trouble(`${file.name} is no text file (UTF-8). Only texts can be added.`);
  return text;
}

const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");

/** `imports(name, text)` gets a file that was chosen for import. */
export function startFiles(imports) {
  at("attach").addEventListener("click", () => at("attach-file").click());
  at("attach-file").addEventListener("change", async () => {
    await add([...at("attach-file").files]);
    at("attach-file").value = ""; // the same file can be chosen again
  });
  at("import").addEventListener("click", () => at("import-file").click());
  at("import-file").addEventListener("change", async () => {
    const [file] = at("import-file").files;
    if (!file) return;
    try {
      imports(file.name, await textOf(file, MOST_IMPORTED_BYTES));
    } catch (error) {
      notice(error.message);
    }
    at("import-file").value = "";
  });
  document.addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
  document.addEventListener("drop", (event) => {
    document.body.classList.remove("dropping");
    if (!holdsFiles(event)) return;
    event.preventDefault();
    add([...event.dataTransfer.files]);
  });
}
