// Draws the loss of several runs with uPlot, and sorts the table of runs.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("series").textContent);
  const place = document.getElementById("chart");
  const buttons = [...document.querySelectorAll("#axes button")];
  let plot = null;
  let current = 0;

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // The eight colours of the page, then hues that are far from their neighbours.
  const color = (n) => (n < 8 ? variable("--c" + n) : `hsl(${(n * 137.5) % 360} 55% 50%)`);

  const spell = (value) => {
    if (value == null) return "-";
    const size = Math.abs(value);
    for (const [power, letter] of [[15, "P"], [12, "T"], [9, "G"], [6, "M"], [3, "k"]])
      if (size >= 10 ** power) return +(value / 10 ** power).toPrecision(3) + letter;
    return String(+value.toPrecision(4));
  };

  // Runs have records at different places: the legend shows the nearest one of each.
  const nearest = (plot, series, index) => {
    if (index == null) return "-";
    const values = plot.data[series];
    for (let away = 0; away < values.length; away++)
      for (const at of [index - away, index + away])
        if (values[at] != null) return values[at].toFixed(4);
    return "-";
  };

  // The first steps of a run would leave no room for the rest.
  const limits = (runs) => {
    const later = runs.flatMap((run) => run.y.slice(Math.floor(run.y.length / 20)).concat(run.held_y));
    const finite = later.filter((value) => value != null);
    const low = Math.min(...finite);
    const high = Math.max(...finite);
    const margin = 0.05 * (high - low) || 0.1;
    return [low - margin, high + margin];
  };

  const size = () => ({
    width: place.clientWidth,
    height: window.innerWidth < 640 ? 280 : 380,
  });

  function draw(axis) {
    current = axis;
    buttons.forEach((button, n) => button.setAttribute("aria-pressed", n === axis));
    if (plot) plot.destroy();
    const runs = data.runs.filter((run) => run.x[axis]);
    if (!runs.length) return;
    const tables = [];
    const series = [{ label: data.axes[axis].name, value: (_, x) => spell(x) }];
    for (const run of runs) {
      const stroke = color(data.runs.indexOf(run));
      const value = (plot, _, n, index) => nearest(plot, n, index);
      tables.push([run.x[axis], run.y], [run.held_x[axis], run.held_y]);
      series.push(
        { label: run.name, stroke, value, width: 2, spanGaps: true, points: { show: false } },
        { label: "", class: "held", stroke, paths: () => null, points: { show: true, size: 7, fill: stroke } },
      );
    }
    const [low, high] = limits(runs);
    const joined = uPlot.join(tables);
    const [first, last] = [joined[0][0], joined[0][joined[0].length - 1]];
    const isWhole = (plot) => plot.scales.x.min <= first && plot.scales.x.max >= last;
    const style = { stroke: variable("--soft"), grid: { stroke: variable("--line"), width: 1 }, ticks: { show: false } };
    plot = new uPlot(
      {
        ...size(),
        series,
        scales: {
          x: { time: false },
          y: { range: (plot, min, max) => (isWhole(plot) || min == null ? [low, high] : uPlot.rangeNum(min, max, 0.1, true)) },
        },
        axes: [
          { ...style, label: data.axes[axis].label, values: (_, ticks) => ticks.map(spell) },
          { ...style, label: data.unit, size: 60 },
        ],
        cursor: { focus: { prox: 24 } },
        focus: { alpha: 0.25 },
        hooks: {
          setSeries: [
            (plot, n) => {
              if (n && n % 2 && plot.series[n + 1].show !== plot.series[n].show)
                plot.setSeries(n + 1, { show: plot.series[n].show });
            },
          ],
        },
      },
      joined,
      place,
    );
  }

  buttons.forEach((button, n) => button.addEventListener("click", () => draw(n)));
  window.addEventListener("resize", () => plot && plot.setSize(size()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(current));
  draw(0);

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) =>
      head.firstElementChild.addEventListener("click", () => {
        const rises = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", rises ? "ascending" : "descending");
        const key = (row) => row.cells[column].dataset.value;
        const compare = (a, b) => {
          if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
          const order = isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
          return rises ? order : -order;
        };
        const rows = [...table.tBodies[0].rows].sort((a, b) => compare(key(a), key(b)));
        table.tBodies[0].append(...rows);
      }),
    );
  }
})();
