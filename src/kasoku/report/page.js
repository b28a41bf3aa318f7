"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)").matches;

  const theme = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // the settings of a layout that follow the theme, by plotly's dotted names
  function colours(layout) {
    const ink = colour("--ink"), soft = colour("--soft"), grid = colour("--grid"), card = colour("--card");
    const found = {
      "font.color": ink, "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
      "hoverlabel.bgcolor": card, "hoverlabel.bordercolor": grid, "hoverlabel.font.color": ink,
      "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": soft, "modebar.activecolor": ink,
    };
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis\d*$/.test(name)) {
        found[name + ".gridcolor"] = grid;
        found[name + ".linecolor"] = grid;
      }
    }
    return found;
  }

  function put(thing, path, value) {
    const names = path.split("."), last = names.pop();
    for (const name of names) thing = thing[name] = thing[name] || {};
    thing[last] = value;
  }

  const label = () => { button.textContent = theme() === "dark" ? "Light" : "Dark"; };

  function repaint() {
    label();
    for (const { key, layout } of charts) Plotly.relayout(key, colours(layout));
  }

  async function draw() {
    label();
    const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
    for (const { key, data, layout } of charts) {
      const themed = structuredClone(layout);
      for (const [name, value] of Object.entries(colours(layout))) put(themed, name, value);
      put(themed, "font.family", getComputedStyle(document.body).fontFamily);
      put(themed, "font.size", 12);
      if (touch) themed.dragmode = false;  // a finger scrolls the page
      await Plotly.newPlot(key, data, themed, config);
    }
    button.addEventListener("click", () => {
      root.dataset.theme = theme() === "dark" ? "light" : "dark";  // kept in this page only
      repaint();
    });
    dark.addEventListener("change", repaint);
    repaint();  // in the theme of now
    button.disabled = false;
    root.dataset.ready = "true";
  }

  draw();
})();
