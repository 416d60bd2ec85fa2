# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the load of every expert over a run as part of an HTML page.

There are two views of `router.npz`. A map of layers by experts has a slider over the steps; a small
script draws it from numbers embedded in the page, so that it works from a file; `#step=120` in the
address selects a step. A strip per layer shows experts over time, with a line at the selected step.
Without the script the map is an image of the last step. `load_image` is the picture for trackers.

    colour = load / fair share, in steps of 1/64:  blue below 1, transparent at 1, red above

Alpha is the distance from 1, so that fair is the background of the page. The size of the embedded
data is bounded (`MAX_MAP_BYTES`, `MAX_STRIP_BYTES`): long runs and large models show fewer steps.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib

import numpy as np

from jaxmoe.tracking.smoothing import bin_means, worst_of_groups

MAX_MAP_BYTES = 300_000
"""Bytes of the numbers behind the slider, before base64; one per step, layer and expert."""
MAX_STRIP_BYTES = 250_000
"""Bytes of the strips before compression."""
MAX_FRAMES = 160
MAX_IMAGE_ROWS = 512
"""Rows of `load_image`, without the lines between layers."""
LOAD_IMAGE_RECORDS = 480
"""Largest number of records that `load_image` is drawn from."""
LOAD_IMAGE_CAPTION = (
    "Load of every expert over the run so far: steps from left to right, layers from top to bottom,"
    " within a layer its experts. White: fair share; blue: less; red: more."
)

UNIT = 64
"""Levels per fair share; 255 levels reach 3.98 fair shares."""
_LOW = (37, 99, 168)
_HIGH = (205, 62, 40)

STYLE = """
.loads { display: grid; grid-template-columns: auto 1fr; gap: 0.25rem 0.6rem; }
.loads .layers { display: grid; font-size: 0.72rem; color: var(--soft); text-align: right; }
.loads .layers.ends { align-content: space-between; }
.loads .layers span { display: flex; align-items: center; justify-content: flex-end; }
.loads .experts { grid-column: 2; display: flex; justify-content: space-between;
                  font-size: 0.72rem; color: var(--soft); }
.loads .cells { position: relative; border: 1px solid var(--line); }
.loads img, .loads canvas, .strips img { position: absolute; inset: 0; width: 100%; height: 100%;
                                         image-rendering: pixelated; }
.loads .lattice { position: absolute; inset: 0; pointer-events: none; background-image:
  linear-gradient(to right, var(--card) 2px, transparent 2px),
  linear-gradient(to bottom, var(--card) 2px, transparent 2px); }
.slider { display: flex; gap: 0.8rem; align-items: center; margin: 0.2rem 0 0.8rem; }
.slider[hidden] { display: none; }
.slider input { flex: 1; min-width: 0; accent-color: var(--accent); }
.slider output { min-width: 8.5rem; font-variant-numeric: tabular-nums; }
.slider button { font: inherit; font-size: 0.85rem; color: var(--text); background: var(--page);
  border: 1px solid var(--line); border-radius: 0.4rem; padding: 0.15rem 0.8rem; cursor: pointer;
  min-width: 4.5rem; }
.scale { display: flex; gap: 0.6rem; align-items: center; font-size: 0.8rem; color: var(--soft);
         margin-top: 0.7rem; flex-wrap: wrap; }
.scale i { flex: 0 1 16rem; height: 0.7rem; border: 1px solid var(--line); border-radius: 3px;
  background: linear-gradient(to right, rgb(var(--low)), transparent 40%, rgb(var(--high))); }
.strips { display: grid; gap: 0.9rem 1.2rem;
          grid-template-columns: repeat(auto-fill, minmax(min(SMALLEST, 100%), 1fr)); }
.strips .strip { position: relative; border: 1px solid var(--line); }
.strips .strip::after { content: ""; position: absolute; top: 0; bottom: 0; width: 1px;
                        left: var(--at, 100%); background: var(--text); }
"""

