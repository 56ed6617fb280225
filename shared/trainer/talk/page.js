// The chat page. It keeps the conversation and sends it whole. Whatever a model or a person writes goes into the page as text
// (textContent), never as HTML.

const at = (id) => document.getElementById(id);
const key = location.hash.slice(1);
const MOST_TURNS = 1001; // that the server takes: the oldest of a longer conversation are out of any model's context
const NUMBERS = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"];

let messages = []; // {role, content}, the user's and the model's in turns
let continues = false; // a model without a template continues each text by itself
let running = null; // the AbortController of the answer that is being written

async function start() {
  const about = await (await fetch("/model", { headers: { "X-Key": key } })).json();
  if (about.error) throw new Error(about.error);
  continues = !about.template;
  document.body.classList.toggle("continues", continues);
  document.title = about.name;
  at("name").textContent = about.name;
  const kind = continues ? "It has no chat template, so it continues each text by itself." : "It answers in turns.";
  at("about").textContent = `${(about.parameters / 1e6).toFixed(1)} million parameters, ${about.context} tokens of context. ${kind}`;
  at("system-field").hidden = continues;
  at("system").value = about.system;
  const { drawing, new_tokens, stop, seed } = about.settings;
  for (const name of NUMBERS) at(name).value = drawing[name] ?? "";
  at("new_tokens").value = new_tokens;
  at("stop").value = stop.join("\n");
  at("seed").value = seed || "";
  at("text").placeholder = continues ? "A text to continue" : "A message";
}

function settings() {
  const number = (name) => (at(name).value === "" ? null : Number(at(name).value));
  return {
    drawing: Object.fromEntries(NUMBERS.map((name) => [name, number(name)])),
    new_tokens: number("new_tokens"),
    stop: at("stop").value.split("\n").filter((line) => line !== ""),
    seed: number("seed") ?? Math.floor(Math.random() * 2 ** 32),
  };
}

function add(role, content) {
  const box = document.createElement("article");
  box.className = role;
  const lines = { who: role === "user" ? "you" : "model", said: content, figures: "" };
  for (const [name, text] of Object.entries(lines)) {
    const line = document.createElement("p");
    line.className = name;
    if (name === "said") line.dir = "auto";
    line.textContent = text;
    box.append(line);
  }
  at("log").append(box);
  follow(true);
  return box;
}

function follow(always) {
  const log = at("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
}

function say(sentence, bad = false) {
  at("status").textContent = sentence;
  at("status").classList.toggle("bad", bad);
}

function counted(tokens) {
  return tokens === 1 ? "1 token" : `${tokens} tokens`;
}

function show() {
  at("send").disabled = running !== null;
  at("stop-button").disabled = running === null;
  at("reset").disabled = messages.length === 0;
  at("again").disabled = running !== null || messages.length < 2;
  at("log").setAttribute("aria-busy", String(running !== null)); // a screen reader waits for the whole answer
}

async function answer() {
  if (!at("options").checkValidity()) {
    at("settings").open = true;
    at("options").reportValidity();
    return;
  }
  const asked = messages;
  const chosen = settings();
  const box = add("assistant", "");
  const [said, figures] = [box.querySelector(".said"), box.querySelector(".figures")];
  const mine = (running = new AbortController());
  let [text, tokens, began, end] = ["", 0, 0, null];
  show();
  say("The model reads ...");
  try {
    const body = JSON.stringify({ messages: asked.slice(continues ? -1 : -MOST_TURNS), settings: chosen, system: at("system").value || null });
    const headers = { "X-Key": key, "Content-Type": "application/json" };
    const response = await fetch("/answer", { method: "POST", headers, body, signal: mine.signal });
    for await (const line of lines(response.body)) {
      if (line.error) throw new Error(line.error);
      if (line.done) { end = line; break; }
      began ||= performance.now();
      text += line.text;
      tokens += 1;
      said.textContent = text;
      const rate = tokens > 1 ? `, ${((1000 * (tokens - 1)) / (performance.now() - began)).toFixed(1)} tokens per second` : "";
      say(`${counted(tokens)}${rate}`);
      follow(false);
    }
    if (!end) throw new Error("The connection ended before the answer did: is the server still running?");
    figures.textContent = `${counted(end.tokens)} in ${end.seconds.toFixed(1)} s (${(end.tokens / end.seconds).toFixed(1)} per second), seed ${chosen.seed}`
      + (end.cut_off ? "; cut off: it reached the limit of new tokens or of the context" : "");
    say(end.dropped ? `The ${end.dropped === 1 ? "oldest turn is" : `${end.dropped} oldest turns are`} out of the model's context now.` : "");
  } catch (error) {
    const stopped = error.name === "AbortError";
    say(stopped ? "Stopped." : error.message, !stopped);
    figures.textContent = stopped ? `stopped after ${counted(tokens)}, seed ${chosen.seed}` : "not complete";
    figures.classList.toggle("bad", !stopped);
    if (!stopped && !text && messages === asked) { // nothing was said: the message goes back to where it was written
      messages = asked.slice(0, -1);
      box.previousElementSibling.remove();
      box.remove();
      at("text").value ||= asked.at(-1).content;
    }
  }
  if (messages === asked) messages = [...asked, { role: "assistant", content: text }]; // it was not reset meanwhile
  if (running === mine) running = null;
  show();
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part; !(part = await reader.read()).done; ) {
    const found = (rest + part.value).split("\n");
    rest = found.pop();
    for (const line of found) yield JSON.parse(line);
  }
  if (rest) yield JSON.parse(rest); // a refusal is one line without an end
}

async function send() {
  const text = at("text").value;
  if (running || !text.trim()) return;
  if (!at("options").checkValidity()) return answer();
  at("text").value = "";
  messages = [...messages, { role: "user", content: text }];
  add("user", text);
  await answer();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("options").addEventListener("submit", (event) => event.preventDefault());
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
at("stop-button").addEventListener("click", () => running?.abort());
at("again").addEventListener("click", () => {
  if (running || messages.length < 2 || !at("options").checkValidity()) return;
  messages = messages.slice(0, -1);
  at("log").lastElementChild.remove();
  answer();
});
at("reset").addEventListener("click", () => {
  running?.abort();
  messages = [];
  at("log").replaceChildren();
  say("Forgotten.");
  show();
  at("text").focus();
});

start().then(show, (error) => say(error.message, true));
