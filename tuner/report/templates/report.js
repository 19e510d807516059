"use strict";

/* What a pointed-at candidate is, below its chart; a click finds it in the table. */
for (const figure of document.querySelectorAll("figure.plot")) {
  const caption = figure.querySelector("figcaption");
  const tell = (event) => {
    const mark = event.target.closest(".mark");
    if (mark) caption.textContent = mark.querySelector("title").textContent;
    return mark;
  };
  figure.addEventListener("pointerover", tell);
  figure.addEventListener("click", (event) => {
    const mark = tell(event);
    if (!mark || !mark.dataset.key) return;
    const rows = figure.closest("section").querySelectorAll(".trials tbody tr");
    const row = Array.from(rows).find((one) => one.dataset.key === mark.dataset.key);
    if (!row) return;
    for (const other of rows) other.classList.toggle("pointed-at", other === row);
    row.closest("details").open = true;
    row.hidden = false;
    row.scrollIntoView({ block: "center" });
    row.focus({ preventScroll: true });
  });
}

/* Tables of candidates: a heading sorts, words and choices filter. */
for (const trials of document.querySelectorAll(".trials")) {
  const form = trials.querySelector("form");
  const body = trials.querySelector("tbody");
  const headings = Array.from(trials.querySelectorAll("thead th"));
  const rows = Array.from(body.rows);
  const words = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

  const valueOf = (row, column) => {
    const cell = row.cells[column];
    if (!headings[column].classList.contains("number")) return cell.textContent.trim() || null;
    return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
  };

  const sort = (column, direction) => {
    const keyed = rows.map((row, place) => [valueOf(row, column), place, row]);
    keyed.sort(([a, i], [b, j]) => {
      if (a === null || b === null) return (a === null) - (b === null) || i - j; /* what is missing comes last */
      const order = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
      return order * direction || i - j;
    });
    body.append(...keyed.map(([, , row]) => row));
    headings.forEach((heading, place) => {
      const way = direction > 0 ? "ascending" : "descending";
      heading.setAttribute("aria-sort", place === column ? way : "none");
    });
    form.elements.sort.value = String(column);
  };

  const filter = () => {
    const asked = form.elements.find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const { outcome, family } = form.elements;
    let shown = 0;
    for (const row of rows) {
      const text = words.get(row);
      row.hidden =
        (outcome.value && row.dataset.outcome !== outcome.value) ||
        (family.value && row.dataset.family !== family.value) ||
        !asked.every((word) => text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    form.querySelector("output").textContent = `${shown} of ${rows.length}`;
  };

  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      sort(column, heading.getAttribute("aria-sort") === "ascending" ? -1 : 1);
    });
  });
  form.elements.sort.addEventListener("change", (event) => sort(Number(event.target.value), 1));
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
}
