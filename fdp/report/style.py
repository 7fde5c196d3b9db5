"""The style sheet and the script of a report page. Both are inline; nothing is loaded from anywhere.

Without the script the page shows everything but read-outs under the pointer and switching runs off.
"""

from __future__ import annotations

import base64
import hashlib

CSS = """
:root{color-scheme:light dark;--paper:#f6f7f9;--card:#fff;--ink:#1b1f24;--dim:#57606a;--rule:#e3e6ea;--grid:#e9ecef;
--good:#1a6b35;--good-bg:#dcf4e3;--bad:#8f3b00;--bad-bg:#ffead9;--free:#1f4f8f;--free-bg:#e1edfb;--none-bg:#e9ecef;
--c0:#0b7285;--c1:#b5179e;--c2:#d9480f;--c3:#5c7a0b;--c4:#5f3dc4;--c5:#a1660a;--c6:#1864ab;--c7:#a61e4d}
@media (prefers-color-scheme:dark){:root{--paper:#0f1216;--card:#171b21;--ink:#e6e9ee;--dim:#9aa4b0;--rule:#2a3038;
--grid:#262c34;--good:#7ee2a0;--good-bg:#123120;--bad:#ffb38a;--bad-bg:#3a2112;--free:#9cc7ff;--free-bg:#15294a;
--none-bg:#2a3038;--c0:#3bc9db;--c1:#f783ac;--c2:#ff922b;--c3:#a9e34b;--c4:#b197fc;--c5:#ffd43b;--c6:#74c0fc;
--c7:#ffa8a8}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans","DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1320px;margin:0 auto;padding:24px 20px 48px}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;margin:36px 0 12px}
h3{font-size:14.5px;margin:0;font-weight:650}
h3 small,.dim{font-weight:400;color:var(--dim);font-size:12.5px}
p{margin:0 0 10px}
a{color:var(--free)}
code,pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
code{overflow-wrap:anywhere}
.sub{color:var(--dim);overflow-wrap:anywhere}
.card,.chart,.tile{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.card{padding:16px 18px;margin-bottom:14px}
.warn{border-left:4px solid var(--bad);padding:10px 14px;background:var(--card);border-radius:6px;margin:16px 0;
font-size:13.5px;color:var(--dim)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,200px),1fr));gap:12px;margin-top:18px}
.tile{padding:12px 14px;display:flex;flex-direction:column;gap:2px}
.tile .name{font-size:12.5px;color:var(--dim);display:flex;flex-wrap:wrap;justify-content:space-between;gap:4px 8px;
align-items:center}
.tile .value{font-size:23px;font-weight:650;letter-spacing:-.01em}
.tile .more{font-size:12.5px;color:var(--dim)}
.meter{height:6px;border-radius:3px;background:var(--grid);overflow:hidden;margin-top:6px}
.meter i{display:block;height:100%;background:var(--c0);border-radius:3px}
.badge{display:inline-block;font-size:11px;line-height:1;padding:4px 7px;border-radius:99px;font-weight:600;
white-space:nowrap}
.badge.good{background:var(--good-bg);color:var(--good)}
.badge.bad{background:var(--bad-bg);color:var(--bad)}
.badge.free{background:var(--free-bg);color:var(--free)}
.badge.none{background:var(--none-bg);color:var(--dim)}
.badges{display:flex;gap:4px 10px;flex-wrap:wrap;font-size:12px;color:var(--dim);align-items:center}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:14px}
.chart{margin:0;padding:14px 16px 10px;min-width:0;position:relative;display:flex;flex-direction:column}
figcaption{display:flex;justify-content:space-between;gap:6px 12px;flex-wrap:wrap;align-items:baseline}
.keys{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:6px 0 0;padding:0;font-size:12px;
color:var(--dim)}
.keys li{display:flex;align-items:center;gap:6px}
.key{display:inline-block;width:18px;height:0;border-top:2.5px solid currentColor}
.key.dashed{border-top-style:dashed}
.key.area{height:10px;border:0;background:currentColor;opacity:.22}
.key.dots{border-top-style:solid;position:relative}
.key.dots::after{content:"";position:absolute;left:6px;top:-4.5px;width:7px;height:7px;border-radius:50%;
background:currentColor}
.row{display:flex;justify-content:space-between;gap:4px 12px;align-items:flex-start}
.log-switch{position:absolute;opacity:0;pointer-events:none}
.row label{font-size:12px;color:var(--dim);padding:4px 0 4px 8px;cursor:pointer;white-space:nowrap;margin-left:auto}
.row label::after{content:"";display:inline-block;width:22px;height:12px;border-radius:6px;margin-left:6px;
vertical-align:-1px;background:radial-gradient(circle at 6px 6px,var(--card) 4px,transparent 4.5px) var(--dim)}
.log-switch:checked~.row label::after{background:radial-gradient(circle at 16px 6px,var(--card) 4px,transparent 4.5px)
var(--c0)}
.log-switch:focus-visible~.row label{outline:2px solid var(--free);border-radius:4px}
.log-switch:checked~.linear,.log-switch:not(:checked)~.log{display:none}
.plot{display:grid;grid-template-columns:max-content 1fr;grid-template-rows:minmax(190px,1fr) 20px 16px;margin-top:12px;
flex:1}
.y-axis{position:relative;min-width:44px}
.y-axis span{position:absolute;right:8px;transform:translateY(-50%);font-size:11.5px;color:var(--dim);
white-space:nowrap}
.canvas{position:relative;min-width:0;cursor:crosshair;touch-action:pan-y}
.canvas svg{display:block;width:100%;height:100%;overflow:visible}
.x-axis{grid-column:2;position:relative}
.x-axis span{position:absolute;transform:translateX(-50%);font-size:11.5px;color:var(--dim);top:4px;
white-space:nowrap}
.x-name{grid-column:2;text-align:right;font-size:11.5px;color:var(--dim);line-height:1}
.grid{stroke:var(--grid);stroke-width:1;fill:none;vector-effect:non-scaling-stroke}
.line,.marks{stroke:currentColor;fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round;
vector-effect:non-scaling-stroke}
.line.faint{stroke-width:1;opacity:.32}
.line.dashed{stroke-dasharray:6 5;stroke-linecap:butt;stroke-width:1.6}
.line.dots{stroke-width:1.4}
.line.hidden{display:none}
.marks{stroke-width:7}
.band{fill:currentColor;opacity:.15;stroke:none}
.band.ink{opacity:.07}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}
.c5{color:var(--c5)}.c6{color:var(--c6)}.c7{color:var(--c7)}.ink{color:var(--dim)}
.off{display:none}
.empty{color:var(--dim);padding:30px 0;text-align:center}
.cross{position:absolute;top:0;bottom:0;width:1px;background:var(--dim);pointer-events:none}
.read{position:absolute;top:4px;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:7px 10px;
font-size:12px;line-height:1.45;pointer-events:none;z-index:3;max-width:min(300px,92%);
box-shadow:0 3px 14px rgba(0,0,0,.16)}
.read b{display:block}
.read div{overflow-wrap:anywhere}
.read i{display:inline-block;width:9px;height:9px;border-radius:50%;background:currentColor;margin-right:6px}
.runs{display:flex;flex-wrap:wrap;gap:8px 18px;margin:14px 0 0;padding:0;list-style:none}
.runs label{display:flex;align-items:center;gap:7px;overflow-wrap:anywhere;padding:3px 0}
.runs input{display:none}
.js .runs input{display:inline-block;accent-color:var(--c0)}
.swatch{display:inline-block;width:20px;height:4px;vertical-align:middle;background:currentColor;border-radius:2px;
flex:none;margin-right:4px}
td.state{white-space:nowrap}
.fold{border-bottom:1px solid var(--rule)}
.fold:last-child{border-bottom:0}
.fold>summary{color:var(--ink)}
.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{font-weight:600;color:var(--dim);font-size:12.5px}
td.number,th.number{text-align:right;white-space:nowrap}
table.plan code,table.plan td{white-space:nowrap}
tbody tr:last-child td,tbody tr:last-child th{border-bottom:0}
details>summary{cursor:pointer;color:var(--free);padding:6px 0;font-size:13.5px}
pre.text{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--paper);border:1px solid var(--rule);
border-radius:8px;padding:10px 12px;margin:6px 0 12px}
.statement p,.statement li{max-width:88ch}
.statement ul{margin:0 0 10px;padding-left:20px}
footer{margin-top:40px;color:var(--dim);font-size:12.5px;overflow-wrap:anywhere}
@media (min-width:900px){.chart.wide{grid-column:span 2}}
@media (max-width:560px){main{padding:16px 14px 32px}h1{font-size:22px}.chart{padding:12px 12px 8px}
.card{padding:14px}.tile{padding:11px 10px}.tiles{grid-template-columns:repeat(2,minmax(0,1fr));gap:10px}
.tile .value{font-size:20px}}
@media print{.chart,.card,.tile{break-inside:avoid}.row label{display:none}}
""".strip()

