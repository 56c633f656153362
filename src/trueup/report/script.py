"""The page's only script: the theme button, and numbers beside the pointer or the focused chart, response or token."""

SCRIPT = r"""
"use strict";
const root = document.documentElement, tip = document.getElementById("tip"), button = document.getElementById("theme");
const themes = ["auto", "light", "dark"];
function setTheme(name) {
  if (name === "auto") root.removeAttribute("data-theme"); else root.setAttribute("data-theme", name);
  button.textContent = "Theme: " + name;
  try { localStorage.setItem("trueup-theme", name); } catch (_) { /* pages opened from disk may not store */ }
}
let stored = null;
try { stored = localStorage.getItem("trueup-theme"); } catch (_) { /* as above */ }
setTheme(themes.includes(stored) ? stored : "auto");
button.hidden = false;
button.addEventListener("click", () => {
  const now = root.getAttribute("data-theme") || "auto";
  setTheme(themes[(themes.indexOf(now) + 1) % themes.length]);
});

function show(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x - box.width / 2, innerWidth - box.width - 4)) + "px";
  tip.style.top = (y - box.height - 12 > 4 ? y - box.height - 12 : y + 22) + "px";
}
function hide() { tip.hidden = true; }

for (const plot of document.querySelectorAll("svg.plot")) {
  if (!plot.dataset.x) continue;
  const reached = plot.dataset.x.split(" ").map(Number), box = plot.viewBox.baseVal;
  const heads = [...plot.parentNode.querySelectorAll("thead th")], rows = plot.parentNode.querySelectorAll("tbody tr");
  function words(row) {
    const cells = [...row.cells].map((cell, index) => cell.textContent && heads[index].textContent + "  " + cell.textContent);
    return cells.filter(Boolean).join("\n");
  }
  const guide = document.createElementNS(plot.namespaceURI, "path");
  guide.setAttribute("class", "guide");
  plot.append(guide);
  let at = -1;
  function point(index, y) {
    at = index;
    const area = plot.getBoundingClientRect(), x = reached[at];
    guide.setAttribute("d", `M${x},26V${box.height - 42}`);
    show(words(rows[at]), area.left + x / box.width * area.width, y === undefined ? area.top + 30 : y);
  }
  function leave() { guide.removeAttribute("d"); hide(); }
  plot.addEventListener("pointermove", event => {
    const area = plot.getBoundingClientRect(), x = (event.clientX - area.left) / area.width * box.width;
    let best = 0;
    reached.forEach((item, index) => { if (Math.abs(item - x) < Math.abs(reached[best] - x)) best = index; });
    point(best, event.clientY);
  });
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) point(Math.max(at, 0)); });
  plot.addEventListener("keydown", event => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") leave();
    if (!move) return;
    event.preventDefault();
    point(Math.min(reached.length - 1, Math.max(0, at + move)));
  });
}

function tell(token) {
  const [position, id, learner, sampler, ratio] = token.dataset.n.split("|"), area = token.getClientRects()[0];
  if (!area) return;
  const text = JSON.stringify(token.textContent);
  const left = token.classList.contains("m") ? "\nnot in the loss mask" : "";
  show(`${text}  id ${id}, position ${position}\nlog pi ${learner}   log mu ${sampler}\nlog rho ${ratio}${left}`,
    area.left + area.width / 2, area.top);
}
for (const body of document.querySelectorAll(".tokens.body")) {
  const tokens = body.querySelectorAll("i[data-n]");
  let at = -1;
  function leave() { if (at >= 0) tokens[at].classList.remove("here"); hide(); }
  function go(index) {
    leave();
    at = Math.min(tokens.length - 1, Math.max(0, index));
    tokens[at].classList.add("here");
    tokens[at].scrollIntoView({ block: "nearest" });
    tell(tokens[at]);
  }
  body.addEventListener("pointerover", event => {
    const token = event.target.closest("i[data-n]");
    if (token) tell(token); else hide();
  });
  body.addEventListener("pointerleave", hide);
  body.addEventListener("focus", () => { if (tokens.length && body.matches(":focus-visible")) go(Math.max(at, 0)); });
  body.addEventListener("blur", leave);
  body.addEventListener("keydown", event => {
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: tokens.length - 1 };
    if (event.key === "Escape") leave();
    if (!(event.key in moves) || !tokens.length) return;
    event.preventDefault();
    go(moves[event.key]);
  });
}
addEventListener("scroll", () => {
  const here = document.activeElement && document.activeElement.querySelector("i.here");
  if (here) tell(here); else hide();
}, { passive: true });
addEventListener("beforeprint", () => { for (const item of document.querySelectorAll("details.response")) item.open = true; });
"""
