// Tells each cell of a table the name of its column, for docs/site.css.
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const columns = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
  table.dataset.cards = "";  // not a class: the theme shows tables with one as they are, without lines
  for (const row of table.querySelectorAll("tbody tr"))
    [...row.cells].forEach((cell, number) => { if (number) cell.dataset.column = columns[number] || ""; });
}

// Text is wrapped, but not a table made of spaces.
for (const code of document.querySelectorAll(".md-typeset :is(.language-text, .output) code"))
  code.classList.toggle("columns", (code.textContent.match(/^.*\S {2,}\S.*$/gm) || []).length > 1);

// Long names may break behind their dots and underscores, not within a word.
for (const code of document.querySelectorAll(".md-typeset :not(pre) > code"))
  for (const node of [...code.childNodes])
    if (node.nodeType === Node.TEXT_NODE && node.data.length > 16)
      node.replaceWith(...node.data.replaceAll("\n", " ").split(/(?<=[._/(,=-])/).flatMap((part) => [part, document.createElement("wbr")]));

// On a phone a picture that has no form for it is moved sideways, so that its letters stay readable (docs/site.css).
for (const image of document.querySelectorAll('.md-content :is(img[src$=".svg"], img.picture):not(picture img)')) {
  const frame = document.createElement("div");
  frame.className = "sideways";
  image.replaceWith(frame);
  frame.append(image);
}