SCRIPT = """
(function () {
  "use strict";
  var root = document.documentElement;
  root.classList.add("js");
  var charts = JSON.parse(document.getElementById("chart-data").textContent);
  function text(tag, words, parent, name) {
    var made = document.createElement(tag);
    if (words) made.textContent = words;
    if (name) made.className = name;
    if (parent) parent.appendChild(made);
    return made;
  }
  function nearest(steps, step) {
    var low = 0, high = steps.length - 1;
    while (high - low > 1) {
      var middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle; else high = middle;
    }
    return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
  }
  function show(value) {
    if (value === 0 || (Math.abs(value) >= 0.001 && Math.abs(value) < 1e6)) return String(+value.toPrecision(4));
    return value.toExponential(2);
  }
  document.querySelectorAll(".plot").forEach(function (plot) {
    var lines = charts[plot.dataset.chart] || [], canvas = plot.querySelector(".canvas");
    var low = +plot.dataset.low, high = +plot.dataset.high;
    var cross = text("div", "", canvas, "cross off"), read = text("div", "", canvas, "read off");
    function hide() { cross.classList.add("off"); read.classList.add("off"); }
    function move(event) {
      var box = canvas.getBoundingClientRect();
      var at = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      var step = low + at * (high - low), rows = [], found = null;
      lines.forEach(function (line) {
        if (!line.step.length || root.classList.contains("no-run-" + line.run)) return;
        var i = nearest(line.step, step);
        if (line.value[i] === null) return;
        if (found === null || Math.abs(line.step[i] - step) < Math.abs(found - step)) found = line.step[i];
        rows.push([line, i]);
      });
      if (found === null) return hide();
      read.textContent = "";
      text("b", "step " + found, read);
      rows.forEach(function (row) {
        var line = row[0], there = line.step[row[1]];
        var entry = text("div", "", read);
        text("i", "", entry, line.colour);
        var late = there === found ? "" : " (step " + there + ")";
        entry.appendChild(document.createTextNode(line.label + " " + show(line.value[row[1]]) + late));
      });
      var place = (found - low) / (high - low);
      cross.style.left = 100 * place + "%";
      read.style.left = place < 0.5 ? "calc(" + 100 * place + "% + 10px)" : "auto";
      read.style.right = place < 0.5 ? "auto" : "calc(" + 100 * (1 - place) + "% + 10px)";
      cross.classList.remove("off"); read.classList.remove("off");
    }
    canvas.addEventListener("pointermove", move);
    canvas.addEventListener("pointerdown", move);
    canvas.addEventListener("pointerleave", hide);
  });
  document.querySelectorAll(".runs input").forEach(function (box) {
    function apply() {
      root.classList.toggle("no-run-" + box.value, !box.checked);
      document.querySelectorAll(".run-" + box.value).forEach(function (each) {
        each.classList.toggle("off", !box.checked);
      });
    }
    box.addEventListener("change", apply);
    apply();
  });
})();
""".strip()


def script_hash() -> str:
    """Return the hash by which the page's policy allows this script and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
