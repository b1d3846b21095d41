"use strict";
(() => {
  const all = (where, what) => Array.from(where.querySelectorAll(what));
  const make = (name, text, kind) => {
    const one = document.createElement(name);
    if (text !== undefined) one.textContent = text;
    if (kind) one.className = kind;
    return one;
  };

  // Rows of the batch as tabs: without a script they stand below each other.
  const tabs = all(document, "[role=tab]");
  const open = (tab) => {
    for (const one of tabs) {
      const chosen = one === tab;
      one.setAttribute("aria-selected", String(chosen));
      one.tabIndex = chosen ? 0 : -1;
      document.getElementById(one.getAttribute("aria-controls")).hidden = !chosen;
    }
  };
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => open(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const next = tabs[(at + step + tabs.length) % tabs.length];
      open(next);
      next.focus();
    });
  });
  if (tabs.length) open(tabs[0]);

  const number = (text) => Number(text.replace("−", "-"));
  const fill = (pane, title, pairs) => {
    const list = make("dl");
    for (const [name, value] of pairs) list.append(make("dt", name), make("dd", value));
    pane.replaceChildren(make("h2", "Details"), make("p", title, "big"), list);
  };
  // A token's figures are those of its row in the table.
  const tell = (pane, one) => {
    const row = document.getElementById("r" + one.id);
    if (!row) {
      const [title, ...parts] = one.getAttribute("aria-label").split("; ");
      fill(pane, title, parts.map((part) => part.split(": ")).map(([name, ...rest]) => [name, rest.join(": ")]));
      return;
    }
    const heads = all(row.closest("table"), "thead th");
    const pairs = [];
    let title = "";
    Array.from(row.cells).forEach((cell, at) => {
      const name = heads[at].textContent;
      let value = cell.textContent;
      if (cell.classList.contains("tok")) title = value;
      else if (value) {
        if (/^log [pq]$/.test(name)) value += ` (${(100 * Math.exp(number(value))).toPrecision(3)} %)`;
        pairs.push([name, value]);
      }
    });
    fill(pane, title || row.cells[0].textContent, pairs);
  };

  // One stop of the Tab key for a list; arrows move inside it.
  const roving = (box, items, pane, lines) => {
    let current = items().find((one) => one.tabIndex === 0);
    const shown = (one) => one.getClientRects().length > 0;
    const select = (one, focus) => {
      if (current) {
        current.tabIndex = -1;
        if (current.role === "option" || current.getAttribute("role") === "option") current.setAttribute("aria-selected", "false");
      }
      current = one;
      one.tabIndex = 0;
      if (one.getAttribute("role") === "option") one.setAttribute("aria-selected", "true");
      tell(pane, one);
      if (focus) one.focus();
    };
    box.addEventListener("focusin", (event) => {
      const one = event.target.closest("[tabindex]");
      if (one && one !== box && items().includes(one)) select(one, false);
    });
    box.addEventListener("mouseover", (event) => {
      const one = event.target.closest("[tabindex]");
      if (one && one !== box) tell(pane, one);
    });
    box.addEventListener("mouseleave", () => {
      if (current && current.getAttribute("aria-selected") === "true") tell(pane, current);
    });
    box.addEventListener("click", (event) => {
      const one = event.target.closest("[tabindex]");
      if (one && one !== box) select(one, true);
    });
    box.addEventListener("keydown", (event) => {
      const list = items().filter(shown);
      const at = list.indexOf(current);
      let next;
      if (event.key === "Home") next = list[0];
      else if (event.key === "End") next = list[list.length - 1];
      else next = lines(event.key, list, at);
      if (event.key === "Enter" || event.key === " ") {
        for (let one = current && current.previousElementSibling; one && one.classList.contains("d"); one = one.previousElementSibling)
          one.classList.toggle("open");
        event.preventDefault();
      }
      if (!next) return;
      event.preventDefault();
      select(next, true);
    });
  };
  const middle = (one) => {
    const box = one.getClientRects()[0];
    return [(box.left + box.right) / 2, box.top];
  };
  // Up and down go to the token of the line above or below that is nearest.
  const inText = (key, list, at) => {
    if (key === "ArrowRight") return list[at + 1];
    if (key === "ArrowLeft") return list[at - 1];
    const way = { ArrowDown: 1, ArrowUp: -1 }[key];
    if (!way || at < 0) return undefined;
    const [x, y] = middle(list[at]);
    let best, line, gap = Infinity;
    for (let i = at + way; list[i]; i += way) {
      const [left, top] = middle(list[i]);
      if (Math.abs(top - y) < 12) continue;
      if (line === undefined) line = top;
      if (Math.abs(top - line) > 12) break;
      if (Math.abs(left - x) < gap) [best, gap] = [list[i], Math.abs(left - x)];
    }
    return best;
  };
  const inTree = (key, list, at) => {
    const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[key];
    if (!step || at < 0) return undefined;
    const [x, y] = [Number(list[at].getAttribute("cx")), Number(list[at].getAttribute("cy"))];
    const ahead = list.filter((one) => {
      const [dx, dy] = [one.getAttribute("cx") - x, one.getAttribute("cy") - y];
      return step[0] ? dx * step[0] > 0 : dx === 0 && dy * step[1] > 0;
    });
    const far = (one) => 4 * Math.abs(one.getAttribute("cx") - x) + Math.abs(one.getAttribute("cy") - y);
    return ahead.sort((a, b) => far(a) - far(b))[0];
  };

  for (const panel of all(document, ".row")) {
    const pane = panel.querySelector(".details");
    const text = panel.querySelector(".text");
    if (text) roving(text, () => all(text, "[role=option]"), pane, inText);
    // An SVG that listens for focus takes it itself in some browsers: what is around it listens.
    for (const tree of all(panel, ".tree")) {
      const around = tree.parentElement;
      roving(around, () => all(tree, "circle"), around.closest(".split").querySelector(".details"), inTree);
    }
    for (const box of all(panel, "input[type=checkbox]"))
      box.addEventListener("change", () => text.classList.toggle("drafts", box.checked));
    for (const button of all(panel, ".legend button"))
      button.addEventListener("click", () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(on));
        const kinds = all(panel, ".legend button[aria-pressed=true]").map((one) => one.dataset.kind);
        text.classList.toggle("dim", kinds.length > 0);
        for (const token of all(text, ".t")) token.classList.toggle("lit", kinds.some((kind) => token.classList.contains(kind)));
      });
  }
})();
