// reads a value off a chart under the pointer; without it the page says the same in its tables
for (const plot of document.querySelectorAll(".plot")) {
  const chart = JSON.parse(plot.querySelector("script").textContent);
  const svg = plot.querySelector("svg");
  const line = plot.appendChild(document.createElement("div"));
  const tip = plot.appendChild(document.createElement("output"));
  line.className = "cross";
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return x - xs[low] < xs[high] - x ? low : high;
  };
  plot.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    const step = chart.low + share * (chart.high - chart.low);
    if (!chart.series.length) return;
    const at = nearest(chart.series[0].x, step);
    const shown = ["step " + chart.series[0].x[at].toLocaleString("en-US")];
    for (const each of chart.series) {
      const y = each.y[nearest(each.x, step)];
      shown.push(each.name + " " + (Math.abs(y) >= 1e4 ? Math.round(y).toLocaleString("en-US") : y));
    }
    tip.textContent = shown.join("\n");
    tip.style.left = line.style.left = share * 100 + "%";
    plot.classList.add("read");
    tip.classList.toggle("left", share > 0.6);
  });
  plot.addEventListener("pointerleave", () => plot.classList.remove("read"));
}
