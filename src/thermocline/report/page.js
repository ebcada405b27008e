// Tables that can be sorted by a click on a heading, and searched. No signs that XML reserves, so that the page stays XML.
for (const input of document.querySelectorAll("input[type=search]")) {
  const rows = [...input.parentElement.querySelectorAll("tbody tr")];
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, body = head.closest("table").tBodies[0];
    const first = head.classList.contains("n") ? "descending" : "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const order = head.getAttribute("aria-sort") === first ? other : first;
    for (const one of head.parentElement.cells) one.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
    const key = (row) => row.cells[head.cellIndex];
    const compare = (a, b) => "v" in a.dataset ? a.dataset.v - b.dataset.v : a.textContent.localeCompare(b.textContent);
    const sign = order === "ascending" ? 1 : -1;
    body.append(...[...body.rows].sort((a, b) => sign * compare(key(a), key(b))));
  });
}
