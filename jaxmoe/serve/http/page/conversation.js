// Copyright 2026 The jaxmoe authors
// SPDX-License-Identifier: Apache-2.0
"use strict";

// What the page knows of the API, without the page: bodies of requests, events of streams, and the
// part of a conversation that fits.

// Return the fields of the sampling: what is left empty is left to the server.
function samplingFields(values) {
  const fields = {};
  for (const [name, text] of Object.entries(values)) {
    const value = String(text).trim();
    if (!value) continue;
    if (name === "stop_strings") fields.stop = value.split("\n").filter(Boolean);
    else if (!Number.isNaN(Number(value))) fields[name] = Number(value);
  }
  return fields;
}

// Return the messages of a conversation, the system prompt first where there is one.
function withSystem(system, turns) {
  const messages = turns.map(({ role, content }) => ({ role, content }));
  return system.trim() ? [{ role: "system", content: system }, ...messages] : messages;
}

// Return the tokens that are kept free for an answer: what is asked for, at most a quarter of all
// where the conversation needs the room.
function reserve(mostTokens, length) {
  const quarter = Math.max(Math.floor(length / 4), 1);
  return mostTokens > 0 ? Math.min(mostTokens, quarter) : quarter;
}

// Return the last turns that leave room for an answer, and how many earlier ones are left out.
// `count` says how many tokens some turns are; a conversation begins with a turn of the user, and
// its last turn always stays.
async function clipTurns(turns, count, length, mostTokens) {
  const starts = [];
  turns.forEach((turn, place) => {
    if (turn.role === "user") starts.push(place);
  });
  const room = length - reserve(mostTokens, length);
  let [low, high] = [0, starts.length - 1]; // the first start that fits is between them
  while (low < high) {
    const middle = low === 0 ? 0 : Math.floor((low + high) / 2);
    if ((await count(turns.slice(starts[middle]))) <= room) high = middle;
    else low = middle + 1;
  }
  const start = starts[low] ?? 0;
  return { turns: turns.slice(start), numLeftOut: start };
}

// Return the events in a piece of a stream of server-sent events, and the rest without an end.
function eventsOf(text) {
  const parts = text.split("\n\n");
  const rest = parts.pop();
  const events = [];
  for (const part of parts) {
    const data = part.split("\n").filter((line) => line.startsWith("data:"));
    const content = data.map((line) => line.slice(5).trim()).join("\n");
    if (content && content !== "[DONE]") events.push(JSON.parse(content));
  }
  return { events, rest };
}

// Return the load of each layer as shares of the fair share: 1 is what every expert would have.
function loadShares(load) {
  return load.map((layer) => {
    const sum = layer.reduce((a, b) => a + b, 0);
    const shares = layer.map((tokens) => (sum ? (tokens * layer.length) / sum : 0));
    const most = shares.indexOf(Math.max(...shares));
    const least = shares.indexOf(Math.min(...shares));
    return { shares, most, least, idle: shares.filter((share) => share === 0).length };
  });
}

function median(values) {
  return values.length ? [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)] : null;
}
