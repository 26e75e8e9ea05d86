// What moves in a report: pictures, the list of requests or points, the switch between light and dark.
// Knows the data that the page carries and uPlot; text goes into the page as text only, never as HTML.
(function () {
  "use strict";

  const root = document.documentElement;
  const problems = document.getElementById("problems");

  function tell(message) {
    problems.hidden = false;
    problems.textContent += (problems.textContent ? " " : "Something in this page went wrong: ") + message;
  }
  window.addEventListener("error", (event) => tell(event.message));
  window.addEventListener("unhandledrejection", (event) => tell(String(event.reason)));

  const data = JSON.parse(document.getElementById("data").textContent);

  // Elements, numbers, packed columns

  function element(tag, facts, ...inside) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(facts || {})) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (name === "style") for (const [key, one] of Object.entries(value)) made.style[key] = one;
      else if (value === true) made.setAttribute(name, "");
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
    }
    for (const one of inside) if (one !== null && one !== undefined) made.append(one);
    return made;
  }

  const place = (name) => document.querySelector(`[data-picture="${name}"]`);

  function number(value, digits) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
    if (Number.isInteger(value)) return String(value);
    if (size < 1e-4 && size > 0) return value.toExponential(1);
    return String(Number(value.toPrecision(digits || 4)));
  }

  const percent = (share, digits) => (share === null ? "–" : `${(share * 100).toFixed(digits === undefined ? 1 : digits)} %`);

  function seconds(us) {
    return `${number(us / 1e6, 6)} s`;
  }

  function duration(us) {
    if (us === null) return "–";
    return us >= 1e6 ? `${number(us / 1e6)} s` : `${number(us / 1e3)} ms`;
  }

  function unpack(column, rows) {
    return Array.isArray(column) ? column : new Array(rows).fill(column === undefined ? null : column);
  }

  function bytes(text, size) {
    const pairs = atob(text);
    const values = new Uint8Array(size);
    let at = 0;
    for (let i = 0; i < pairs.length; i += 2) {
      const end = at + pairs.charCodeAt(i + 1);
      values.fill(pairs.charCodeAt(i), at, end);
      at = end;
    }
    return values;
  }

  function quantile(sorted, share) {
    if (!sorted.length) return null;
    const rank = (sorted.length - 1) * share;
    const low = Math.floor(rank);
    const high = Math.min(low + 1, sorted.length - 1);
    return sorted[low] + (sorted[high] - sorted[low]) * (rank - low);
  }

  // Light, dark, print

  const LIGHT = { ink: "#1a1d21", quiet: "#565d66", line: "#d5d9de", free: "#eeeeee", back: "#ffffff" };
  const DARK = { ink: "#e8eaed", quiet: "#a4abb3", line: "#383e45", free: "#2c3137", back: "#14171a" };
  const wantsDark = window.matchMedia("(prefers-color-scheme: dark)");
  let printing = false;
  const repainted = [];

  function isDark() {
    const said = root.getAttribute("data-theme");
    return said ? said === "dark" : wantsDark.matches;
  }
  const shade = () => (isDark() && !printing ? DARK : LIGHT);

  // The colour of free room is the page's own, so that it reads as room in the dark too.
  const coloured = (colour) => (colour === "#EEEEEE" ? shade().free : colour === "#000000" ? shade().ink : colour);

  function themed() {
    const button = document.getElementById("theme");
    button.hidden = false;
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Show in light colours" : "Show in dark colours");
    for (const again of repainted) again();
  }

  try {
    const kept = window.localStorage.getItem("speckv-theme");
    if (kept === "dark" || kept === "light") root.setAttribute("data-theme", kept);
  } catch (error) {
    // A page without storage follows the system.
  }
  document.getElementById("theme").addEventListener("click", () => {
    root.setAttribute("data-theme", isDark() ? "light" : "dark");
    try {
      window.localStorage.setItem("speckv-theme", root.getAttribute("data-theme"));
    } catch (error) {
      // Then it holds until the page is left.
    }
    themed();
  });
  wantsDark.addEventListener("change", themed);

  // Plots: what all of them share

  const plots = [];
  const PRINT_WIDTH = 680;

  function wide(node) {
    return Math.max(Math.floor(printing ? PRINT_WIDTH : node.clientWidth), 200);
  }

  function axis(label, more) {
    return Object.assign(
      {
        label,
        size: 34,
        labelSize: 18,
        labelGap: 0,
        labelFont: "12px system-ui, sans-serif",
        font: "12px system-ui, sans-serif",
        stroke: () => shade().quiet,
        grid: { stroke: () => shade().line, width: 1 },
        ticks: { stroke: () => shade().line, width: 1, size: 5 },
      },
      more,
    );
  }

  const tall = (label) => axis(label, { size: 52, values: (plot, splits) => splits.map((one) => (one === null ? "" : number(one))) });

  function plot(node, options, columns) {
    const box = element("div", { class: "plot" });
    node.append(box);
    const height = options.height;
    const made = new uPlot(Object.assign({ width: wide(box), legend: { show: false } }, options), columns, box);
    plots.push({ made, box, height });
    repainted.push(() => made.redraw(false));
    return made;
  }

  function fit() {
    for (const { made, box, height } of plots) if (made.width !== wide(box)) made.setSize({ width: wide(box), height });
  }
  window.addEventListener("resize", fit);
  window.addEventListener("beforeprint", () => {
    printing = true;
    for (const one of document.querySelectorAll("details:not([open])")) {
      one.open = true;
      one.dataset.opened = "";
    }
    fit();
    themed();
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    for (const one of document.querySelectorAll("details[data-opened]")) {
      one.open = false;
      delete one.dataset.opened;
    }
    fit();
    themed();
  });

  function swatch(colour, line) {
    const made = element("i", { class: line ? "swatch line" : "swatch" });
    const paint = () => (made.style.background = coloured(colour));
    paint();
    repainted.push(paint);
    return made;
  }

  // Pictures over simulated time, zoomed and pointed at together

  const timed = [];
  let whole = [0, 1];

  function zoomTo(low, high) {
    const width = Math.min(high - low, whole[1] - whole[0]);
    const from = Math.min(Math.max(low, whole[0]), whole[1] - width);
    for (const one of timed) one.setScale("x", { min: from, max: from + width });
  }

  function followZoom(made, key) {
    if (key !== "x") return;
    const { min, max } = made.scales.x;
    for (const one of timed) {
      if (one !== made && (one.scales.x.min !== min || one.scales.x.max !== max)) one.setScale("x", { min, max });
    }
    const shown = document.getElementById("shown");
    if (shown) shown.textContent = `${number(min, 3)} s to ${number(max, 5)} s`;
  }

  function zoomBar(node) {
    const bar = element("div", { class: "controls", role: "group", "aria-label": "Part of the run that is shown" });
    const by = (factor) => () => {
      const { min, max } = timed[0].scales.x;
      const half = ((max - min) * factor) / 2;
      zoomTo((min + max) / 2 - half, (min + max) / 2 + half);
    };
    const along = (share) => () => {
      const { min, max } = timed[0].scales.x;
      zoomTo(min + (max - min) * share, max + (max - min) * share);
    };
    const add = (label, words, onclick) => bar.append(element("button", { type: "button", onclick, "aria-label": words, title: words }, label));
    add("+", "Zoom in", by(0.5));
    add("−", "Zoom out", by(2));
    add("◀", "Earlier", along(-0.5));
    add("▶", "Later", along(0.5));
    add("All", "The whole run", () => zoomTo(...whole));
    bar.append(element("span", { class: "quiet", id: "shown" }));
    node.append(bar, element("p", { class: "quiet controls" }, "Drag over a picture to zoom in; double-click for the whole run."));
  }

  // `layers` lie on each other from the first up, `lines` are drawn as they are. Each: {label, colour, values}.
  function timePicture(name, edges, layers, lines, facts) {
    const node = place(name);
    const bins = edges.length - 1;
    const entries = [...layers, ...lines];
    const shown = entries.map(() => true);
    const order = layers.map((_, i) => layers.length - 1 - i);
    const held = (values) => [...values, values[bins - 1]];

    function columns() {
      const floor = new Array(bins).fill(0);
      const tops = layers.map((layer, number) => {
        if (shown[number]) for (let i = 0; i < bins; i++) floor[i] += layer.values[i];
        return held(floor);
      });
      return [edges, ...order.map((number) => tops[number]), ...lines.map((line) => held(line.values))];
    }

    const stepped = uPlot.paths.stepped({ align: 1 });
    const series = [
      {},
      ...order.map((number) => ({
        label: layers[number].label,
        stroke: () => coloured(layers[number].colour),
        fill: () => coloured(layers[number].colour),
        width: 0,
        paths: stepped,
        points: { show: false },
      })),
      ...lines.map((line) => ({
        label: line.label,
        stroke: () => coloured(line.colour),
        width: 1.5,
        paths: stepped,
        points: { show: false },
      })),
    ];

    const readout = element("div", { class: "readout" });
    const at = element("span", { class: "at" });
    readout.append(at);
    const widths = edges.slice(1).map((edge, i) => edge - edges[i]);
    const total = widths.reduce((sum, one) => sum + one, 0) || 1;
    const means = entries.map((one) =>
      facts.mean ? facts.mean(one) : one.values.reduce((sum, value, i) => sum + value * widths[i], 0) / total,
    );
    const values = entries.map(() => element("span"));
    entries.forEach((one, number) => {
      const button = element("button", { type: "button", "aria-pressed": "true", title: `Show or hide ${one.label}` });
      button.append(swatch(one.colour, number >= layers.length), `${one.label} `, values[number]);
      button.addEventListener("click", () => {
        shown[number] = !shown[number];
        button.setAttribute("aria-pressed", String(shown[number]));
        const index = number < layers.length ? 1 + order.indexOf(number) : 1 + number;
        const { min, max } = made.scales.x;
        made.setData(columns(), false);
        made.setSeries(index, { show: shown[number] });
        made.setScale("x", { min, max });
      });
      readout.append(button);
    });

    function read(index) {
      const known = index !== null && index !== undefined;
      const bin = known ? Math.min(index, bins - 1) : null;
      at.textContent = known ? `at ${number(edges[bin], 6)} s` : "mean of the run";
      entries.forEach((one, number) => (values[number].textContent = facts.format(known ? one.values[bin] : means[number])));
    }

    const made = plot(
      node,
      {
        height: facts.height || 240,
        scales: {
          x: { time: false },
          y: { range: (plot, low, high) => [0, facts.most ? facts.most(high) : Math.max(high * 1.06, 1e-9)] },
        },
        axes: [axis("simulated time (s)"), tall(facts.unit)],
        series,
        cursor: {
          y: false,
          points: { show: false },
          drag: { x: true, y: false },
          sync: { key: "time", scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        },
        hooks: { setCursor: [(plot) => read(binAt(plot, edges))], setScale: [followZoom] },
      },
      columns(),
    );
    timed.push(made);
    node.append(readout);
    read(null);
  }

  // A value holds from its edge to the next, so the bin is the one that the pointer is in, not the nearest edge.
  function binAt(plot, edges) {
    if (plot.cursor.left === null || plot.cursor.left < 0 || plot.cursor.idx === null) return null;
    const x = plot.posToVal(plot.cursor.left, "x");
    let low = 0;
    let high = edges.length - 1;
    while (low < high - 1) {
      const middle = (low + high) >> 1;
      if (edges[middle] <= x) low = middle;
      else high = middle;
    }
    return low;
  }

  function overTime(steps) {
    const bins = steps.edges_s.length - 1;
    const states = {};
    for (const [name, column] of Object.entries(steps.states)) states[name] = unpack(column, bins);
    const pool = data.classes.reduce((sum, one) => sum + states[`res_${one.key}`][0], 0);
    const share = (values) => values.map((value) => (value / pool) * 100);
    const layer = (one) => ({ label: one.label, colour: one.colour, values: share(states[`res_${one.key}`]) });
    const inPercent = (value) => `${number(value, 3)} %`;
    zoomBar(place("zoom"));
    whole = [steps.edges_s[0], steps.edges_s[bins]];
    timePicture("pool", steps.edges_s, data.classes.map(layer), [], {
      unit: "share of the pool (%)",
      height: 300,
      format: inPercent,
      most: (high) => (high > 60 ? 100 : Math.max(high * 1.1, 1e-6)),
    });
    const thin = ["placeholder", "garbage", "lookahead", "slack"];
    timePicture(
      "speculative",
      steps.edges_s,
      data.classes.filter((one) => thin.includes(one.key)).map(layer),
      [{ label: "the other account: garbage in memory", colour: "#000000", values: share(states.content_garbage) }],
      { unit: "share of the pool (%)", format: inPercent },
    );
    timePicture(
      "queues",
      steps.edges_s,
      [],
      [
        { label: "running", colour: "#0072B2", values: states.num_running },
        { label: "waiting", colour: "#D55E00", values: states.num_waiting },
      ],
      { unit: "requests", height: 200, format: (value) => number(value, 3) },
    );
    const tokenBins = steps.token_edges_s.length - 1;
    const tokens = {};
    for (const [name, column] of Object.entries(steps.tokens)) tokens[name] = unpack(column, tokenBins);
    const combined = (of) => tokens.num_tokens.map((_, i) => Math.max(of(i), 0));
    timePicture(
      "tokens",
      steps.token_edges_s,
      [
        {
          label: "certain",
          colour: "#0072B2",
          values: combined((i) => tokens.num_tokens[i] - tokens.num_prefill_tokens[i] - tokens.num_draft_tokens[i]),
        },
        { label: "accepted drafts", colour: "#009E73", values: tokens.num_accepted_tokens },
        {
          label: "rejected drafts",
          colour: "#D55E00",
          values: combined((i) => tokens.num_draft_tokens[i] - tokens.num_accepted_tokens[i]),
        },
        { label: "prefill", colour: "#BBBBBB", values: tokens.num_prefill_tokens },
      ],
      [],
      { unit: "tokens a step", height: 220, format: (value) => number(value, 3) },
    );
    return states;
  }

  // The blocks

  function channels(colour) {
    return [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  }

  // Relative luminance as WCAG has it; black on it reads better than white from 0.179 on.
  function luminance(colour) {
    const [r, g, b] = colour.map((one) => (one <= 10 ? one / 255 / 12.92 : Math.pow((one / 255 + 0.055) / 1.055, 2.4)));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  function between(stops, share) {
    const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    const from = channels(stops[low]);
    const to = channels(stops[low + 1]);
    return from.map((one, i) => Math.round(one + (to[i] - one) * (at - low)));
  }

  function blockPicture(map) {
    const node = place("blocks");
    const size = map.rows * map.columns;
    const classes = bytes(map.classes, size);
    const garbage = bytes(map.garbage, size);
    const colours = map.names.map((name) => data.classes.find((one) => one.key === name).colour);
    const sheet = element("canvas", { width: map.columns, height: map.rows });
    const brush = sheet.getContext("2d");
    const first = map.first_s - map.step_s / 2;
    const last = first + map.step_s * map.columns;
    let view = "classes";

    function paint() {
      const image = brush.createImageData(map.columns, map.rows);
      const flat = colours.map((colour) => channels(coloured(colour)));
      const most = Math.max(map.garbage_most / map.garbage_unit, 1);
      const stops = isDark() && !printing ? ["#1d2125", "#7a3a10", "#d55e00", "#ffd9b8"] : ["#f7f7f7", "#f0a070", "#d55e00", "#3b1a00"];
      const heat = Array.from({ length: 256 }, (_, i) => between(stops, i / most));
      for (let row = 0; row < map.rows; row++) {
        for (let column = 0; column < map.columns; column++) {
          const from = row * map.columns + column;
          const colour = view === "classes" ? flat[classes[from]] : heat[garbage[from]];
          const to = ((map.rows - 1 - row) * map.columns + column) * 4;  // block 1 is at the bottom
          image.data[to] = colour[0];
          image.data[to + 1] = colour[1];
          image.data[to + 2] = colour[2];
          image.data[to + 3] = 255;
        }
      }
      brush.putImageData(image, 0, 0);
    }

    const detail = element("p", { class: "detail hover" }, "Point at a block, or tap it.");
    const switches = element("div", { class: "controls", role: "group", "aria-label": "What is shown of a block" });
    const views = [
      ["classes", "What most slots are"],
      ["garbage", "Garbage in memory"],
    ].map(([name, label]) =>
      element(
        "button",
        {
          type: "button",
          "aria-pressed": String(name === view),
          onclick: (event) => {
            view = name;
            for (const one of views) one.setAttribute("aria-pressed", String(one === event.currentTarget));
            paint();
            made.redraw(false);
          },
        },
        label,
      ),
    );
    switches.append(...views);
    node.append(switches);

    function draw(plot) {
      const { left, top, width, height } = plot.bbox;
      const x = plot.valToPos(first, "x", true);
      const y = plot.valToPos(map.num_blocks + 0.5, "y", true);
      const reach = map.rows * map.blocks_per_row;
      const bottom = plot.valToPos(0.5, "y", true);
      plot.ctx.save();
      plot.ctx.beginPath();
      plot.ctx.rect(left, top, width, height);
      plot.ctx.clip();
      plot.ctx.imageSmoothingEnabled = false;
      // The last row may stand for fewer blocks than the others: it is drawn as tall, and cut at the top.
      const tallness = ((bottom - y) * reach) / map.num_blocks;
      plot.ctx.drawImage(sheet, x, bottom - tallness, plot.valToPos(last, "x", true) - x, tallness);
      plot.ctx.restore();
    }

    function point(plot) {
      const { left, top } = plot.cursor;
      if (left === null || left < 0 || top < 0) {
        detail.textContent = "Point at a block, or tap it.";
        return;
      }
      const column = Math.floor((plot.posToVal(left, "x") - first) / map.step_s);
      const block = Math.round(plot.posToVal(top, "y"));
      if (column < 0 || column >= map.columns || block < 1 || block > map.num_blocks) return;
      const row = Math.floor((block - 1) / map.blocks_per_row);
      const low = row * map.blocks_per_row + 1;
      const high = Math.min(low + map.blocks_per_row - 1, map.num_blocks);
      const label = map.names[classes[row * map.columns + column]].replace("_", " ");
      const dirt = garbage[row * map.columns + column] * map.garbage_unit;
      const blocks = low === high ? `block ${low}` : `blocks ${low} to ${high}`;
      const mean = low === high ? "" : " on average";
      detail.textContent =
        `${blocks} at ${number(map.first_s + column * map.step_s, 5)} s: ${low === high ? "" : "most are "}${label}, ` +
        `${number(dirt, 3)} of ${map.block_size} slots garbage in memory${mean}`;
    }

    paint();
    whole = data.steps ? whole : [0, last];
    const made = plot(
      node,
      {
        height: 380,
        scales: { x: { time: false, range: (plot, low, high) => [low, high] }, y: { range: () => [0.5, map.num_blocks + 0.5] } },
        axes: [axis("simulated time (s)"), tall("block number")],
        series: [{}, { points: { show: false } }],
        cursor: {
          points: { show: false },
          drag: { x: true, y: false },
          sync: { key: "time", scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        },
        hooks: { drawAxes: [draw], setCursor: [point], setScale: [followZoom] },
      },
      [[whole[0], whole[1]], [null, null]],
    );
    timed.push(made);
    repainted.unshift(paint);  // before the plot that shows it
    const keys = element("div", { class: "readout" });
    const present = new Set(classes);
    map.names.forEach((name, i) => {
      if (present.has(i)) keys.append(element("span", { class: "key" }, swatch(colours[i]), name.replace("_", " ")));
    });
    node.append(detail, keys);
  }

  // Latencies

  function latencyPicture(requests) {
    const node = place("latency");
    const finished = requests.filter((one) => one.status === "finished");
    const kinds = [
      ["TTFT", "from arrival to the first token", (one) => ms(one.first_token_us), data.slo.ttft_ms],
      ["TPOT", "time per output token after the first", (one) => one.tpot_ms, data.slo.tpot_ms],
      ["longest gap", "the longest time between two deliveries", (one) => one.itl_max_ms, null],
      ["end to end", "from arrival to the last token", (one) => ms(one.finish_us), data.slo.e2el_ms],
      ["wait", "from arrival to the first schedule", (one) => ms(one.first_scheduled_us), null],
    ];
    const switches = element("div", { class: "controls", role: "group", "aria-label": "Which latency" });
    const box = element("div");
    const words = element("p", { class: "detail" });
    const detail = element("p", { class: "detail hover" });
    const buttons = kinds.map((kind) =>
      element("button", { type: "button", "aria-pressed": "false", onclick: () => show(kind) }, kind[0]),
    );
    switches.append(...buttons);
    node.append(switches, box, words, detail);
    let made = null;

    function show([name, meaning, of, limit]) {
      kinds.forEach((kind, i) => buttons[i].setAttribute("aria-pressed", String(kind[0] === name)));
      const values = finished.map(of).filter((one) => one !== null).sort((a, b) => a - b);
      box.replaceChildren();
      if (made) {
        plots.splice(plots.findIndex((one) => one.made === made), 1);
        made.destroy();
        made = null;
      }
      detail.textContent = "";
      if (!values.length) {
        words.textContent = `No finished request has this.`;
        return;
      }
      const mean = values.reduce((sum, one) => sum + one, 0) / values.length;
      const marks = [["mean", mean], ...[["median", 0.5], ["90 %", 0.9], ["99 %", 0.99]].map(([label, share]) => [label, quantile(values, share)])];
      words.textContent =
        `${name}: ${meaning}. ` +
        marks.map(([label, value]) => `${label} ${number(value)} ms`).join(", ") +
        `, most ${number(values[values.length - 1])} ms` +
        (limit === null ? "." : `. Limit ${number(limit)} ms (dashed): kept by ${percent(values.filter((one) => one <= limit).length / values.length)}.`);
      const { edges, counts } = histogram(values);
      const log = edges[0] > 0 && edges[edges.length - 1] / edges[0] > 20;
      let sum = 0;
      const shares = [0, ...counts.map((count) => ((sum += count) / values.length) * 100)];
      const mark = (plot) => {
        if (limit === null || limit < plot.scales.x.min || limit > plot.scales.x.max) return;
        const x = Math.round(plot.valToPos(limit, "x", true));
        plot.ctx.save();
        plot.ctx.strokeStyle = shade().ink;
        plot.ctx.setLineDash([6, 4]);
        plot.ctx.lineWidth = 1.5 * devicePixelRatio;
        plot.ctx.beginPath();
        plot.ctx.moveTo(x, plot.bbox.top);
        plot.ctx.lineTo(x, plot.bbox.top + plot.bbox.height);
        plot.ctx.stroke();
        plot.ctx.restore();
      };
      made = plot(
        box,
        {
          height: 260,
          scales: {
            x: { time: false, distr: log ? 3 : 1, range: () => [edges[0], edges[edges.length - 1]] },
            y: { range: (plot, low, high) => [0, Math.max(high * 1.06, 1)] },
            share: { range: () => [0, 100] },
          },
          axes: [
            axis(`${name} (ms)`, {
              splits: log ? roundSplits : undefined,
              filter: (plot, splits) => splits,
              values: (plot, splits) => splits.map((one) => number(one)),
            }),
            tall("requests"),
            axis("of requests (%)", { scale: "share", side: 1, size: 48, grid: { show: false } }),
          ],
          series: [
            {},
            { stroke: () => "#0072B2", fill: () => "#56B4E9", width: 1, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } },
            { scale: "share", stroke: () => "#D55E00", width: 2, points: { show: false } },
          ],
          cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
          hooks: {
            draw: [mark],
            setCursor: [
              (plot) => {
                const bin = binAt(plot, edges);
                detail.textContent =
                  bin === null ? "" : `${number(edges[bin])} to ${number(edges[bin + 1])} ms: ${number(counts[bin])} requests; ${number(shares[bin + 1], 3)} % took no longer`;
              },
            ],
          },
        },
        [edges, [...counts, counts[counts.length - 1]], shares],
      );
    }
    show(kinds[0]);
  }

  const ms = (us) => (us === null ? null : us / 1e3);

  // Ticks of a logarithmic axis: 1, 2, 5, 10, ... or fewer where there is no room for so many.
  function roundSplits(plot, index, low, high) {
    const room = Math.max(plot.bbox.width / devicePixelRatio / 55, 2);
    let splits = [];
    for (const leads of [[1, 2, 5], [1, 3], [1]]) {
      splits = [];
      for (let decade = Math.floor(Math.log10(low)); decade <= Math.log10(high); decade++) {
        for (const lead of leads) {
          const value = Number((lead * Math.pow(10, decade)).toPrecision(3));
          if (value >= low && value <= high) splits.push(value);
        }
      }
      if (splits.length <= room) break;
    }
    return splits;
  }

  function histogram(sorted) {
    const low = Math.max(sorted[0], 1e-3);
    const high = Math.max(sorted[sorted.length - 1], low * 1.001);
    const bins = Math.min(60, Math.max(8, Math.ceil(Math.sqrt(sorted.length) * 2)));
    const log = high / low > 20;
    const edges = Array.from({ length: bins + 1 }, (_, i) =>
      log ? low * Math.pow(high / low, i / bins) : low + ((high - low) * i) / bins,
    );
    const counts = new Array(bins).fill(0);
    let bin = 0;
    for (const value of sorted) {
      while (bin < bins - 1 && value >= edges[bin + 1]) bin++;
      counts[bin]++;
    }
    return { edges, counts };
  }

  // A list to search, sort and turn the pages of. `columns`: [{label, value, show, right}]; `story` makes what a row opens.

  const PAGE = 25;

  function explorer(node, rows, columns, facts) {
    let order = facts.order;
    let down = facts.down;
    let pageAt = 0;
    let open = null;
    const search = element("input", { type: "search", placeholder: facts.placeholder, "aria-label": facts.placeholder });
    const choice = element("select", { "aria-label": "Which of them" });
    facts.filters.forEach(([label], i) => choice.append(element("option", { value: i }, label)));
    const count = element("span", { class: "quiet", role: "status" });
    const head = element("tr");
    const body = element("tbody");
    const heads = columns.map((column, i) => {
      const button = element("button", { type: "button" }, column.label);
      const cell = element("th", { scope: "col", class: column.right ? "right" : "", title: column.title }, button);
      button.addEventListener("click", () => {
        down = order === i ? !down : Boolean(column.right);
        order = i;
        pageAt = 0;
        show();
      });
      head.append(cell);
      return cell;
    });
    const earlier = element("button", { type: "button", onclick: () => turn(-1) }, "Previous");
    const later = element("button", { type: "button", onclick: () => turn(1) }, "Next");
    const where = element("span", { class: "quiet" });
    node.append(
      element("div", { class: "controls" }, search, choice, count),
      element("div", { class: "scroll", tabindex: 0 }, element("table", { class: "rows" }, element("thead", {}, head), body)),
      element("div", { class: "controls" }, earlier, where, later),
    );
    search.addEventListener("input", restart);
    choice.addEventListener("change", restart);

    function restart() {
      pageAt = 0;
      show();
    }

    function turn(by) {
      pageAt += by;
      show();
    }

    function found() {
      const wanted = search.value.trim().toLowerCase();
      const keep = facts.filters[Number(choice.value) || 0][1];
      return rows.filter((row) => keep(row) && (!wanted || facts.text(row).toLowerCase().includes(wanted)));
    }

    function sorted(list) {
      const of = columns[order].value;
      const sign = down ? -1 : 1;
      return list.sort((a, b) => {
        const one = of(a);
        const two = of(b);
        if (one === two) return facts.tie(a, b);
        if (one === null) return 1;
        if (two === null) return -1;
        if (typeof one === typeof two) return one < two ? -sign : sign;
        return typeof one === "number" ? -sign : sign;
      });
    }

    function show() {
      const list = sorted(found());
      const pages = Math.max(Math.ceil(list.length / PAGE), 1);
      pageAt = Math.min(Math.max(pageAt, 0), pages - 1);
      heads.forEach((cell, i) => {
        if (i === order) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
        else cell.removeAttribute("aria-sort");
        cell.firstChild.textContent = columns[i].label + (i === order ? (down ? " ▾" : " ▴") : "");
      });
      body.replaceChildren();
      for (const row of list.slice(pageAt * PAGE, (pageAt + 1) * PAGE)) {
        const line = element("tr", { class: row === open ? "row open" : "row" });
        columns.forEach((column, i) => {
          const words = column.show ? column.show(column.value(row), row) : number(column.value(row));
          const cell = element("td", { class: i === 0 ? "id" : column.right ? "right" : "" });
          cell.append(i === 0 ? element("button", { type: "button", "aria-expanded": String(row === open) }, words) : words);
          line.append(cell);
        });
        line.addEventListener("click", () => {
          open = row === open ? null : row;
          show();
        });
        body.append(line);
        if (row === open) {
          body.append(element("tr", {}, element("td", { class: "story", colspan: columns.length }, element("div", {}, facts.story(row)))));
        }
      }
      count.textContent = `${number(list.length)} of ${number(rows.length)}`;
      where.textContent = `page ${number(pageAt + 1)} of ${number(pages)}`;
      earlier.disabled = pageAt === 0;
      later.disabled = pageAt === pages - 1;
    }
    show();
  }

  // Requests

  function requestRows(packed) {
    const columns = {};
    for (const [name, column] of Object.entries(packed.columns)) columns[name] = unpack(column, packed.num_rows);
    const names = Object.keys(columns);
    return Array.from({ length: packed.num_rows }, (_, i) => {
      const row = {};
      for (const name of names) row[name] = columns[name][i];
      row.id = row.id === null ? `r${row.request}` : row.id;
      row.status = packed.statuses[row.status];
      return row;
    });
  }

  function withinLimits(row) {
    if (row.status !== "finished") return false;
    const { ttft_ms, tpot_ms, e2el_ms } = data.slo;
    const keeps = (value, limit) => limit === null || value === null || value <= limit;
    return keeps(ms(row.first_token_us), ttft_ms) && keeps(row.tpot_ms, tpot_ms) && keeps(ms(row.finish_us), e2el_ms);
  }

  function requestExplorer(requests, states) {
    const limited = Object.values(data.slo).some((one) => one !== null);
    const filters = [
      ["all requests", () => true],
      ["preempted", (row) => row.num_preemptions > 0],
      ["found in the prefix cache", (row) => row.prefix_hit_tokens > 0],
    ];
    if (limited) filters.push(["beyond a limit", (row) => !withinLimits(row)]);
    for (const status of ["finished", "aborted", "unfinished"]) {
      if (requests.some((row) => row.status === status)) filters.push([status, (row) => row.status === status]);
    }
    const right = true;
    const inMs = (value) => number(value);
    const acceptance = (row) => (row.num_draft_tokens ? row.num_accepted_tokens / row.num_draft_tokens : null);
    const columns = [
      { label: "request", value: (row) => row.request, show: (value, row) => row.id },
      { label: "status", value: (row) => row.status, show: (value) => value },
      { label: "arrival (s)", value: (row) => row.arrival_us / 1e6, show: (value) => number(value, 5), right },
      { label: "prompt", value: (row) => row.num_prompt_tokens, right, title: "tokens" },
      { label: "output", value: (row) => row.num_output_tokens, right, title: "tokens delivered" },
      { label: "wait (ms)", value: (row) => ms(row.first_scheduled_us), show: inMs, right, title: "from arrival to the first schedule" },
      { label: "TTFT (ms)", value: (row) => ms(row.first_token_us), show: inMs, right },
      { label: "TPOT (ms)", value: (row) => row.tpot_ms, show: inMs, right },
      { label: "end to end (s)", value: (row) => (row.finish_us === null ? null : row.finish_us / 1e6), show: inMs, right },
      { label: "preempted", value: (row) => row.num_preemptions, right, title: "times" },
      { label: "accepted", value: acceptance, show: (value) => percent(value, 0), right, title: "of its drafts" },
    ];
    explorer(place("requests"), requests, columns, {
      placeholder: "Search by id or conversation",
      order: 0,
      down: false,
      filters,
      tie: (a, b) => a.request - b.request,
      text: (row) => `${row.id} ${row.status}` + (row.conversation === null ? "" : ` conversation ${row.conversation}`),
      story: (row) => requestStory(row, states),
    });
  }

  function requestStory(row, states) {
    const spans = (data.again && data.again.preemptions[String(row.request)]) || [];
    const events = [[row.arrival_us, `arrives with ${number(row.num_prompt_tokens)} tokens of prompt${surroundings(row.arrival_us, states)}`]];
    const at = (offset) => (offset === null ? null : row.arrival_us + offset);
    const scheduled = at(row.first_scheduled_us);
    const token = at(row.first_token_us);
    const end = at(row.finish_us);
    if (scheduled !== null) {
      const hit = row.prefix_hit_tokens ? `; ${number(row.prefix_hit_tokens)} tokens are found in the prefix cache` : "";
      events.push([scheduled, `is scheduled for the first time after ${duration(row.first_scheduled_us)}${hit}`]);
    }
    for (const [from, to] of spans) {
      events.push([from, "is preempted, and its blocks are freed"]);
      if (to !== null) events.push([to, `is admitted again after ${duration(to - from)}`]);
    }
    if (token !== null) events.push([token, `has its first token, ${duration(row.first_token_us)} after it arrived`]);
    if (end !== null) {
      events.push([end, `${row.status === "aborted" ? "is aborted" : "ends"} with ${number(row.num_output_tokens)} tokens of output, ${duration(row.finish_us)} after it arrived`]);
    }
    events.sort((a, b) => a[0] - b[0]);
    const list = element("ol");
    for (const [time, words] of events) list.append(element("li", {}, `${seconds(time)}: ${words}`));
    const said = [];
    if (row.num_drafts) {
      said.push(
        `${number(row.num_drafts)} verifications of ${number(row.num_draft_tokens)} drafts accepted ${number(row.num_accepted_tokens)} ` +
          `(${percent(row.num_accepted_tokens / row.num_draft_tokens)}): ${number(1 + row.num_accepted_tokens / row.num_drafts)} tokens a verification.`,
      );
    }
    if (row.itl_mean_ms !== null) {
      said.push(`Its ${number(row.num_deliveries)} deliveries were ${number(row.itl_mean_ms)} ms apart on average, ${number(row.itl_max_ms)} ms at most.`);
    }
    if (row.num_preemptions) said.push(`${number(row.num_preemptions)} preemptions made ${number(row.recomputed_tokens)} of its tokens be computed again.`);
    if (row.num_discarded_tokens || row.num_trimmed_tokens) {
      said.push(`${number(row.num_discarded_tokens)} sampled tokens were dropped as stale, ${number(row.num_trimmed_tokens)} lay beyond its end.`);
    }
    if (row.held_block_s !== null) {
      said.push(
        `Room: ${number(row.held_block_s)} block-seconds held, ${number(row.placeholder_slot_s)} slot-seconds of placeholders, ` +
          `${number(row.garbage_slot_s)} of garbage in memory.`,
      );
    }
    if (row.conversation !== null) said.push(`Turn ${row.turn} of conversation ${row.conversation}.`);
    const story = document.createDocumentFragment();
    story.append(element("strong", {}, `${row.id}, ${row.status}`), life(row, spans, scheduled, token, end), list);
    if (said.length) story.append(element("p", {}, said.join(" ")));
    story.append(element("p", { class: "quiet" }, "Slot by slot: ", element("code", {}, `speckv explain results/${data.folder} --request ${row.id}`)));
    return story;
  }

  // A bar from arrival to end: waiting, up to the first token, after it, preempted.
  function life(row, spans, scheduled, token, end) {
    const made = element("div", { class: "life", role: "img" });
    const stop = end === null ? Math.max(data.duration_s * 1e6, row.arrival_us) : end;
    const cuts = [row.arrival_us, scheduled, token, stop, ...spans.flat()].filter((one) => one !== null && one <= stop);
    const points = [...new Set(cuts)].sort((a, b) => a - b);
    const colours = { waiting: "#BBBBBB", "to the first token": "#56B4E9", "after it": "#0072B2", preempted: "#D55E00" };
    const sums = {};
    for (let i = 0; i < points.length - 1; i++) {
      const middle = (points[i] + points[i + 1]) / 2;
      const out = spans.some(([from, to]) => middle >= from && (to === null || middle < to));
      const kind = out ? "preempted" : scheduled === null || middle < scheduled ? "waiting" : token === null || middle < token ? "to the first token" : "after it";
      sums[kind] = (sums[kind] || 0) + points[i + 1] - points[i];
      const words = `${kind}: ${duration(points[i + 1] - points[i])}`;
      made.append(element("i", { title: words, style: { flex: `${points[i + 1] - points[i]} 0 0`, background: colours[kind] } }));
    }
    made.setAttribute("aria-label", Object.entries(sums).map(([kind, us]) => `${kind} ${duration(us)}`).join(", "));
    const keys = element("div", { class: "readout" });
    for (const [kind, us] of Object.entries(sums)) {
      keys.append(element("span", { class: "key" }, element("i", { class: "swatch", style: { background: colours[kind] } }), `${kind} ${duration(us)}`));
    }
    const both = document.createDocumentFragment();
    both.append(made, keys);
    return both;
  }

  function surroundings(us, states) {
    if (!states) return "";
    const edges = data.steps.edges_s;
    let bin = edges.findIndex((edge) => edge > us / 1e6) - 1;
    if (bin < 0) bin = us / 1e6 < edges[0] ? 0 : edges.length - 2;
    return `; ${number(states.num_running[bin], 3)} are running and ${number(states.num_waiting[bin], 3)} waiting`;
  }

  function runPage() {
    const states = data.steps ? overTime(data.steps) : null;
    if (data.again) blockPicture(data.again.blocks);
    if (data.requests) {
      const requests = requestRows(data.requests);
      latencyPicture(requests);
      requestExplorer(requests, states);
    }
  }

  // Sweeps

  const LINES = ["#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#999999"];
  const SEQUENCE = ["#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838"];
  const WORSE_BETTER = ["#d55e00", "#f0b48a", "#f7f7f7", "#8fc1de", "#0072b2"];
  const MOST_LEVELS = 14;
  const K_KEY = "engine.speculative_config.num_speculative_tokens";

  const tail = (key) => key.slice(key.lastIndexOf(".") + 1);
  const named = (value) => (value === null ? "null" : typeof value === "number" ? number(value) : String(value));

  function inOrder(values) {
    const rank = (value) => (value === null ? 0 : typeof value === "number" ? 1 : 2);
    return [...new Set(values)].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : a > b ? 1 : 0));
  }

  function levelsOf(values) {
    const distinct = inOrder(values);
    if (distinct.length <= MOST_LEVELS || distinct.some((one) => typeof one !== "number")) {
      return distinct.map((one) => ({ label: named(one), middle: one, has: (value) => value === one }));
    }
    const bins = 8;
    const edges = Array.from({ length: bins + 1 }, (_, i) => quantile(distinct, i / bins));
    return Array.from({ length: bins }, (_, i) => ({
      label: `${number(edges[i], 3)} – ${number(edges[i + 1], 3)}`,
      middle: (edges[i] + edges[i + 1]) / 2,
      binned: true,
      has: (value) => value >= edges[i] && (i === bins - 1 ? value <= edges[bins] : value < edges[i + 1]),
    }));
  }

  const meanOf = (values) => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null);

  function sweepPage() {
    const size = data.num_rows;
    const axes = data.axes.map((one) => {
      const values = unpack(one.values, size);
      const levels = levelsOf(values);
      return { key: one.key, name: one.key === K_KEY ? "K" : tail(one.key), values, levels, binned: levels.some((level) => level.binned) };
    });
    const names = axes.map((one) => one.name);
    for (const one of axes) if (names.filter((name) => name === one.name).length > 1) one.name = one.key;
    const figures = data.figures.map((one) => ({ ...one, values: unpack(one.values, size) }));
    const points = pointsOf(axes, figures, size);
    const usable = figures.filter((one) => one.values.some((value) => typeof value === "number"));
    if (usable.length) {
      mapPicture(axes, usable, points);
      paretoPicture(axes, usable, points);
    }
    pointExplorer(axes, figures, usable, points);
  }

  function pointsOf(axes, figures, size) {
    const point = unpack(data.point, size);
    const seed = unpack(data.seed, size);
    const status = unpack(data.status, size);
    const error = unpack(data.error, size);
    const made = new Map();
    for (let i = 0; i < size; i++) {
      if (!made.has(point[i])) made.set(point[i], { point: point[i], at: axes.map((one) => one.values[i]), rows: [], runs: [], figures: new Map() });
      const one = made.get(point[i]);
      one.runs.push({ seed: seed[i], status: status[i], error: error[i] });
      if (status[i] === "ok") one.rows.push(i);
    }
    const all = [...made.values()].sort((a, b) => a.point - b.point);
    for (const one of all) {
      for (const figure of figures) {
        const values = one.rows.map((i) => figure.values[i]).filter((value) => value !== null);
        one.figures.set(figure.name, { mean: meanOf(values), low: values.length ? Math.min(...values) : null, high: values.length ? Math.max(...values) : null, count: values.length });
      }
    }
    return all;
  }

  function select(label, options, chosen, change) {
    const made = element("select", { "aria-label": label });
    options.forEach(([value, words]) => made.append(element("option", { value, selected: value === chosen }, words)));
    made.addEventListener("change", () => change(made.value));
    return element("label", {}, label, made);
  }

  // Choices for the axes that a picture does not show: one value each, or all of them.
  function fixers(axes, shown, fixed, change) {
    return axes.flatMap((one, i) => {
      if (shown.includes(i)) {
        fixed.delete(i);
        return [];
      }
      const options = [["", "all"], ...one.levels.map((level, j) => [String(j), level.label])];
      return [
        select(one.name, options, fixed.has(i) ? String(fixed.get(i)) : "", (value) => {
          if (value === "") fixed.delete(i);
          else fixed.set(i, Number(value));
          change();
        }),
      ];
    });
  }

  const isAt = (one, axes, fixed) => [...fixed].every(([i, j]) => axes[i].levels[j].has(one.at[i]));

  const figureOptions = (figures) => figures.map((one) => [one.name, one.unit ? `${one.name} (${one.unit})` : one.name]);

  function mapPicture(axes, figures, points) {
    const node = place("map");
    const find = (key) => axes.findIndex((one) => one.key === key);
    const state = {
      rows: Math.max(find(data.rows_axis), 0),
      columns: find(data.columns_axis),
      figure: (figures.find((one) => one.name === "request_goodput") || figures[0]).name,
      relative: false,
      fixed: new Map(),
    };
    const controls = element("div", { class: "controls" });
    const others = element("div", { class: "controls" });
    const words = element("p", { class: "quiet" });
    const box = element("div", { class: "scroll", tabindex: 0 });
    const detail = element("p", { class: "detail hover", role: "status" }, "Point at a cell, or tap it.");
    node.append(controls, others, words, box, detail);
    const list = axes.map((one, i) => [String(i), one.name]);
    let lines = null;
    // A mean over different settings is rarely what is asked: other axes stand at their first value until told otherwise.
    // Of points that were drawn at random, or by Sobol, too few would be left.
    if (!axes.some((one) => one.binned)) axes.forEach((_, i) => state.fixed.set(i, 0));

    function build() {
      controls.replaceChildren(
        select("Figure", figureOptions(figures), state.figure, (value) => { state.figure = value; show(); }),
        select("Rows", list, String(state.rows), (value) => { state.rows = Number(value); if (state.columns === state.rows) state.columns = -1; build(); }),
        select("Columns", [["-1", "none"], ...list.filter(([i]) => Number(i) !== state.rows)], String(state.columns), (value) => { state.columns = Number(value); build(); }),
        select("As", [["value", "value"], ["relative", `difference to ${axes[state.rows].name} = ${axes[state.rows].levels[0].label}`]], state.relative ? "relative" : "value", (value) => { state.relative = value === "relative"; show(); }),
      );
      others.replaceChildren(...fixers(axes, [state.rows, state.columns], state.fixed, show));
      show();
    }

    function cells() {
      const rowAxis = axes[state.rows];
      const columnLevels = state.columns < 0 ? [{ label: "all", middle: null, has: () => true }] : axes[state.columns].levels;
      const kept = points.filter((one) => isAt(one, axes, state.fixed));
      return rowAxis.levels.map((row) =>
        columnLevels.map((column) => {
          const inside = kept.filter((one) => row.has(one.at[state.rows]) && (state.columns < 0 || column.has(one.at[state.columns])));
          const found = inside.map((one) => one.figures.get(state.figure)).filter((one) => one.mean !== null);
          return {
            row,
            column,
            points: inside,
            mean: meanOf(found.map((one) => one.mean)),
            low: found.length ? Math.min(...found.map((one) => one.low)) : null,
            high: found.length ? Math.max(...found.map((one) => one.high)) : null,
            runs: found.reduce((sum, one) => sum + one.count, 0),
            failed: inside.reduce((sum, one) => sum + one.runs.filter((run) => run.status !== "ok").length, 0),
          };
        }),
      );
    }

    function show() {
      const figure = figures.find((one) => one.name === state.figure);
      const grid = cells();
      const base = grid[0];
      for (const row of grid) row.forEach((cell, i) => (cell.relative = cell.mean === null || !base[i].mean ? null : cell.mean / base[i].mean - 1));
      const best = bestOf(grid, figure.better);
      const all = grid.flat().map((cell) => (state.relative ? cell.relative : cell.mean)).filter((one) => one !== null);
      const least = Math.min(...all);
      const most = Math.max(...all);
      const reach = Math.max(...all.map(Math.abs), 1e-9);
      const better = figure.better === "less" ? -1 : 1;
      const colour = (value) => {
        if (state.relative) return between(WORSE_BETTER, 0.5 + (better * value) / reach / 2);
        return between(SEQUENCE, most > least ? (value - least) / (most - least) : 0.5);
      };
      const rowAxis = axes[state.rows];
      const head = element("tr", {}, element("th", { scope: "col" }, state.columns < 0 ? rowAxis.name : `${rowAxis.name} ↓ ${axes[state.columns].name} →`));
      for (const cell of grid[0]) head.append(element("th", { scope: "col" }, cell.column.label));
      const body = element("tbody");
      for (const row of grid) {
        const line = element("tr", {}, element("th", { scope: "row" }, row[0].row.label));
        row.forEach((cell, i) => {
          const value = state.relative ? cell.relative : cell.mean;
          const text = value === null ? (cell.failed ? "failed" : "–") : state.relative ? `${value >= 0 ? "+" : "−"}${percent(Math.abs(value))}` : number(value, 3);
          const mark = value !== null && cell.failed ? " *" : "";
          const button = element("button", { type: "button", class: (value === null ? "none" : "") + (best[i] === cell ? " best" : "") }, text + mark);
          if (value !== null) {
            const [r, g, b] = colour(value);
            button.style.background = `rgb(${r}, ${g}, ${b})`;
            button.style.color = luminance([r, g, b]) > 0.179 ? "#000000" : "#ffffff";
          }
          const say = () => (detail.textContent = cellWords(cell, figure));
          for (const event of ["mouseenter", "focus", "click"]) button.addEventListener(event, say);
          line.append(element("td", {}, button));
        });
        body.append(line);
      }
      box.replaceChildren(element("table", { class: "heat" }, element("thead", {}, head), body));
      const seeds = new Set(points.flatMap((one) => one.runs.map((run) => run.seed))).size;
      const open = axes.filter((_, i) => i !== state.rows && i !== state.columns && !state.fixed.has(i)).map((one) => one.name);
      words.textContent =
        `${figure.label}${figure.unit ? ` (${figure.unit})` : ""}${figure.text ? `: ${figure.text}` : ""}. Mean over ${seeds === 1 ? "one seed" : `${seeds} seeds`}` +
        `${open.length ? ` and over ${open.join(", ")}` : ""}.` + (figure.better ? ` A frame marks the best of each column (${figure.better} is better).` : "") +
        (grid.flat().some((cell) => cell.mean !== null && cell.failed) ? " * Runs failed, so this is a mean of fewer." : "");
      answer(grid, best, figure);
      drawLines(grid, figure);
    }

    function bestOf(grid, better) {
      return grid[0].map((_, i) => {
        if (!better) return null;
        const column = grid.map((row) => row[i]).filter((cell) => cell.mean !== null && !cell.failed);
        const sign = better === "less" ? -1 : 1;
        return column.length > 1 ? column.reduce((a, b) => (sign * b.mean > sign * a.mean ? b : a)) : null;
      });
    }

    function cellWords(cell, figure) {
      const at = [`${axes[state.rows].name} ${cell.row.label}`];
      if (state.columns >= 0) at.push(`${axes[state.columns].name} ${cell.column.label}`);
      if (cell.mean === null) {
        const errors = cell.points.flatMap((one) => one.runs.map((run) => run.error)).filter((one) => one);
        return `${at.join(", ")}: no figure${cell.failed ? `; ${cell.failed} runs failed` : ""}${errors.length ? `: ${errors[0]}` : ""}`;
      }
      const relative = cell.relative === null ? "" : `; ${cell.relative >= 0 ? "+" : "−"}${percent(Math.abs(cell.relative))} to ${axes[state.rows].name} ${axes[state.rows].levels[0].label}`;
      return `${at.join(", ")}: ${figure.name} ${number(cell.mean)} ${figure.unit} (${number(cell.low)} to ${number(cell.high)} in ${cell.runs} runs)${relative}${cell.failed ? `; ${cell.failed} runs failed` : ""}`;
    }

    function answer(grid, best, figure) {
      const said = place("answer");
      said.replaceChildren();
      if (!figure.better || !best.some((one) => one)) return;
      const name = axes[state.rows].name;
      const list = element("ul");
      const groups = [];
      best.forEach((cell, i) => {
        if (!cell) return;
        const last = groups[groups.length - 1];
        if (last && last.row === cell.row && last.to === i - 1) last.to = i;
        else groups.push({ row: cell.row, from: i, to: i, cell });
      });
      for (const { row, from, to, cell } of groups) {
        const labels = grid[0].map((one) => one.column.label);
        const where = state.columns < 0 ? "" : ` at ${axes[state.columns].name} ${labels[from]}${to > from ? ` to ${labels[to]}` : ""}`;
        const gains = best.slice(from, to + 1).map((one) => one.relative).filter((one) => one !== null);
        const far = gains.length && row !== grid[0][0].row ? `, by up to ${percent(Math.max(...gains.map(Math.abs)))} to ${name} = ${grid[0][0].row.label}` : "";
        const value = from === to ? ` (${number(cell.mean)} ${figure.unit})` : "";
        const fixed = [...state.fixed].map(([i, j]) => `${axes[i].name} ${axes[i].levels[j].label}`);
        const given = fixed.length ? ` (with ${fixed.join(", ")})` : "";
        list.append(element("li", {}, `Best ${figure.name}${where}${given}: ${name} = ${row.label}${value}${far}.`));
      }
      said.append(list);
    }

    function drawLines(grid, figure) {
      const target = place("lines");
      if (lines) {
        plots.splice(plots.findIndex((one) => one.made === lines.made), 1);
        lines.made.destroy();
        lines.box.remove();
        lines = null;
      }
      target.hidden = state.columns < 0 || grid[0].length < 2;
      if (target.hidden) return;
      const columnAxis = axes[state.columns];
      const numeric = grid[0].every((cell) => typeof cell.column.middle === "number");
      const x = grid[0].map((cell, i) => (numeric ? cell.column.middle : i));
      const log = numeric && x[0] > 0 && x[x.length - 1] / x[0] >= 8;
      const box = element("div");
      target.append(box);
      const readout = element("div", { class: "readout" });
      const at = element("span", { class: "at" });
      readout.append(at);
      const values = grid.map((row, i) => {
        const cell = element("span");
        readout.append(element("span", { class: "key" }, swatch(LINES[i % LINES.length], true), `${axes[state.rows].name} ${row[0].row.label} `, cell));
        return cell;
      });
      const read = (plot) => {
        const i = plot.cursor.idx;
        const known = i !== null && i !== undefined && plot.cursor.left >= 0;
        at.textContent = known ? `${columnAxis.name} ${grid[0][i].column.label}` : "";
        grid.forEach((row, j) => (values[j].textContent = known ? number(row[i].mean) : ""));
      };
      const made = plot(
        box,
        {
          height: 280,
          scales: { x: { time: false, distr: log ? 3 : 1 }, y: { range: (plot, low, high) => [low > 0 ? 0 : low, high > 0 ? high * 1.06 : 1] } },
          axes: [
            axis(columnAxis.name, {
              splits: numeric && !log ? undefined : () => x,
              filter: (plot, splits) => splits,
              values: (plot, splits) => splits.map((one) => (one === null ? "" : numeric ? number(one, 3) : grid[0][Math.round(one)] ? grid[0][Math.round(one)].column.label : "")),
            }),
            tall(figure.unit ? `${figure.label} (${figure.unit})` : figure.label),
          ],
          series: [
            {},
            ...grid.map((row, i) => ({
              stroke: () => coloured(LINES[i % LINES.length]),
              width: 2,
              dash: i >= LINES.length ? [6, 4] : undefined,
              spanGaps: true,
              points: { show: true, size: 7, fill: () => coloured(LINES[i % LINES.length]) },
            })),
          ],
          cursor: { y: false, drag: { x: false, y: false } },
          hooks: { setCursor: [read] },
        },
        [x, ...grid.map((row) => row.map((cell) => cell.mean))],
      );
      box.append(readout);
      lines = { made, box };
    }

    build();
  }

  function paretoPicture(axes, figures, points) {
    const node = place("pareto");
    const judged = figures.filter((one) => one.better);
    if (judged.length < 2) {
      node.append(element("p", { class: "quiet" }, "There are no two figures to weigh against each other."));
      return;
    }
    const pick = (name, other) => (judged.find((one) => one.name === name) || judged.find((one) => one.name !== other)).name;
    const state = { y: pick("output_throughput", ""), x: "", colour: Math.max(axes.findIndex((one) => one.key === data.rows_axis), 0) };
    state.x = pick("tpot_ms_mean", state.y);
    const controls = element("div", { class: "controls" });
    const others = element("div", { class: "controls" });
    const fixed = new Map();
    const box = element("div");
    const detail = element("p", { class: "detail hover", role: "status" });
    node.append(controls, others, box, detail);
    let made = null;
    const options = figureOptions(judged);
    const limits = () => others.replaceChildren(...fixers(axes, [state.colour], fixed, show));
    controls.append(
      select("Across", options, state.x, (value) => { state.x = value; show(); }),
      select("Up", options, state.y, (value) => { state.y = value; show(); }),
    );
    if (axes.length > 1) controls.append(select("Colour", axes.map((one, i) => [String(i), one.name]), String(state.colour), (value) => { state.colour = Number(value); limits(); show(); }));
    limits();

    function show() {
      if (made) {
        plots.splice(plots.findIndex((one) => one.made === made), 1);
        made.destroy();
        box.replaceChildren();
      }
      const across = judged.find((one) => one.name === state.x);
      const up = judged.find((one) => one.name === state.y);
      const list = points
        .filter((one) => isAt(one, axes, fixed))
        .map((one) => ({ one, x: one.figures.get(across.name).mean, y: one.figures.get(up.name).mean }))
        .filter((one) => one.x !== null && one.y !== null)
        .sort((a, b) => a.x - b.x || a.y - b.y);
      const front = frontOf(list, across.better === "less" ? -1 : 1, up.better === "less" ? -1 : 1);
      const axisOf = axes[state.colour];
      const levels = axisOf ? axisOf.levels : [{ label: "all", has: () => true }];
      const level = (one) => (axisOf ? levels.findIndex((any) => any.has(one.at[state.colour])) : 0);
      detail.textContent = `${front.size} of ${list.length} points lie on the front. Point at one, or tap it.`;
      const colour = (i) => coloured(LINES[i % LINES.length]);
      made = plot(
        box,
        {
          height: 340,
          scales: { x: { time: false, range: roomy }, y: { range: roomy } },
          axes: [axis(`${across.name} (${across.unit}), ${across.better} is better`, { values: (plot, splits) => splits.map((one) => (one === null ? "" : number(one))) }), tall(`${up.name}, ${up.better} is better`)],
          series: [
            {},
            { stroke: () => shade().ink, width: 1.5, dash: [4, 3], spanGaps: true, points: { show: true, size: 13, fill: "transparent", stroke: () => shade().ink } },
            ...levels.map((_, i) => ({ stroke: () => colour(i), paths: () => null, points: { show: true, size: 8, fill: () => colour(i), stroke: () => colour(i) } })),
          ],
          cursor: { drag: { x: false, y: false }, points: { show: false } },
          hooks: { setCursor: [(plot) => point(plot, list, front, across, up)] },
        },
        [list.map((one) => one.x), list.map((one) => (front.has(one) ? one.y : null)), ...levels.map((_, i) => list.map((one) => (level(one.one) === i ? one.y : null)))],
      );
      const keys = element("div", { class: "readout" });
      levels.forEach((one, i) => keys.append(element("span", { class: "key" }, swatch(LINES[i % LINES.length]), axisOf ? `${axisOf.name} ${one.label}` : "points")));
      box.append(keys);
    }

    const roomy = (plot, low, high) => {
      const margin = (high - low || Math.abs(high) || 1) * 0.07;
      return [low - margin, high + margin];
    };

    function point(plot, list, front, across, up) {
      const { left, top } = plot.cursor;
      if (left === null || left < 0) return;
      let best = null;
      let least = 40 * 40;
      for (const one of list) {
        const far = (plot.valToPos(one.x, "x") - left) ** 2 + (plot.valToPos(one.y, "y") - top) ** 2;
        if (far < least) {
          least = far;
          best = one;
        }
      }
      if (!best) return;
      const at = axes.map((one, i) => `${one.name} ${named(best.one.at[i])}`).join(", ");
      detail.textContent = `point ${best.one.point} (${at}): ${across.name} ${number(best.x)} ${across.unit}, ${up.name} ${number(best.y)} ${up.unit}${front.has(best) ? "; on the front" : ""}`;
    }

    show();
  }

  // Points of which no other is at least as good in both figures and better in one; signs say which way is better.
  function frontOf(list, signX, signY) {
    const byGain = [...list].sort((a, b) => signX * (b.x - a.x) || signY * (b.y - a.y));
    const front = new Set();
    let best = -Infinity;
    let lastX = null;
    for (const one of byGain) {
      const gain = signY * one.y;
      if (gain > best) {
        front.add(one);
        best = gain;
        lastX = one.x;
      } else if (gain === best && one.x === lastX) front.add(one);
    }
    return front;
  }

  function pointExplorer(axes, figures, usable, points) {
    const main = usable.slice(0, 7);
    const right = true;
    const failed = (one) => one.runs.some((run) => run.status !== "ok");
    const columns = [
      { label: "point", value: (one) => one.point, show: (value) => String(value) },
      ...axes.map((axis, i) => ({ label: axis.name, value: (one) => one.at[i], show: named, right: axis.values.every((value) => typeof value !== "string") })),
      { label: "runs", value: (one) => one.rows.length, show: (value, one) => `${value}\u00a0of\u00a0${one.runs.length}`, right },
      ...main.map((figure) => ({ label: figure.name, value: (one) => one.figures.get(figure.name).mean, show: (value) => number(value), right, title: figure.text })),
    ];
    const filters = [["all points", () => true]];
    if (points.some(failed)) filters.push(["with runs that failed", failed]);
    explorer(place("points"), points, columns, {
      placeholder: "Search by number, axis or status",
      order: 0,
      down: false,
      filters,
      tie: (a, b) => a.point - b.point,
      text: (one) => [one.point, ...axes.map((axis, i) => `${axis.name} ${named(one.at[i])}`), ...one.runs.map((run) => `${run.status} ${run.error || ""}`)].join(" "),
      story: (one) => {
        const story = document.createDocumentFragment();
        story.append(element("strong", {}, `Point ${one.point}: ${axes.map((axis, i) => `${axis.key} = ${named(one.at[i])}`).join(", ")}`));
        const list = element("ol", {});
        for (const run of one.runs) list.append(element("li", {}, `seed ${run.seed}: ${run.status}${run.error ? `: ${run.error}` : ""}`));
        story.append(list);
        const body = element("tbody");
        for (const figure of figures) {
          const found = one.figures.get(figure.name);
          if (found.mean === null) continue;
          body.append(element("tr", {}, element("td", {}, element("code", {}, figure.name)), element("td", { class: "right" }, `${number(found.mean)} ${figure.unit}`), element("td", { class: "right" }, `${number(found.low)} to ${number(found.high)}`)));
        }
        story.append(element("table", {}, element("thead", {}, element("tr", {}, element("th", {}, "figure"), element("th", {}, "mean"), element("th", {}, "over seeds"))), body));
        return story;
      },
    });
  }

  try {
    if (data.kind === "run") runPage();
    else sweepPage();
  } catch (error) {
    tell(error.message);
    throw error;
  }
  themed();
  root.setAttribute("data-ready", "");
})();
