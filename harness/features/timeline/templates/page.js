"use strict";
(() => {
  // Without this the page is whole: titles of bars, links to rows of the table. It adds the details of the bar
  // that has the focus, the bars of its collective, and arrow keys.
  const bars = [...document.querySelectorAll("svg a[data-key]")];
  const details = document.getElementById("details");
  const picture = document.querySelector(".picture");
  const marked = () => document.querySelectorAll(".same");
  function show(bar) {
    for (const each of bars) each.tabIndex = each === bar ? 0 : -1;
    details.textContent = bar.querySelector("title").textContent;
    for (const each of marked()) each.classList.remove("same");
    const key = CSS.escape(bar.dataset.key);
    for (const each of document.querySelectorAll(`[data-key="${key}"]`)) each.classList.add("same");
  }
  for (const bar of bars) {
    bar.addEventListener("focus", () => show(bar));
    bar.addEventListener("mouseenter", () => show(bar));
    bar.addEventListener("keydown", (event) => {
      const lane = bars.filter((each) => each.dataset.rank === bar.dataset.rank);
      const joined = bars.filter((each) => each.dataset.key === bar.dataset.key);
      const moves = { ArrowRight: [lane, 1], ArrowLeft: [lane, -1], ArrowDown: [joined, 1], ArrowUp: [joined, -1] };
      const move = moves[event.key];
      const next = move && move[0][move[0].indexOf(bar) + move[1]];
      if (next) {
        event.preventDefault();
        next.focus();
        next.scrollIntoView({ block: "nearest", inline: "center" });
      }
    });
  }
  const fault = document.querySelector(".missing, .waits, .failed, .mismatch, .death");
  // The end of the first fault, with a quarter of the window for what came after it: most often nothing.
  const right = (element) => element.getBoundingClientRect().right;
  if (fault) picture.scrollLeft += right(fault) - right(picture) + picture.clientWidth / 4;
  // Tab leads to one bar, arrow keys from there.
  for (const bar of bars) bar.tabIndex = -1;
  const first = bars.find((bar) => bar.querySelector(".waits, .failed, .mismatch")) || bars[0];
  if (first) first.tabIndex = 0;
})();
