// SPDX-License-Identifier: Apache-2.0
// A column of words sorts by its text, one of numbers by data-value, or by the text where that is the number;
// rows without a number come last.
document.querySelectorAll("th button").forEach(function (button) {
  button.addEventListener("click", function () {
    var head = button.parentNode, table = head.closest("table"), body = table.tBodies[0];
    var down = head.getAttribute("aria-sort") === "ascending";
    table.querySelectorAll("th").forEach(function (other) { other.removeAttribute("aria-sort"); });
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    function key(row) {
      var cell = row.cells[head.cellIndex], text = cell.getAttribute("data-value");
      return head.className === "word" ? cell.textContent : Number(text === null ? cell.textContent : text);
    }
    function order(a, b) {
      var x = key(a), y = key(b);
      if (x !== x || y !== y) { return Number(x !== x) - Number(y !== y); }
      return (x > y ? 1 : y > x ? -1 : 0) * (down ? -1 : 1);
    }
    Array.from(body.rows).sort(order).forEach(function (row) { body.appendChild(row); });
  });
});
