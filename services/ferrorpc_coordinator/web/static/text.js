// Formats numbers and makes elements. Text is never set as HTML: names come from members, which are not trusted.

export function duration(ms) {
  if (ms === null || ms === undefined) return "?";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 10_000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < 120_000) return `${Math.round(ms / 1000)} s`;
  if (ms < 7_200_000) return `${Math.round(ms / 60_000)} min`;
  if (ms < 172_800_000) return `${(ms / 3_600_000).toFixed(1)} h`;
  return `${Math.round(ms / 86_400_000)} days`;
}

// To three digits, without the unit.
export function milliseconds(ms) {
  return ms < 999.5 ? ms.toPrecision(3) : count(Math.round(ms));
}

// When that was; with the date if it is a day ago or more.
export function clock(ageMs) {
  const then = new Date(Date.now() - ageMs);
  const time = then.toLocaleTimeString([], { hour12: false });
  return ageMs < 86_400_000 ? time : `${then.toLocaleDateString([], { month: "short", day: "numeric" })}, ${time}`;
}

export function bytes(count) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= size) return `${(count / size).toPrecision(3)} ${unit}`;
  }
  return `${Math.round(count)} B`;
}

export function rate(perSecond) {
  if (perSecond === null) return "–";
  if (perSecond >= 100) return Math.round(perSecond).toLocaleString("en");
  return perSecond >= 10 ? perSecond.toFixed(1) : perSecond.toPrecision(2).replace(/^0\.0$/, "0");
}

export function count(number) {
  return number.toLocaleString("en");
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

// Ranks as ranges: 0-2, 5, 8-9.
export function ranks(list, most = 24) {
  const parts = [];
  for (let i = 0; i < list.length; ) {
    let j = i;
    while (j + 1 < list.length && list[j + 1] === list[j] + 1) j++;
    parts.push(i === j ? `${list[i]}` : `${list[i]}-${list[j]}`);
    i = j + 1;
  }
  return parts.length > most ? `${parts.slice(0, most).join(", ")}, …` : parts.join(", ");
}

export function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  for (const child of children) made.append(child);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Replaces the children of `node`, unless they look the same, so that a selection survives an update.
export function fill(node, children) {
  const fresh = element("div", "", ...children);
  if (node.innerHTML !== fresh.innerHTML) node.replaceChildren(...fresh.childNodes);
}
