// The settings: the models that the server has, the fields, what they ask for.

import { at, clean, isWide, make, openPanel } from "./dom.js";
import { keepInTab, loadSettings, ofTab, saveSettings } from "./storage.js";
import { AUTO, Trouble, call } from "./stream.js";

const RETRY_MS = 1000; // while the server loads its models
const MOST_DRAFTS = 16;
const NUMBERS = { // fields of a request that are sent where they are filled in
  "top-p": "top_p", "top-k": "top_k", "min-p": "min_p", repetition: "repetition_penalty", presence: "presence_penalty", frequency: "frequency_penalty",
};

const form = at("fields");
let models = [];
let again = null; // timer of the next try
let kept = loadSettings();

/** Ask the server for its models. Afterwards the document has the event "models". */
export async function loadModels() {
  try {
    models = (await (await call("v1/models", at("key").value)).json()).data;
  } catch (error) {
    models = [];
    const loading = error.status === 503;
    at("about").textContent = loading ? "The server is loading its models. This page waits for them." : clean(error.message);
    at("about").className = loading ? "" : "trouble";
    clearTimeout(again);
    if (loading) again = setTimeout(loadModels, RETRY_MS);
    return;
  }
  fill(at("model"), models.map((one) => [one.id, nameOf(one.id)]), kept.model);
  at("about").className = "";
  showModel();
}

/** What a model is called here: of a path its last part, where no other model has the same one. */
function nameOf(id) {
  const last = (path) => path.split("/").pop();
  return id.startsWith("/") && models.filter((one) => last(one.id) === last(id)).length === 1 ? last(id) : id;
}

const card = () => models.find((one) => one.id === at("model").value) ?? {};

/** The model that answers: { name, kind }, its kind in the server's words; null while none is known. */
export function model() {
  const { id, kind } = card();
  return id ? { name: clean(nameOf(id)), kind } : null;
}

function showModel() {
  const { id = "", kind, drafters: has = [], max_model_len: context } = card();
  const drafters = has.map((one) => (typeof one === "string" ? one : one.name));
  fill(at("drafter"), [["", "the server's choice"], ...drafters.map((name) => [name, name])], kept.drafter);
  const facts = [drafters.length ? `drafters: ${drafters.join(", ")}` : "no drafter"];
  if (context) facts.push(`${context} tokens of context`);
  if (kind === "text") facts.push("continues texts");
  at("about").textContent = clean(facts.join(" · "));
  at("model").title = clean(id);
  at("format").disabled = kind === "text";
  at("format").value = kind === "text" ? "text" : kept.format ?? "chat";
  showFields();
  document.dispatchEvent(new Event("models"));
}

function fill(select, options, wanted) {
  select.replaceChildren(...options.map(([value, text]) => {
    const option = make("option", "", text);
    option.value = value;
    return option;
  }));
  if (options.some(([value]) => value === wanted)) select.value = wanted;
}

/** What is asked for, as the fields are now. Throws Trouble where one cannot be used. */
export async function wishes() {
  if (!models.length) await loadModels();
  if (!models.length) throw new Trouble(at("about").textContent);
  checkSchema();
  if (!form.checkValidity()) {
    openPanel("settings");
    form.reportValidity();
    throw new Trouble("One of the settings cannot be used: it is marked.");
  }
  const sampling = { temperature: Number(at("temperature").value), max_tokens: Number(at("max-tokens").value) };
  for (const [id, field] of Object.entries(NUMBERS)) if (at(id).value) sampling[field] = Number(at(id).value);
  const stop = at("stop-texts").value.split("\n").filter(Boolean);
  if (stop.length) sampling.stop = stop;
  const schema = at("schema").value.trim();
  if (schema) sampling.structured_outputs = { json: JSON.parse(schema) };
  const seed = at("seed").value.trim();
  const length = at("length").value;
  return {
    model: at("model").value, drafter: at("drafter").value, format: at("format").value, compare: at("compare").checked,
    sampling, isJson: Boolean(schema), key: at("key").value,
    length: length === AUTO ? AUTO : Number(length),
    // all runs of a comparison need the same seed; a single answer may leave it to the server
    seed: seed ? Number(seed) : at("compare").checked ? Math.floor(Math.random() * 2 ** 31) : null,
  };
}

function checkSchema() {
  let fault = "";
  try {
    if (at("schema").value.trim()) JSON.parse(at("schema").value);
  } catch (error) {
    fault = `This is not JSON: ${error.message}`;
  }
  at("schema").setCustomValidity(fault);
}

// ---- kept by the browser

/** The names and values of the fields; the API key is none of them. */
function values() {
  const found = {};
  for (const field of form.elements) {
    if (field.type === "radio") { if (field.checked) found[field.name] = field.value; }
    else if (field.type === "checkbox") found[field.id] = field.checked;
    else if (field.id && field.id !== "key" && !field.disabled && "value" in field && field.tagName !== "BUTTON") found[field.id] = field.value;
  }
  return found;
}

function restore() {
  for (const field of form.elements) {
    const value = kept[field.name || field.id];
    if (field.type === "radio") field.checked = value === undefined ? field.defaultChecked : field.value === value;
    else if (field.type === "checkbox" && typeof value === "boolean") field.checked = value;
    else if (field.type === "select-one") { if ([...field.options].some((option) => option.value === value)) field.value = value; }
    else if (field.id !== "key" && typeof value === "string" && "value" in field) field.value = value;
  }
  showFields();
}

function showFields() {
  at("temperature-shown").textContent = Number(at("temperature").value) === 0 ? "0, greedy" : at("temperature").value;
  const continuesTexts = at("format").value === "text";
  at("system").disabled = continuesTexts;
  at("message").placeholder = continuesTexts ? "The beginning of a text" : "Message";
  const mode = form.elements.mode.value;
  if (document.body.dataset.mode === mode) return;
  document.body.dataset.mode = mode;
  document.dispatchEvent(new Event("mode"));
}

/** Let the model write the likeliest text. */
export function greedy() {
  at("temperature").value = "0";
  at("temperature").dispatchEvent(new Event("change", { bubbles: true }));
}

/** Put the kept settings into the fields and keep what is changed. `failed(error)`: where that cannot be. */
export function startSettings(failed) {
  const lengths = Array.from({ length: MOST_DRAFTS }, (_, index) => [`${index + 1}`, `${index + 1}`]);
  fill(at("length"), [[AUTO, "auto"], ["0", "none"], ...lengths]);
  const keep = () => {
    showFields();
    checkSchema();
    kept = { ...kept, ...values() };
    try {
      saveSettings(kept);
    } catch (error) {
      failed(error);
    }
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("change", (event) => { if (event.target.form === form && event.target.id !== "key") keep(); });
  at("temperature").addEventListener("input", showFields);
  at("model").addEventListener("change", showModel);
  at("key").addEventListener("change", () => { keepInTab("key", at("key").value); loadModels(); });
  form.addEventListener("reset", () => setTimeout(() => { // when the fields are as they were at first
    at("key").value = ofTab("key");
    keep();
    showModel();
    if (isWide()) at("defaults").focus();
  }));
  at("key").value = ofTab("key");
  restore();
  loadModels();
}
