// Copyright 2026 The jaxmoe authors
// SPDX-License-Identifier: Apache-2.0
"use strict";

const $ = (id) => document.getElementById(id);
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "presence_penalty",
  "frequency_penalty", "repetition_penalty", "seed", "stop_strings"];
let key = new URLSearchParams(location.search).get("key") ?? "";
let hasChat = false;
let maxLength = 0;
let turns = []; // { role, content, element }
let stopper = null;
const speeds = [];

function remember() {
  const values = { system: $("system").value };
  for (const name of SAMPLING) values[name] = $(name).value;
  try { localStorage.setItem("jaxmoe", JSON.stringify(values)); } catch { /* private window */ }
}

function recall() {
  let values = {};
  try { values = JSON.parse(localStorage.getItem("jaxmoe") ?? "{}"); } catch { /* nothing kept */ }
  for (const name of ["system", ...SAMPLING])
    if (typeof values[name] === "string") $(name).value = values[name];
}

async function ask(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = body ? { method: "POST", body: JSON.stringify(body), headers, signal } : { headers };
  const answer = await fetch(path, options);
  if (answer.ok) return answer;
  $("key_row").hidden = answer.status !== 401;
  const error = new Error((await answer.json()).error.message);
  error.status = answer.status;
  throw error;
}

// Elements of a turn: what was said, its reasoning, and what can be done with it.

function addTurn(role, content) {
  const element = document.createElement("article");
  element.className = `turn ${role}`;
  const text = document.createElement("div");
  text.className = "text";
  element.append(text);
  $("talk").append(element);
  const turn = { role, content, reasoning: "", element, text };
  show(turn);
  return turn;
}

function show(turn) {
  const isMarkdown = turn.role === "assistant" && hasChat && !$("is_plain").checked;
  if (isMarkdown) turn.text.replaceChildren(...toNodes(parseMarkdown(turn.content)));
  else turn.text.textContent = turn.content;
  turn.text.classList.toggle("plain", !isMarkdown);
  if (turn.reasoning) {
    if (!turn.thoughts) {
      turn.thoughts = document.createElement("details");
      turn.thoughts.append(document.createElement("summary"), document.createElement("div"));
      turn.thoughts.firstChild.textContent = "Reasoning";
      turn.element.prepend(turn.thoughts);
    }
    turn.thoughts.lastChild.textContent = turn.reasoning;
  }
  follow();
}

let isFollowed = true;
function follow() {
  if (isFollowed) $("talk").scrollTop = $("talk").scrollHeight;
}

function addNote(text, kind) {
  const note = document.createElement("p");
  note.className = `note ${kind}`;
  note.textContent = text;
  $("talk").append(note);
  follow();
}

function showActions() {
  for (const old of $("talk").querySelectorAll(".actions")) old.remove();
  const last = turns.at(-1);
  if (!last || last.role !== "assistant" || stopper) return;
  const row = document.createElement("div");
  row.className = "actions";
  for (const [label, act] of [["Regenerate", regenerate], ["Copy", () => copy(last)]]) {
    const button = document.createElement("button");
    button.textContent = label;
    button.onclick = act;
    row.append(button);
  }
  last.element.append(row);
}

function copy(turn) {
  navigator.clipboard?.writeText(turn.content);
}

// Requests.

const countTokens = async (model, messages, signal) =>
  (await (await ask("/tokenize", { model, messages }, signal)).json()).count;

