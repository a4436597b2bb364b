"use strict";
(() => {
  const form = document.getElementById("filter");
  const text = document.getElementById("text");
  const state = document.getElementById("state");
  const shown = document.getElementById("shown");
  // A body for each group's head, then one for each of its tests: a row, and one for each parameter set.
  const groups = [];
  for (const body of document.querySelectorAll("#table tbody")) {
    if (body.classList.contains("g")) {
      groups.push({ body, tests: [] });
      continue;
    }
    const group = groups[groups.length - 1];
    const [first, ...sets] = body.rows;
    const words = (row) => row.cells[0].textContent + " " + row.cells[0].title;
    const of_test = group.body.textContent + " " + words(first);
    group.tests.push({
      body,
      rows: (sets.length ? sets : [first]).map((row) => ({
        row, is_test: row === first, states: row.dataset.s, words: (of_test + " " + words(row)).toLowerCase(),
      })),
    });
  }

  function filter() {
    const wanted = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let visible = 0, all = 0;
    for (const { body, tests } of groups) {
      let some = false;
      for (const test of tests) {
        let fitting = 0;
        for (const { row, is_test, states, words } of test.rows) {
          const fits = states.includes(state.value) && wanted.every((word) => words.includes(word));
          row.hidden = !is_test && !fits;
          fitting += fits;
        }
        test.body.hidden = !fitting;
        some ||= fitting > 0;
        visible += fitting;
        all += test.rows.length;
      }
      body.hidden = !some;
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
