"use strict";
(() => {
  const form = document.getElementById("filter");
  const text = document.getElementById("text");
  const state = document.getElementById("state");
  const shown = document.getElementById("shown");
  const groups = [...document.querySelectorAll("#table tbody")].map((body) => ({
    body,
    rows: [...body.rows].slice(1).map((row) => ({
      row,
      states: row.dataset.s,
      words: (body.rows[0].cells[0].textContent + " " + row.cells[0].textContent + " "
        + row.cells[0].title).toLowerCase(),
    })),
  }));

  function filter() {
    const wanted = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let visible = 0, all = 0;
    for (const group of groups) {
      let some = false;
      for (const { row, states, words } of group.rows) {
        const fits = states.includes(state.value) && wanted.every((word) => words.includes(word));
        row.hidden = !fits;
        some ||= fits;
        visible += fits;
        all += 1;
      }
      group.body.hidden = !some;
    }
    shown.textContent = `${visible} of ${all} claims`;
  }

  // Browsers that do not open what they are sent into.
  function open() {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    const around = target && target.closest("details");
    if (around) {
      around.open = true;
      target.scrollIntoView();
    }
  }

  let waiting;
  form.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(filter, 80);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", open);
  form.hidden = false;
  filter();
  open();
})();