SCRIPT = """
(function () {
  const box = document.getElementById("load-map");
  const data = JSON.parse(document.getElementById("load-map-data").textContent);
  const bytes = Uint8Array.from(atob(data.loads), (c) => c.charCodeAt(0));
  const { steps, layers, experts, unit } = data, size = layers * experts;
  const canvas = document.createElement("canvas");
  canvas.width = experts; canvas.height = layers;
  const context = canvas.getContext("2d");
  const find = (name) => box.querySelector(name);
  const slider = find("input"), shown = find("output"), button = find("button");
  const hint = find(".hint"), cells = find(".cells");
  let frame = steps.length - 1, timer = null;
  function draw() {
    const image = context.createImageData(experts, layers);
    for (let i = 0; i < size; i++) {
      const level = bytes[frame * size + i], color = data.palette[level];
      for (let c = 0; c < 4; c++) image.data[4 * i + c] = color[c];
    }
    context.putImageData(image, 0, 0);
    slider.value = frame;
    shown.textContent = "step " + steps[frame].toLocaleString("en");
    const last = steps[steps.length - 1], first = steps[0];
    const share = last > first ? (steps[frame] - first) / (last - first) : 1;
    document.documentElement.style.setProperty("--at", 100 * share + "%");
  }
  function show(next) { frame = Math.max(0, Math.min(steps.length - 1, next)); draw(); }
  function fromAddress() {
    const match = /step=(\\d+)/.exec(location.hash);
    if (!match) return;
    const wanted = Number(match[1]);
    let best = 0;
    steps.forEach((s, i) => {
      if (Math.abs(s - wanted) < Math.abs(steps[best] - wanted)) best = i;
    });
    show(best);
  }
  function stop() { clearInterval(timer); timer = null; button.textContent = "play"; }
  slider.max = steps.length - 1;
  slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
  button.addEventListener("click", () => {
    if (timer) return stop();
    if (frame === steps.length - 1) frame = -1;
    button.textContent = "stop";
    timer = setInterval(() => {
      show(frame + 1);
      if (frame === steps.length - 1) stop();
    }, Math.max(60, 6000 / steps.length));
  });
  cells.addEventListener("mousemove", (event) => {
    const place = cells.getBoundingClientRect();
    const e = Math.floor((event.clientX - place.left) / place.width * experts);
    const l = Math.floor((event.clientY - place.top) / place.height * layers);
    if (e < 0 || l < 0 || e >= experts || l >= layers) return;
    const level = bytes[frame * size + l * experts + e];
    const ratio = (level === 255 ? "at least " : "") + (level / unit).toFixed(2);
    hint.textContent = "layer " + data.names[l] + ", expert " + e + ": " + ratio +
      " of the fair share";
  });
  cells.addEventListener("mouseleave", () => { hint.textContent = ""; });
  window.addEventListener("hashchange", fromAddress);
  find(".slider").hidden = steps.length < 2;
  find("img").replaceWith(canvas);
  find(".still").remove();
  draw();
  fromAddress();
})();
"""


def load_map(steps: np.ndarray, load: np.ndarray) -> str:
    """Return the map with its slider, as HTML.

    Args:
        steps: [n], rising.
        load: [n L E] shares of the assignments.

    Returns:
        A map with its slider and a strip per layer. The page needs `load_style(E)`.
    """
    _, layers, experts = load.shape
    chosen = frames(len(steps), layers * experts)
    levels_shown = levels(load[chosen] * experts)
    names = [str(layer) for layer in range(layers)]
    data = {
        "steps": [int(step) for step in steps[chosen]],
        "layers": layers,
        "experts": experts,
        "unit": UNIT,
        "names": names,
        "palette": [[*color[:3], color[3]] for color in palette()],
        "loads": base64.b64encode(levels_shown.tobytes()).decode(),
    }
    height = min(34.0, max(4.0, layers * (2.0 if layers <= 8 else 1.1)))
    lattice = ""
    if experts <= 96 and layers <= 40:
        lattice = (
            '<div class="lattice" style="background-size:'
            f' calc(100%/{experts}) 100%, 100% calc(100%/{layers})"></div>'
        )
    every = math.ceil(layers / 24)
    labels = "".join(
        f"<span>{'L' + name if layer % every == 0 else ''}</span>"
        for layer, name in enumerate(names)
    )
    last = int(steps[-1])
    return (
        '<div id="load-map">'
        '<div class="slider" hidden><button type="button">play</button>'
        '<input type="range" min="0" value="0" aria-label="step"><output></output></div>'
        f'<p class="still soft small">At the last step, {last:,}.</p>'
        f'<div class="loads"><div class="layers">{labels}</div>'
        f'<div class="cells" style="height:{height:.1f}rem">'
        f'<img alt="load of every expert by layer at step {last}" src="{png(levels_shown[-1])}">'
        f"{lattice}</div>"
        f'<div class="experts"><span>expert 0</span><span>expert {experts - 1}</span></div></div>'
        '<div class="scale"><span>0</span><i></i><span>2.5 of the fair share and more</span>'
        '<span class="hint"></span></div></div>'
        f'<script type="application/json" id="load-map-data">{json.dumps(data)}</script>'
        f"<script>{SCRIPT}</script>"
    )


