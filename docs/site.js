// Tells each cell of a table the name of its column, for docs/site.css.
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const columns = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
  table.classList.add("cards");
  for (const row of table.querySelectorAll("tbody tr"))
    [...row.cells].forEach((cell, number) => { if (number) cell.dataset.column = columns[number] || ""; });
}

// Long names may break behind their dots and underscores, not within a word.
for (const code of document.querySelectorAll(".md-typeset :not(pre) > code"))
  for (const node of [...code.childNodes])
    if (node.nodeType === Node.TEXT_NODE && node.data.length > 16)
      node.replaceWith(...node.data.split(/(?<=[._/(,=-])/).flatMap((part) => [part, document.createElement("wbr")]));
