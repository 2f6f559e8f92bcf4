"use strict";
(() => {
  const root = document.documentElement;
  const find = (id) => document.getElementById(id);
  const make = (tag, words = "", kind = "") => {
    const element = document.createElement(tag);
    element.textContent = words;
    if (kind) element.className = kind;
    return element;
  };

  // What the page holds. Large parts are decoded when they are first needed.
  const data = JSON.parse(find("data").textContent);
  const bytes = (id) => {
    const text = atob(find(id).textContent);
    const found = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) found[i] = text.charCodeAt(i);
    return found.buffer;
  };
  const once = (compute) => {
    let value;
    return () => (value ??= compute());
  };
  const count = data.names.length;
  const points = new Float32Array(bytes("points"));
  const columns = data.columns.map((column, i) => ({
    ...column,
    values: once(() => new (column.categories ? Uint16Array : Float32Array)(bytes(`column-${i}`))),
  }));
  const neighbours = data.neighbours.map((each, i) => ({
    ...each,
    indices: once(() => new Int32Array(bytes(`indices-${i}`))),
    values: once(() => new Float32Array(bytes(`values-${i}`))),
  }));
  const subnetworks = data.subnetworks && {
    ...data.subnetworks,
    highest: once(() => new Int32Array(bytes("highest-scores"))),
    scores: once(() => new Uint8Array(bytes("scores"))),
  };

  // Thumbnails, in sheets.
  const { side, across, each } = data.thumbnails;
  const sheets = [];
  const sheet = (number) => {
    if (!sheets[number]) {
      const image = new Image();
      image.onload = () => {
        image.ready = true;
        image.waiting.splice(0).forEach((done) => done());
        draw();
      };
      image.waiting = [];
      image.src = `data:image/jpeg;base64,${find(`sheet-${number}`).textContent}`;
      sheets[number] = image;
    }
    return sheets[number];
  };
  const paint = (context, index, x, y, size) => {
    const image = sheet(Math.floor(index / each));
    if (!image.ready) return false;
    const place = index % each;
    const left = (place % across) * side;
    const top = Math.floor(place / across) * side;
    context.drawImage(image, left, top, side, side, x, y, size, size);
    return true;
  };
  const picture = (index, size) => {
    const canvas = make("canvas");
    const sharp = Math.max(size, side);
    canvas.width = canvas.height = sharp;
    canvas.style.width = canvas.style.height = `${size}px`;
    const show = () => {
      const context = canvas.getContext("2d");
      context.imageSmoothingEnabled = side >= 48;
      paint(context, index, 0, 0, sharp);
    };
    const image = sheet(Math.floor(index / each));
    if (image.ready) show();
    else image.waiting.push(show);
    return canvas;
  };

  // Colours.
  const tone = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color; // a canvas does not know what a variable means
  };
  const probe = make("span");
  probe.hidden = true;
  document.body.append(probe);
  const PALETTE = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a7a00", "#7a5bd0",
    "#c0392b", "#2aa198", "#8c564b", "#e377c2", "#6c8a3b", "#5f7fa8", "#b8860b", "#a05195",
  ];
  const RAMP = ["#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725"];
  const mix = (share) => {
    const place = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1);
    const low = Math.min(Math.floor(place), RAMP.length - 2);
    const part = (text, at) => parseInt(text.slice(at, at + 2), 16);
    const rest = place - low;
    return `rgb(${[1, 3, 5].map((at) => Math.round((1 - rest) * part(RAMP[low], at) + rest * part(RAMP[low + 1], at)))})`;
  };
  const LEVELS = 32;
  const ramp = Array.from({ length: LEVELS }, (_, i) => mix(i / (LEVELS - 1)));
  let codes = new Uint16Array(count); // the colour of each image
  let colours = [];
  let order = new Uint32Array(count); // images, those of one colour together

  const sortByColour = () => {
    const starts = new Uint32Array(colours.length + 1);
    for (let i = 0; i < count; i++) starts[codes[i] + 1]++;
    for (let c = 0; c < colours.length; c++) starts[c + 1] += starts[c];
    for (let i = 0; i < count; i++) order[starts[codes[i]]++] = i;
  };
  const legend = find("legend");
  let only = -1; // the category that the legend singles out
  const colourBy = (choice) => {
    only = -1;
    legend.replaceChildren();
    if (choice.startsWith("subnetwork-")) {
      const place = Number(choice.slice(11));
      const scores = subnetworks.scores();
      const across = subnetworks.numbers.length;
      colours = ramp;
      for (let i = 0; i < count; i++) codes[i] = (scores[i * across + place] * (LEVELS - 1)) / 255;
      drawRamp(`score of subnetwork ${subnetworks.numbers[place]}`, "lowest", "highest");
    } else {
      const column = columns[Number(choice)];
      const values = column.values();
      if (column.categories) {
        colours = column.categories.map((_, i) => PALETTE[i % PALETTE.length]);
        if (column.none) colours[0] = tone("soft");
        codes.set(values);
        drawCategories(column);
      } else {
        let low = Infinity;
        let high = -Infinity;
        for (const value of values) {
          if (value < low) low = value;
          if (value > high) high = value;
        }
        colours = ramp;
        for (let i = 0; i < count; i++) codes[i] = Math.round(((values[i] - low) / (high - low || 1)) * (LEVELS - 1));
        drawRamp(column.title, low.toFixed(2), high.toFixed(2));
      }
    }
    sortByColour();
    applyFilter();
  };
  const drawRamp = (title, low, high) => {
    const bar = make("div", "", "ramp");
    bar.style.background = `linear-gradient(to right, ${RAMP})`;
    const ends = make("div", "", "ends");
    ends.append(make("span", low), make("span", high));
    legend.append(make("div", title), bar, ends);
  };
  const drawCategories = (column) => {
    const sizes = new Uint32Array(colours.length);
    for (let i = 0; i < count; i++) sizes[codes[i]]++;
    const largest = [...sizes.keys()].filter((i) => sizes[i]).sort((a, b) => sizes[b] - sizes[a]);
    legend.append(make("div", column.title));
    for (const category of largest.slice(0, 30)) {
      const button = make("button");
      const dot = make("i");
      dot.style.background = colours[category];
      button.append(dot, `${column.categories[category]} (${sizes[category].toLocaleString("en")})`);
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => {
        only = only === category ? -1 : category;
        for (const other of legend.querySelectorAll("button")) other.setAttribute("aria-pressed", "false");
        button.setAttribute("aria-pressed", String(only === category));
        applyFilter();
      });
      legend.append(button);
    }
    if (largest.length > 30) legend.append(make("div", `and ${largest.length - 30} more`, "soft"));
  };

  // The filter.
  const shown = new Uint8Array(count).fill(1);
  const texts = once(() => {
    const named = columns.filter((column) => column.categories);
    return data.names.map((name, i) => [name, ...named.map((c) => c.categories[c.values()[i]])].join("\n").toLowerCase());
  });
  const applyFilter = () => {
    const words = find("filter").value.trim().toLowerCase();
    for (let i = 0; i < count; i++) {
      shown[i] = (!words || texts()[i].includes(words)) && (only < 0 || codes[i] === only) ? 1 : 0;
    }
    draw();
  };

  // The map: x and y are of the data; the view turns them into pixels.
  const canvas = find("map");
  const context = canvas.getContext("2d");
  const view = { scale: 1, x: 0, y: 0, width: 0, height: 0 };
  let [left, right, top, bottom] = [Infinity, -Infinity, Infinity, -Infinity];
  for (let i = 0; i < count; i++) {
    left = Math.min(left, points[2 * i]);
    right = Math.max(right, points[2 * i]);
    top = Math.min(top, points[2 * i + 1]);
    bottom = Math.max(bottom, points[2 * i + 1]);
  }
  const onScreen = (index) => [view.scale * points[2 * index] + view.x, view.scale * points[2 * index + 1] + view.y];
  const MOST_PICTURES = 800;
  const SMALLEST_PICTURE = 18;
  // The side of a picture where so many are in sight; 0 where dots are drawn.
  const pictureSide = (number) => {
    const room = 0.7 * Math.sqrt((view.width * view.height) / Math.max(number, 1));
    return number <= MOST_PICTURES && room >= SMALLEST_PICTURE ? Math.min(72, room) : 0;
  };
  const wholeScale = () => {
    const edge = pictureSide(count); // half a picture at each side, so that all are whole
    return 0.92 * Math.min((view.width - edge) / (right - left || 1), (view.height - edge) / (bottom - top || 1));
  };
  let fitted = true; // until the user moves or zooms
  const fit = () => {
    fitted = true;
    view.scale = wholeScale();
    view.x = view.width / 2 - (view.scale * (left + right)) / 2;
    view.y = view.height / 2 - (view.scale * (top + bottom)) / 2;
    placeLegend();
    draw();
  };
  const placeLegend = () => {
    // In the corner where it covers the fewest images of the whole map.
    const [width, height] = [legend.offsetWidth + 20, legend.offsetHeight + 20];
    const covered = [0, 0, 0, 0];
    for (let i = 0; i < count; i++) {
      const [x, y] = onScreen(i);
      const atRight = x > view.width - width;
      if (x >= width && !atRight) continue;
      if (y > view.height - height) covered[atRight ? 1 : 0]++;
      if (y < height) covered[atRight ? 3 : 2]++;
    }
    const corner = covered.indexOf(Math.min(...covered));
    Object.assign(legend.style, { left: "auto", right: "auto", top: "auto", bottom: "auto" });
    legend.style[corner % 2 ? "right" : "left"] = "10px";
    legend.style[corner < 2 ? "bottom" : "top"] = "10px";
  };
  const resize = () => {
    const box = canvas.getBoundingClientRect();
    const density = window.devicePixelRatio || 1;
    Object.assign(view, { width: box.width, height: box.height });
    canvas.width = Math.round(box.width * density);
    canvas.height = Math.round(box.height * density);
    if (fitted) fit();
    // The new size has emptied the canvas, and the map would flicker if it waited for the next frame.
    if (view.width) drawNow();
  };

  // All images are gone through: of 50,000 this takes less than a millisecond.
  const within = (x0, y0, x1, y1, visit) => {
    for (let i = 0; i < count; i++) {
      const x = points[2 * i];
      const y = points[2 * i + 1];
      if (shown[i] && x >= x0 && x <= x1 && y >= y0 && y <= y1) visit(i, x, y);
    }
  };
  const toMap = (px, py) => [(px - view.x) / view.scale, (py - view.y) / view.scale];
  const at = (px, py) => {
    const reach = (drawnSize ? drawnSize / 2 : 9) / view.scale;
    const [x, y] = toMap(px, py);
    let best = -1;
    let least = Infinity;
    within(x - reach, y - reach, x + reach, y + reach, (i, imageX, imageY) => {
      const distance = (imageX - x) ** 2 + (imageY - y) ** 2;
      if (distance < least) [best, least] = [i, distance];
    });
    return best;
  };

  // Drawing.
  let current = -1; // the image that was clicked
  let hovered = -1;
  let drawnSize = 0; // of pictures, 0 where dots are drawn
  let lassoed = []; // corners, in pixels, while one is drawn
  const chosen = new Uint8Array(count);
  let numChosen = 0;
  let asked = false;
  const draw = () => {
    if (asked || !view.width) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      drawNow();
    });
  };
  const ring = (index, colour, radius) => {
    if (index < 0) return;
    context.strokeStyle = colour;
    context.lineWidth = 2.5;
    context.beginPath();
    context.arc(...onScreen(index), radius, 0, 7); // 7 is more than a whole turn
    context.stroke();
  };
  const drawNow = () => {
    const ink = tone("ink");
    const density = canvas.width / view.width;
    context.setTransform(density, 0, 0, density, 0, 0);
    context.clearRect(0, 0, view.width, view.height);
    const [x0, y0] = toMap(-8, -8);
    const [x1, y1] = toMap(view.width + 8, view.height + 8);
    const visible = [];
    within(x0, y0, x1, y1, (i) => {
      if (visible.length <= MOST_PICTURES) visible.push(i);
    });
    drawnSize = pictureSide(visible.length);
    if (drawnSize) drawPictures(visible);
    else drawDots(x0, y0, x1, y1);
    const radius = drawnSize ? 0.75 * drawnSize : 8;
    for (const { near } of nearShown) for (const i of near) ring(i, tone("soft"), radius - 2);
    ring(current, ink, radius);
    ring(hovered, tone("link"), radius);
    if (lassoed.length > 1) {
      context.strokeStyle = ink;
      context.lineWidth = 1.5;
      context.setLineDash([5, 4]);
      context.beginPath();
      lassoed.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
      context.stroke();
      context.setLineDash([]);
    }
    if (!canvas.dataset.drawn) performance.mark("drawn");
    canvas.dataset.drawn = String(Number(canvas.dataset.drawn || 0) + 1);
  };
  const drawDots = (x0, y0, x1, y1) => {
    const room = (view.scale ** 2 * (right - left) * (bottom - top)) / count; // of an image, in pixels
    const size = Math.max(2, Math.min(8, 0.45 * Math.sqrt(room)));
    for (const visible of [0, 1]) {
      context.globalAlpha = visible ? (numChosen ? 0.35 : 0.85) : 0.07;
      let colour = -1;
      for (let n = 0; n < count; n++) {
        const i = order[n];
        if (shown[i] !== visible || (visible && chosen[i])) continue;
        const [x, y] = [points[2 * i], points[2 * i + 1]];
        if (x < x0 || x > x1 || y < y0 || y > y1) continue;
        if (codes[i] !== colour) context.fillStyle = colours[(colour = codes[i])];
        context.fillRect(view.scale * x + view.x - size / 2, view.scale * y + view.y - size / 2, size, size);
      }
    }
    context.globalAlpha = 1;
    if (numChosen) {
      for (let n = 0; n < count; n++) {
        const i = order[n];
        if (!chosen[i]) continue;
        const [x, y] = onScreen(i);
        context.fillStyle = colours[codes[i]];
        context.fillRect(x - size, y - size, 2 * size, 2 * size);
      }
    }
  };
  const drawPictures = (visible) => {
    context.imageSmoothingEnabled = drawnSize < 2 * side;
    for (const i of visible) {
      const [x, y] = onScreen(i).map((middle) => middle - drawnSize / 2);
      context.globalAlpha = numChosen && !chosen[i] ? 0.35 : 1;
      context.fillStyle = colours[codes[i]];
      context.fillRect(x - 2, y - 2, drawnSize + 4, drawnSize + 4);
      paint(context, i, x, y, drawnSize);
    }
    context.globalAlpha = 1;
  };

  // Pointing, moving, zooming, selecting.
  const hint = find("hint");
  const labels = new Map(data.labels); // those of the user, by image
  const facts = (index) => [
    ...(labels.has(index) ? [["your label", labels.get(index)]] : []),
    ...columns.filter((c) => !(c.none && c.values()[index] === 0)).map((column) => {
      const value = column.values()[index];
      return [column.title, column.categories ? column.categories[value] : value.toFixed(3)];
    }),
  ];
  const hover = (index, px, py) => {
    if (index === hovered) {
      if (index < 0) return;
    } else {
      hovered = index;
      draw();
      hint.hidden = index < 0;
      if (index < 0) return;
      const about = facts(index).slice(0, 3).map(([title, value]) => make("div", `${title}: ${value}`, "soft"));
      hint.replaceChildren(picture(index, Math.max(96, side)), make("div", data.names[index]), ...about);
    }
    const flip = px > view.width / 2;
    hint.style.left = flip ? "auto" : `${px + 16}px`;
    hint.style.right = flip ? `${view.width - px + 16}px` : "auto";
    hint.style.top = py > view.height / 2 ? "auto" : `${py + 12}px`;
    hint.style.bottom = py > view.height / 2 ? `${view.height - py + 12}px` : "auto";
  };
  const zoom = (factor, px, py) => {
    const whole = wholeScale();
    const scale = Math.min(400 * whole, Math.max(0.5 * whole, view.scale * factor));
    view.x = px - ((px - view.x) * scale) / view.scale;
    view.y = py - ((py - view.y) * scale) / view.scale;
    view.scale = scale;
    fitted = false;
    draw();
  };
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const pressed = new Map(); // pointers that are down
  let moved = 0;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0016)), ...place(event));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pressed.set(event.pointerId, place(event));
    moved = 0;
    lassoed = selecting() || event.shiftKey ? [place(event)] : [];
  });
  canvas.addEventListener("pointermove", (event) => {
    const [px, py] = place(event);
    const before = pressed.get(event.pointerId);
    if (!before) {
      hover(at(px, py), px, py);
      return;
    }
    moved += Math.hypot(px - before[0], py - before[1]);
    if (pressed.size === 2) {
      const other = [...pressed].find(([id]) => id !== event.pointerId)[1];
      const distance = (p) => Math.hypot(p[0] - other[0], p[1] - other[1]);
      zoom(distance([px, py]) / (distance(before) || 1), (px + other[0]) / 2, (py + other[1]) / 2);
      lassoed = [];
    } else if (lassoed.length) {
      lassoed.push([px, py]);
      draw();
    } else {
      view.x += px - before[0];
      view.y += py - before[1];
      if (moved >= 5) fitted = false; // less is a click
      draw();
    }
    pressed.set(event.pointerId, [px, py]);
  });
  const release = (event) => {
    const before = pressed.get(event.pointerId);
    pressed.delete(event.pointerId);
    if (!before || event.type === "pointercancel") return;
    if (lassoed.length > 3 && moved > 10) selectInside(lassoed);
    else if (moved < 5) {
      const index = at(...place(event));
      if (index >= 0) open(index);
    }
    lassoed = [];
    draw();
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => hover(-1));
  const selecting = () => find("lasso").getAttribute("aria-pressed") === "true";
  find("lasso").addEventListener("click", () => find("lasso").setAttribute("aria-pressed", String(!selecting())));
  find("whole").addEventListener("click", fit);
  const selectInside = (corners) => {
    const shape = corners.map(([px, py]) => toMap(px, py));
    const xs = shape.map((p) => p[0]);
    const ys = shape.map((p) => p[1]);
    within(Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys), (i, x, y) => {
      let inside = false;
      for (let a = 0, b = shape.length - 1; a < shape.length; b = a++) {
        const [[ax, ay], [bx, by]] = [shape[a], shape[b]];
        if (ay > y !== by > y && x < ((bx - ax) * (y - ay)) / (by - ay) + ax) inside = !inside;
      }
      if (inside) chosen[i] = 1;
    });
    showSelection();
  };

  // The side: an image and its neighbours, subnetworks, the selection.
  const thumb = (index, words) => {
    const button = make("button");
    const image = picture(index, 56);
    image.style.width = "100%";
    image.style.height = "auto";
    button.append(image, words);
    button.title = [data.names[index], ...facts(index).map((fact) => fact.join(": "))].join("\n");
    button.dataset.index = String(index);
    button.addEventListener("click", () => open(index, true));
    return button;
  };
  const large = (index) => {
    if (!data.large.includes(index)) return null;
    const image = new Image();
    image.src = `data:image/jpeg;base64,${find(`large-${index}`).textContent}`;
    return image;
  };
  let nearShown = [];
  const open = (index, centre = false) => {
    current = index;
    const list = make("dl");
    for (const [title, value] of facts(index)) list.append(make("dt", title), make("dd", value));
    const words = make("div");
    words.append(make("div", data.names[index], "name"), list);
    find("about").replaceChildren(large(index) || picture(index, Math.max(112, side)), words);
    nearShown = neighbours.map((measure) => {
      const near = [...measure.indices().subarray(index * data.k, (index + 1) * data.k)];
      const values = measure.values().subarray(index * data.k, (index + 1) * data.k);
      return { title: measure.title, near, values };
    });
    find("near").replaceChildren(...nearShown.map(({ title, near, values }) => {
      const part = make("div");
      const grid = make("div", "", "thumbs");
      near.forEach((other, n) => {
        if (other >= 0) grid.append(thumb(other, values[n] !== 0 && Math.abs(values[n]) < 0.001 ? values[n].toExponential(0) : values[n].toFixed(3)));
      });
      part.append(make("h2", title), grid);
      return part;
    }));
    if (centre) {
      const [px, py] = onScreen(index);
      if (px < 0 || py < 0 || px > view.width || py > view.height) {
        view.x += view.width / 2 - px;
        view.y += view.height / 2 - py;
      }
    }
    showLabels();
    draw();
  };
  if (subnetworks) {
    find("subnetworks").hidden = false;
    const menu = find("subnetwork");
    subnetworks.numbers.forEach((number, i) => menu.append(new Option(`${number} (wins ${subnetworks.wins[i].toLocaleString("en")})`, String(i))));
    const show = () => {
      const place = Number(menu.value);
      const { each: most } = subnetworks;
      const highest = subnetworks.highest().subarray(place * most, (place + 1) * most);
      find("highest").replaceChildren(...[...highest].filter((i) => i >= 0).map((i) => thumb(i, "")));
    };
    menu.addEventListener("change", () => {
      show();
      find("colour").value = `subnetwork-${menu.value}`;
      if (find("colour").value) colourBy(find("colour").value);
    });
    // Its thumbnails lie in many sheets: they wait until the map is drawn and the list is in sight.
    new IntersectionObserver((entries, observer) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      setTimeout(show, 100);
    }).observe(find("subnetworks"));
  }
  const showSelection = () => {
    const indices = [];
    for (let i = 0; i < count; i++) if (chosen[i]) indices.push(i);
    numChosen = indices.length;
    find("selection").hidden = !numChosen;
    find("chosen").textContent = numChosen.toLocaleString("en");
    find("some").replaceChildren(...indices.slice(0, 48).map((i) => thumb(i, "")));
    showLabels();
    draw();
  };
  find("clear").addEventListener("click", () => {
    chosen.fill(0);
    showSelection();
  });
  const cell = (value) => {
    const text = String(value);
    const safe = /^\s*[=+\-@\t\r\n]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const toText = (lines) => `${lines.map((line) => line.map(cell).join(",")).join("\n")}\n`;
  const download = (text, name) => {
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const table = () => {
    const lines = [["image", ...columns.map((column) => column.title)]];
    for (let i = 0; i < count; i++) {
      if (chosen[i]) lines.push([data.names[i], ...columns.map((c) => (c.categories ? c.categories[c.values()[i]] : c.values()[i]))]);
    }
    return toText(lines);
  };
  find("save").addEventListener("click", () => download(table(), "selection.csv"));

  // Labels that the user gives: to the selection, or to the image that was clicked.
  let unsaved = false;
  const suggested = new Set(data.suggested);
  const labelTable = () => {
    const marks = [...labels.keys()].some((i) => suggested.has(i));
    const say = marks ? (word) => [word] : () => []; // a column only where it says something
    const lines = [...labels].sort(([a], [b]) => a - b).map(([i, label]) => [data.names[i], label, ...say(suggested.has(i) ? "yes" : "")]);
    return toText([["image", "label", ...say("suggested")], ...lines]);
  };
  // Images that the table asks to label, one after the other; one that stays without label comes again.
  const wanted = () => data.queue.filter((i) => !labels.has(i));
  const openNext = () => {
    const later = data.queue.slice(data.queue.indexOf(current) + 1);
    open(later.find((i) => !labels.has(i)) ?? wanted()[0], true);
    find("label").select(); // the next word replaces it
  };
  find("next").addEventListener("click", openNext);
  const MOST_NAMES = 20;
  const showLabels = () => {
    const asks = data.queue.length > 0;
    const left = wanted().length;
    const gives = current >= 0 || numChosen > 0;
    const names = [...new Set(labels.values())].sort();
    find("labelling").hidden = !gives && !labels.size && !asks;
    find("queue").hidden = !asks;
    find("next").disabled = !left;
    find("left").textContent = left ? `${left.toLocaleString("en")} left` : "all are labelled";
    find("give").hidden = find("names").hidden = !gives;
    find("names").replaceChildren(...names.slice(0, MOST_NAMES).map((name) => {
      const button = make("button", name);
      button.addEventListener("click", () => giveLabel(name));
      return button;
    }));
    find("target").textContent = numChosen ? `${numChosen.toLocaleString("en")} selected` : "this image";
    find("known").replaceChildren(...names.map((label) => new Option(label)));
    find("saving").hidden = !labels.size;
    find("labelled").textContent = `${labels.size.toLocaleString("en")} labelled by you`;
  };
  const giveLabel = (label) => {
    const give = (index) => (label ? labels.set(index, label) : labels.delete(index)); // none takes it back
    const goesOn = !numChosen && label && data.queue.includes(current) && wanted().some((i) => i !== current);
    if (numChosen) chosen.forEach((is, i) => is && give(i));
    else give(current);
    unsaved = true;
    chosen.fill(0);
    showSelection();
    if (goesOn) openNext();
    else if (current >= 0) open(current);
  };
  find("give").addEventListener("submit", (event) => {
    event.preventDefault();
    giveLabel(find("label").value.trim());
  });
  find("save-labels").addEventListener("click", () => {
    download(labelTable(), "labels.csv");
    unsaved = false;
  });
  window.addEventListener("beforeunload", (event) => {
    if (unsaved) event.preventDefault();
  });

  // The start.
  const menu = find("colour");
  columns.forEach((column, i) => menu.append(new Option(column.title, String(i))));
  if (subnetworks && subnetworks.has_scores) {
    const group = document.createElement("optgroup");
    group.label = "score of a subnetwork";
    subnetworks.numbers.forEach((number, i) => group.append(new Option(`subnetwork ${number}`, `subnetwork-${i}`)));
    menu.append(group);
  }
  menu.addEventListener("change", () => {
    colourBy(menu.value);
    if (fitted) placeLegend();
  });
  let waiting;
  find("filter").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(applyFilter, 120);
  });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  find("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    draw();
  });
  dark.addEventListener("change", draw);
  colourBy("0");
  new ResizeObserver(resize).observe(canvas.parentElement);
  resize();
  showLabels();
  window.explorer = { open, at, table, labelTable, showSelection, selectInside, view, points, chosen, shown };
})();
