// Drawings on canvases: one tile per rank, sparklines, and the matrix of links.

import { bytes } from "./text.js";

const GAP = 3;

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

// One tile per member, as large as fits. Returns a function from a point to the member drawn there.
export function tiles(canvas, members) {
  const width = canvas.clientWidth;
  const size = members.length <= 64 ? 34 : members.length <= 256 ? 22 : members.length <= 1024 ? 13 : 8;
  const gap = size > 12 ? GAP : 2;
  const across = Math.max(1, Math.floor((width + gap) / (size + gap)));
  const rows = Math.max(1, Math.ceil(members.length / across));
  const [context] = prepare(canvas, rows * (size + gap));
  const colours = {};
  context.font = `600 ${size < 34 ? 10 : 12}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  members.forEach((member, i) => {
    const [x, y] = [(i % across) * (size + gap), Math.floor(i / across) * (size + gap)];
    context.fillStyle = colours[member.state] ||= colour(member.state);
    context.globalAlpha = member.state === "left" ? 0.45 : 1;
    context.beginPath();
    context.roundRect(x, y, size, size, Math.min(7, size / 4));
    context.fill();
    context.globalAlpha = 1;
    if (member.lateMs) {
      context.save();
      context.clip(); // to the inner half of the stroke, which would else cross the canvas's edge
      context.strokeStyle = colours.late ||= colour("stalled");
      context.lineWidth = 2 * Math.min(4, size / 4);
      context.stroke();
      context.restore();
    }
    if (size >= 22) {
      const ink = member.state === "left" ? "ink" : "on"; // a faint tile is nearly of the page's colour
      context.fillStyle = colours[ink] ||= colour(ink);
      context.fillText(member.rank >= 0 ? member.rank : "+", x + size / 2, y + size / 2 + 1);
    }
  });
  return (x, y) => {
    const column = Math.floor(x / (size + gap));
    return column < across ? members[Math.floor(y / (size + gap)) * across + column] : undefined;
  };
}

// Beat ages of the last minute.
export function spark(canvas, ages) {
  const height = 18;
  const [context, width] = prepare(canvas, height);
  const top = Math.max(1500, ...ages);
  const step = width / 59;
  const first = 60 - ages.length;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.strokeStyle = ages.at(-1) > 1500 ? colour("stalled") : colour("active");
  context.beginPath();
  let pen = false;
  ages.forEach((age, i) => {
    if (age < 0) {
      pen = false;
      return;
    }
    const [x, y] = [(first + i) * step, height - 1.5 - (age / top) * (height - 3)];
    if (pen) context.lineTo(x, y);
    else context.moveTo(x, y);
    pen = true;
  });
  context.stroke();
}

const HUES = new Map([["grpc", [15, 143, 128]], ["shared_memory", [59, 130, 196]], ["nccl", [168, 85, 200]]]);

// A row per sender, a column per receiver. In large worlds a cell stands for several adjacent ranks.
export function matrix(canvas, size, links) {
  const part = Math.ceil(size / 48);
  const n = Math.ceil(size / part);
  const margin = 34;
  const width = canvas.clientWidth;
  const cell = Math.max(5, Math.min(58, (width - margin) / n));
  const [context] = prepare(canvas, margin + n * cell);
  const cells = new Map();
  for (const link of links) {
    const key = Math.floor(link.from / part) * n + Math.floor(link.to / part);
    const found = cells.get(key) || { sent: 0, rate: 0, kinds: new Set() };
    found.sent += link.sent;
    found.rate += link.bytesPerSecond || 0;
    found.kinds.add(link.kind);
    cells.set(key, found);
  }
  const most = Math.max(1, ...[...cells.values()].map((found) => found.rate));
  const shade = colour("shade");
  for (let row = 0; row < n; row++) {
    for (let column = 0; column < n; column++) {
      const found = cells.get(row * n + column);
      context.fillStyle = row === column && part === 1 ? "transparent" : shade;
      context.fillRect(margin + column * cell, margin + row * cell, cell - 1, cell - 1);
      if (!found) continue;
      const strength = found.rate > 0 ? 0.3 + 0.7 * (Math.log1p(found.rate) / Math.log1p(most)) : 0.16;
      const [kind] = found.kinds;
      context.fillStyle = `rgba(${(HUES.get(kind) || [130, 130, 130]).join(",")},${strength})`;
      context.fillRect(margin + column * cell, margin + row * cell, cell - 1, cell - 1);
      if (cell >= 50 && found.rate > 0) {
        context.fillStyle = strength > 0.6 ? "#fff" : colour("ink");
        context.font = "11px system-ui, sans-serif";
        context.textAlign = "center";
        context.textBaseline = "middle";
        context.fillText(bytes(found.rate).replace(" ", ""), margin + (column + 0.5) * cell, margin + (row + 0.5) * cell);
      }
    }
  }
  labels(context, n, part, cell, margin);
  return (x, y) => cellText(cells, n, part, Math.floor((y - margin) / cell), Math.floor((x - margin) / cell));
}

function labels(context, n, part, cell, margin) {
  context.fillStyle = colour("quiet");
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  const every = Math.ceil(22 / cell);
  for (let i = 0; i < n; i += every) {
    context.textAlign = "center";
    context.fillText(i * part, margin + (i + 0.5) * cell, margin - 10);
    context.textAlign = "right";
    context.fillText(i * part, margin - 7, margin + (i + 0.5) * cell);
  }
}

function cellText(cells, n, part, row, column) {
  if (row < 0 || column < 0 || row >= n || column >= n) return "";
  const name = (i) => (part === 1 ? `rank ${i}` : `ranks ${i * part}-${(i + 1) * part - 1}`);
  const found = cells.get(row * n + column);
  if (!found) return `${name(row)} → ${name(column)}: nothing sent`;
  const kinds = [...found.kinds].join(", ");
  return `${name(row)} → ${name(column)} by ${kinds}\n${bytes(found.rate)}/s, ${bytes(found.sent)} in this generation`;
}