def load_strips(steps: np.ndarray, load: np.ndarray) -> str:
    """Return a strip per layer, experts by time, as HTML.

    Args:
        steps: [n], rising.
        load: [n L E] shares of the assignments; averaged over bins of steps.
    """
    _, layers, experts = load.shape
    bins = max(8, min(240, MAX_STRIP_BYTES // (layers * experts)))
    _, ratio = bin_means(steps, load * experts, bins)
    height = min(9.0 if layers <= 8 else 5.0, max(3.0, experts * 0.3))
    strips = []
    for layer in range(layers):
        values = ratio[:, layer].T
        worst = float(values[:, -1].max())
        strips.append(
            f"<div><h3>layer {layer} <span class='soft small'>busiest {worst:.2f}</span></h3>"
            f'<div class="strip" style="height:{height:.1f}rem"><img alt="layer {layer}: experts'
            f' from top to bottom, steps from left to right" src="{png(levels(values))}"></div>'
            "</div>"
        )
    return f'<div class="strips">{"".join(strips)}</div>'


def load_picture(load: np.ndarray) -> str:
    """Return the load at one step, as HTML.

    Args:
        load: [L E] shares of the assignments.
    """
    layers, experts = load.shape
    height = min(20.0, max(3.0, layers * (1.4 if layers <= 8 else 0.6)))
    return (
        f'<div class="loads"><div class="layers ends"><span>L0</span>'
        f"<span>{f'L{layers - 1}' if layers > 1 else ''}</span></div>"
        f'<div class="cells" style="height:{height:.1f}rem"><img alt="load of every expert by'
        f' layer" src="{png(levels(load * experts))}"></div>'
        f'<div class="experts"><span>expert 0</span><span>expert {experts - 1}</span></div></div>'
    )


def load_style(layers: int) -> str:
    """Return the CSS of both views."""
    return STYLE.replace("SMALLEST", "26rem" if layers <= 8 else "13rem")


def frames(count: int, cells: int) -> np.ndarray:
    """Return the indices of the records on the slider: first, last, and evenly spaced ones."""
    allowed = max(1, min(MAX_FRAMES, MAX_MAP_BYTES // max(cells, 1)))
    if allowed == 1:
        return np.array([count - 1])
    return np.unique(np.linspace(0, count - 1, min(count, allowed)).round().astype(int))


def levels(ratio: np.ndarray) -> np.ndarray:
    """Return loads over the fair share as colour levels."""
    return np.clip(np.rint(np.nan_to_num(ratio) * UNIT), 0, 255).astype(np.uint8)


def palette() -> list[tuple[int, int, int, int]]:
    """Return red, green, blue and alpha of each level."""
    colors = []
    for level in range(256):
        ratio = level / UNIT
        distance = 1.0 - ratio if ratio < 1.0 else (ratio - 1.0) / 1.5
        alpha = min(1.0, distance) ** 0.85
        colors.append((*(_LOW if ratio < 1.0 else _HIGH), round(255 * alpha)))
    return colors


def png(level: np.ndarray) -> str:
    """Return an image of one pixel per cell as a data URL.

    Args:
        level: [rows columns] of `levels`.
    """
    rows, columns = level.shape
    colors = palette()
    lines = b"".join(b"\0" + row.tobytes() for row in np.ascontiguousarray(level))
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(value for color in colors for value in color[:3])),
        (b"tRNS", bytes(color[3] for color in colors)),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )
    return "data:image/png;base64," + base64.b64encode(data).decode()


def load_image(steps: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Return the load of every expert over the run so far as a picture for trackers.

    Steps go from left to right, layers from top to bottom with a line between them, and the experts
    of a layer from top to bottom. White is the fair share, blue below it, red above.

    Args:
        steps: [n], rising.
        load: [n L E] shares of the assignments.

    Returns:
        [H W 3] uint8. Where the experts of all layers are more than `MAX_IMAGE_ROWS`, a row shows
        the one of its neighbours that is farthest from the fair share.
    """
    _, layers, experts = load.shape
    _, ratio = bin_means(steps, load * experts)
    bins = len(ratio)
    rows = max(1, min(experts, MAX_IMAGE_ROWS // layers))
    worst = worst_of_groups(ratio.reshape(bins * layers, experts), rows).reshape(bins, layers, -1)
    rows = worst.shape[-1]
    colors = np.asarray(palette(), np.float64)
    alpha = colors[:, 3:] / 255.0
    opaque = np.rint(colors[:, :3] * alpha + 255.0 * (1.0 - alpha)).astype(np.uint8)
    cells = opaque[levels(worst)].transpose(1, 2, 0, 3)  # [L rows bins 3]
    tall = max(1, min(16, MAX_IMAGE_ROWS // (layers * rows)))
    cells = cells.repeat(tall, axis=1).repeat(max(1, 480 // bins), axis=2)
    lined = np.pad(cells, ((0, 0), (0, 2), (0, 0), (0, 0)), constant_values=128)
    return lined.reshape(-1, *lined.shape[2:])[:-2]