async function bodyOf(signal) {
  const model = $("models").value;
  const sampling = samplingFields(Object.fromEntries(SAMPLING.map((name) => [name, $(name).value])));
  const most = sampling.max_tokens ?? 0;
  const shared = { model, stream: true, stream_options: { include_usage: true }, ...sampling };
  if (!hasChat) {
    const prompt = turns.at(-1).content;
    const { tokens } = await (await ask("/tokenize", { model, prompt }, signal)).json();
    const room = maxLength - reserve(most, maxLength);
    if (tokens.length > room) addNote(`The first ${tokens.length - room} tokens are left out.`, "info");
    const fits = tokens.length > room ? tokens.slice(-room) : prompt;
    return { path: "/v1/completions", body: { ...shared, prompt: fits, max_tokens: most || maxLength } };
  }
  const system = $("system").value;
  const count = (part) => countTokens(model, withSystem(system, part), signal);
  const clipped = await clipTurns(turns, count, maxLength, most);
  if (clipped.numLeftOut)
    addNote(`The first ${clipped.numLeftOut} turns are left out: the model reads ${maxLength} tokens.`, "info");
  return { path: "/v1/chat/completions", body: { ...shared, messages: withSystem(system, clipped.turns) } };
}

async function read(answer, turn, start) {
  let first = null;
  let usage = null;
  let reason = "";
  let isDrawn = true;
  const draw = () => { isDrawn = true; show(turn); };
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "", part; !(part = await reader.read()).done; ) {
    const { events, rest } = eventsOf(text + part.value);
    text = rest;
    for (const event of events) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      first ??= performance.now();
      turn.content += choice.text ?? choice.delta.content ?? "";
      turn.reasoning += choice.delta?.reasoning_content ?? "";
      reason = choice.finish_reason ?? reason;
      if (isDrawn) { isDrawn = false; requestAnimationFrame(draw); }
    }
  }
  show(turn);
  if (!usage || first === null) return;
  const seconds = (performance.now() - first) / 1e3;
  const rate = usage.completion_tokens > 1 ? `, ${((usage.completion_tokens - 1) / seconds).toFixed(1)} per second` : "";
  const facts = document.createElement("p");
  facts.className = "facts";
  facts.textContent = `${usage.prompt_tokens} + ${usage.completion_tokens} tokens, first after `
    + `${((first - start) / 1e3).toFixed(2)} s${rate}${reason === "length" ? "; ended by its length" : ""}`;
  turn.element.append(facts);
}

async function answer() {
  const start = performance.now();
  const conversation = turns;
  stopper = new AbortController();
  setBusy(true);
  let turn = null;
  try {
    const { path, body } = await bodyOf(stopper.signal);
    const stream = await ask(path, body, stopper.signal);
    turn = addTurn("assistant", "");
    await read(stream, turn, start);
  } catch (error) {
    if (error.name !== "AbortError") addNote(error.message, "error");
  }
  if (turns !== conversation) turn?.element.remove(); // a new one has begun
  else if (turn && turn.content) turns.push(turn);
  else {
    turn?.element.remove();
    giveBack();
  }
  stopper = null;
  setBusy(false);
}

// A turn without an answer is no part of the conversation: its text goes back to be sent again.
function giveBack() {
  const last = turns.at(-1);
  if (last?.role !== "user") return;
  turns.pop();
  last.element.remove();
  if (!$("text").value) $("text").value = last.content;
}

function setBusy(isBusy) {
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  $("talk").setAttribute("aria-busy", isBusy);
  showActions();
}

function send() {
  const text = $("text").value;
  if (!text.trim() || stopper) return;
  $("text").value = "";
  isFollowed = true;
  $("empty").hidden = true;
  turns.push(addTurn("user", text));
  answer();
}

function regenerate() {
  if (stopper || turns.at(-1)?.role !== "assistant") return;
  turns.pop().element.remove();
  answer();
}

function reset() {
  stopper?.abort();
  turns = [];
  $("talk").replaceChildren($("empty"));
  $("empty").hidden = false;
  $("text").focus();
}

// Numbers.

function bars(canvas, values, top, slots) {
  const ratio = devicePixelRatio || 1;
  const width = (canvas.width = canvas.clientWidth * ratio);
  const height = (canvas.height = canvas.clientHeight * ratio);
  const each = width / slots;
  const pen = canvas.getContext("2d");
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--bar");
  values.forEach((value, index) => {
    const tall = (height * value) / Math.max(top, 1e-9);
    pen.fillRect(index * each, height - tall, Math.max(each - ratio, 1), tall);
  });
}

function row(cells, title = "") {
  const element = document.createElement("tr");
  element.title = title;
  for (const cell of cells) element.insertCell().append(cell);
  return element;
}

// A cell for each expert: blue above the fair share, orange below, the stronger the farther.
function strip(shares) {
  const element = document.createElement("div");
  element.className = "strip";
  shares.forEach((share, expert) => {
    const cell = document.createElement("span");
    const distance = Math.min(Math.abs(Math.log2(Math.max(share, 1 / 16))) / 2, 1);
    cell.style.background = share >= 1 ? "var(--bar)" : "var(--low)";
    cell.style.opacity = 0.12 + 0.88 * distance;
    cell.title = `expert ${expert}: ${share.toFixed(2)} of its fair share`;
    element.append(cell);
  });
  return element;
}

function showLoad(load) {
  $("load_part").hidden = !load.length;
  const rows = loadShares(load).map(({ shares, most, least, idle }, layer) => row([
    String(layer),
    strip(shares),
    `${shares[most].toFixed(2)} (${most})`,
    `${shares[least].toFixed(2)} (${least})${idle > 1 ? `, ${idle} idle` : ""}`,
  ]));
  $("load").replaceChildren(...rows);
}

const seconds = (value) => (value === null ? "-" : value < 1 ? `${(1e3 * value).toFixed(0)} ms` : `${value.toFixed(2)} s`);

async function watch() {
  try {
    const stats = await (await ask("/stats")).json();
    $("state").textContent = "";
    if (hasChat !== stats.has_chat) setChat(stats.has_chat);
    const numbers = {
      "Running, waiting": `${stats.num_running}, ${stats.num_waiting}`,
      "Pages in use": `${stats.pages_used} of ${stats.pages_total}`,
      "Pages that may be found again": stats.pages_cached,
      "Tokens found in pages": `${(100 * stats.hit_rate).toFixed(0)} %`,
      "First token, median": seconds(median(stats.ttft)),
      "Further token, median": seconds(median(stats.tpot)),
      "Preempted": stats.num_preempted,
    };
    $("numbers").replaceChildren(...Object.entries(numbers).map(([name, value]) => row([name, String(value)])));
    speeds.push(stats.tokens_per_second);
    if (speeds.length > 120) speeds.shift();
    $("rate").textContent = stats.tokens_per_second.toFixed(1);
    bars($("speed"), speeds, Math.max(...speeds), 120);
    showLoad(stats.expert_load ?? []);
  } catch (error) {
    $("state").textContent = error.status === 401 ? "needs its key" : `not reachable: ${error.message}`;
  }
}

function setChat(value) {
  hasChat = value;
  $("text").placeholder = hasChat ? "Message" : "Text to continue";
  $("system_row").hidden = !hasChat;
}

async function readModels() {
  try {
    const { data } = await (await ask("/v1/models")).json();
    maxLength = data[0].max_model_len;
    const name = $("models").value;
    $("models").replaceChildren(...data.map(({ id }) => new Option(id, id)));
    if (data.some(({ id }) => id === name)) $("models").value = name;
    $("length").textContent = `${maxLength} tokens`;
  } catch { /* `watch` says why */ }
}

$("send").onclick = send;
$("stop").onclick = () => stopper?.abort();
$("reset").onclick = reset;
$("is_plain").onchange = () => turns.forEach(show);
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
};
$("talk").onscroll = () => {
  isFollowed = $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 40;
};
$("settings").oninput = remember;
$("key").onchange = () => { key = $("key").value; readModels(); watch(); };
recall();
if (matchMedia("(max-width: 50rem)").matches) $("settings").open = false;
readModels();
watch();
setInterval(() => { if (!document.hidden) watch(); }, 1000);
setInterval(() => { if (!maxLength) readModels(); }, 2000);
